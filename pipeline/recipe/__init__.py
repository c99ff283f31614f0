"""Recipes: what to train, written down once, validated, frozen."""

from widemix.recipe.classes import check_init_from, fill_classes, match_folder
from widemix.recipe.error_messages import suggest
from widemix.recipe.files import (
    differences,
    dump_recipe,
    flat_recipe,
    load_recipe,
    load_stored_recipe,
    parse_recipe,
    recipe_hash,
)
from widemix.recipe.identity import experiment_hash, run_differences
from widemix.recipe.key_table import SECTIONS, key_names, keys, tables
from widemix.recipe.other_names import other_name
from widemix.recipe.schema import Recipe, check_world

__all__ = [
    "SECTIONS",
    "Recipe",
    "check_init_from",
    "check_world",
    "differences",
    "dump_recipe",
    "experiment_hash",
    "fill_classes",
    "flat_recipe",
    "key_names",
    "keys",
    "load_recipe",
    "load_stored_recipe",
    "match_folder",
    "other_name",
    "parse_recipe",
    "recipe_hash",
    "run_differences",
    "suggest",
    "tables",
]

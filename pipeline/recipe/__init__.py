"""Recipes: what to train, written down once, validated, frozen."""

from widemix.recipe.error_messages import suggest
from widemix.recipe.files import dump_recipe, load_recipe, load_stored_recipe
from widemix.recipe.key_table import SECTIONS, key_names, keys, tables
from widemix.recipe.other_names import other_name
from widemix.recipe.recipe import Recipe, check_init_from, fill_classes, match_folder, parse_recipe
from widemix.recipe.recipe_hash import differences, experiment_hash, flat_recipe, recipe_hash, run_differences
from widemix.recipe.rules import check_world

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

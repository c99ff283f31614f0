"""Every key of a recipe: whether a run may go on with another value, and whether it is another experiment."""

import pytest

from tests.conftest import ROOT
from widemix.recipe import experiment_hash, load_recipe, run_differences
from widemix.recipe.key_table import families, keys

# Keys that change no number of the training but by rounding, nor any metric of an evaluation: a run may change them.
FREE = {
    "data": "path workers checksums prefetch_batches prefetch_mib on_corrupt",
    "train": "max_steps profile save_every_steps save_minutes keep_last keep_best keep_every_steps grad_accum_steps "
    "patience_epochs patience_gain "
    "activation_checkpointing compile deterministic ema_device",
    "engine": "kind zero_stage cpu_offload deepspeed_config sharding bucket_cap_mb gradient_as_bucket_view "
    "static_graph memory_layout overlap_comm timeout_s",
    "eval": "every_epochs every_minutes batch_size",
    "log": "every tensorboard wandb mlflow block_norms mistakes images",
    "faults": "max_skipped_steps max_rollbacks loss_spike_std hang_timeout_s",
}
# Of these, keys whose value at the start makes other results: other data, or another length.
STARTS = {"data.path", "data.on_corrupt", "train.max_steps", "train.patience_epochs", "train.patience_gain"}
FREE_KEYS = {f"{section}.{name}" for section, names in FREE.items() for name in names.split()}


def with_value(recipe, name: str, value: object):
    """The recipe with another value of a key, whatever rules it breaks."""
    section, leaf = name.split(".")
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update={leaf: value})})


def recipes() -> dict[str, object]:
    """A recipe in which each key of a section is there."""
    base = load_recipe(ROOT / "recipes/digits/mixer.yaml")
    found = {}
    for name in keys():
        section, leaf = name.split(".")
        owner = next(family for family in families(section) if leaf in family.model_fields)
        present = type(getattr(base, section))
        part = getattr(base, section) if leaf in present.model_fields else owner.model_construct()
        found[name] = base.model_copy(update={section: part})
    return found


@pytest.mark.filterwarnings("ignore")  # of pydantic: the other values are of another type
def test_each_key_is_free_or_the_experiments_own():
    assert set(keys()) >= FREE_KEYS
    for name, recipe in recipes().items():
        other = with_value(recipe, name, "another")
        assert run_differences(recipe, other) == ([] if name in FREE_KEYS else [name]), name
        assert (experiment_hash(recipe) == experiment_hash(other)) == (name in FREE_KEYS - STARTS), name


def test_the_plugins_of_a_recipe_are_part_of_the_experiment():
    recipe = load_recipe("digits/mixer")
    one, other = (recipe.model_copy(update={"plugins": names}) for names in (("json",), ("json", "math")))
    assert run_differences(recipe, one) == run_differences(one, other) == ["plugins"]
    assert len({experiment_hash(each) for each in (recipe, one, other)}) == 3

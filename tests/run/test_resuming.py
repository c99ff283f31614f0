"""What a run folder accepts when a run is resumed: the same data, and changes that change no number."""

import shutil
from contextlib import ExitStack

import pytest
import torch

from tests.conftest import ROOT
from tests.run.test_checkpoint import position, state
from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.formats.manifest import manifest_json, read_manifest
from widemix.recipe import load_recipe
from widemix.run import checkpoint, lock, run_dir
from widemix.run.checkpoint import RetentionPolicy
from widemix.run.lock import hold
from widemix.run.run_dir import ResumeState, _acquire, acquire_run_dir, keep_origin

ALONE = Topology(0, 1, 0, 1, torch.device("cpu"))


def acquire(run, data, resume="auto", recipe="recipes/digits/mixer.yaml", **changes) -> ResumeState:
    overrides = [(name.replace("__", "."), value) for name, value in changes.items()]
    loaded = load_recipe(ROOT / recipe, [("data.path", str(data)), *overrides])
    found, lock = _acquire(run, loaded, resume, ALONE)
    lock.close()
    if found.checkpoint is None:  # as its first steps would
        (run / "metrics.jsonl").write_text("{}\n")
        saved = position(3, recipe=loaded.model_dump(mode="json"), data=found.data)
        checkpoint.save(run, state(), saved, RetentionPolicy(2))
    return found


@pytest.fixture
def without_ranks(monkeypatch):
    """What rank 0 does is done here."""
    monkeypatch.setattr(run_dir, "on_main", lambda _, act: act())


@pytest.fixture
def copied(digits, tmp_path):
    """The prepared digits, under another path."""
    return shutil.copytree(digits, tmp_path / "copied")


def change(folder, split: str) -> None:
    """Other bytes in a split, by its manifest."""
    manifest = read_manifest(folder)
    blocks = tuple("0" * len(block) for block in manifest.splits[split].blocks)
    splits = manifest.splits | {split: manifest.splits[split].model_copy(update={"blocks": blocks})}
    (folder / "manifest.json").write_text(manifest_json(manifest.model_copy(update={"splits": splits})))


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_data_may_move_but_not_change(digits, copied, tmp_path, split):
    run = tmp_path / "run"
    assert acquire(run, digits).data
    assert acquire(run, copied).step == 3
    change(copied, split)
    with pytest.raises(InputError, match=rf"copied: {split}.beton is not the file that .*/00000003 was trained with"):
        acquire(run, copied)
    with pytest.raises(InputError, match=r"train.init_from, which takes weights alone"):
        acquire(tmp_path / "other", copied, resume=str(run))
    assert acquire(run, digits).step == 3


def test_micro_batches_may_change_where_no_batch_norm_sees_them(digits, tmp_path):
    acquire(tmp_path / "mixer", digits)
    assert acquire(tmp_path / "mixer", digits, train__grad_accum_steps="2").step == 3
    normed = {"recipe": "tests/engine/repmlp.yaml"}
    acquire(tmp_path / "repmlp", digits, **normed)
    with pytest.raises(InputError, match=r"another recipe \(train.grad_accum_steps differ\)"):
        acquire(tmp_path / "repmlp", digits, **normed, train__grad_accum_steps="2")


def test_the_network_may_not_change(digits, tmp_path):
    acquire(tmp_path / "run", digits)
    with pytest.raises(InputError, match=r"another recipe \(model.drop_path differ\)"):
        acquire(tmp_path / "run", digits, model__drop_path="0.1")


def test_a_run_that_started_from_another_goes_on_by_the_same_command(digits, tmp_path):
    """Also where the other has gone on, or is gone; and without --resume it does not begin anew."""
    base, run = tmp_path / "base", tmp_path / "run"
    acquire(base, digits)
    loaded = load_recipe(ROOT / "recipes/digits/mixer.yaml", [("data.path", str(digits))])

    def begin(resume):
        found, held = _acquire(run, loaded, resume, ALONE)
        held.close()
        return found

    first = begin(str(base))
    assert first.is_of_another_run
    assert begin(str(base)).is_of_another_run  # killed before it had begun
    keep_origin(first)
    (run / "metrics.jsonl").write_text("{}\n")
    checkpoint.save(base, state(2.0), first.checkpoint.position.model_copy(update={"step": 4}), RetentionPolicy(1))
    assert not first.checkpoint.path.exists()
    for resume in (str(base), str(first.checkpoint.path), "auto"):
        found = begin(resume)
        assert (found.step, found.is_of_another_run) == (3, False)
        found.checkpoint.verify()
    for resume in (str(run), "never", str(tmp_path)):
        with pytest.raises(InputError, match="holds a run already"):
            begin(resume)


def test_what_a_run_has_started_from_is_found_again_where_it_could_not_be_kept(digits, tmp_path):
    base, run = tmp_path / "base", tmp_path / "run"
    acquire(base, digits)
    loaded = load_recipe(ROOT / "recipes/digits/mixer.yaml", [("data.path", str(digits))])
    for resume in (str(base), "auto"):
        found, held = _acquire(run, loaded, resume, ALONE)
        held.close()
        assert (found.step, found.is_of_another_run) == (3, True)
        keep_origin(found)
        shutil.rmtree(run / "checkpoints")
        (run / "metrics.jsonl").write_text("{}\n")
    shutil.rmtree(base)
    with pytest.raises(InputError, match="base/checkpoints/00000003: no such run or checkpoint folder"):
        _acquire(run, loaded, "auto", ALONE)


@pytest.mark.usefixtures("without_ranks")
def test_the_one_of_two_that_comes_second_leaves_the_folder_to_the_first(digits, tmp_path, monkeypatch):
    """Even where it made the folder, and the other was faster to lock it."""
    run, loaded = tmp_path / "run", load_recipe(ROOT / "recipes/digits/mixer.yaml", [("data.path", str(digits))])
    monkeypatch.setattr(lock, "KILLED_S", 0.1)
    with ExitStack() as winner:

        def after_another(folder):
            monkeypatch.setattr(run_dir, "hold", hold)
            winner.enter_context(acquire_run_dir(run, loaded, "auto", ALONE))
            return hold(folder)

        monkeypatch.setattr(run_dir, "hold", after_another)
        with pytest.raises(InputError, match="is writing there"), acquire_run_dir(run, loaded, "auto", ALONE):
            pass
        assert {path.name for path in run.iterdir()} == {".lock", "recipe.yaml", "environment.json"}


@pytest.mark.usefixtures("without_ranks")
@pytest.mark.parametrize("there", [True, False])
def test_a_folder_is_removed_only_by_who_made_it(digits, tmp_path, there):
    run, loaded = tmp_path / "run", load_recipe(ROOT / "recipes/digits/mixer.yaml", [("data.path", str(digits))])
    if there:
        run.mkdir()
    with pytest.raises(InputError, match="no"), acquire_run_dir(run, loaded, "auto", ALONE):
        raise InputError("no")
    assert run.exists() == there


@pytest.mark.parametrize(("step", "due", "begins"), [(3, False, False), (3, True, True), (5, False, True)])
def test_a_start_begins_with_the_evaluation_of_its_checkpoint_where_it_is_due_or_at_the_end(
    tmp_path, step, due, begins
):
    """At the end: the run was killed before it had its result, and its last evaluation is made again."""
    checkpoint.save(tmp_path, state(), position(step, evaluation_due=due), RetentionPolicy(1))
    assert ResumeState(tmp_path, checkpoint.newest(tmp_path)).evaluates(last_step=5) is begins
    assert not ResumeState(tmp_path).evaluates(last_step=0)

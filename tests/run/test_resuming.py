"""What a run folder accepts when a run is resumed: the same data, and changes that change no number."""

import json
import os
import re
import shutil
from contextlib import ExitStack, nullcontext

import pytest
import torch

from tests.conftest import ROOT
from tests.run.test_checkpoint import position, state
from widemix import lock
from widemix.distributed.topology import Topology
from widemix.errors import InputError, RunError
from widemix.formats.manifest import Prepared, manifest_json, read_manifest
from widemix.lock import hold
from widemix.recipe import dump_recipe, load_recipe, recipe_hash
from widemix.run import checkpoint, run_dir
from widemix.run.checkpoint import RetentionPolicy
from widemix.run.run_dir import (
    ResumeState,
    _acquire,
    _check_usable,
    _find_checkpoint,
    acquire_run_dir,
    keep_origin,
    read_skipped_ranges,
    write_result,
    write_skipped_ranges,
)

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


def test_a_complete_run_keeps_the_recipe_and_the_environment_that_it_was_trained_with(digits, tmp_path):
    acquire(tmp_path, digits)
    for complete in (False, True):
        if complete:
            (tmp_path / "done.json").write_text('{"step": 3}')
        (tmp_path / "environment.json").write_text("{}")
        found = acquire(tmp_path, digits, log__every="88" if complete else "77")
        assert found.environment["ranks"] == 1
        assert found.done == ({"step": 3} if complete else None)
        assert "every: 77" in (tmp_path / "recipe.yaml").read_text()
        assert ((tmp_path / "environment.json").read_text() == "{}") is complete


def test_the_network_may_not_change(digits, tmp_path):
    acquire(tmp_path / "run", digits)
    with pytest.raises(InputError, match=r"another recipe \(model.drop_path differ\)"):
        acquire(tmp_path / "run", digits, model__drop_path="0.1")


def test_a_run_that_started_from_another_goes_on_by_the_same_command(digits, tmp_path, monkeypatch):
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
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(base)
    for resume in (str(base), "base", "link", str(first.checkpoint.path), "auto"):
        found = begin(resume)
        assert (found.step, found.is_of_another_run) == (3, False)
        found.checkpoint.verify()
    for resume in (str(run), "never", str(tmp_path), str(base / "checkpoints")):
        with pytest.raises(InputError, match="holds a run already"):
            begin(resume)


def test_what_a_run_has_started_from_is_found_again_where_it_could_not_be_kept(digits, tmp_path, monkeypatch):
    """From wherever the same command is given."""
    base, run = tmp_path / "base", tmp_path / "run"
    acquire(base, digits)
    loaded = load_recipe(ROOT / "recipes/digits/mixer.yaml", [("data.path", str(digits))])
    for resume, place in (("base", tmp_path), ("auto", digits), (str(base), digits)):
        monkeypatch.chdir(place)
        found, held = _acquire(run, loaded, resume, ALONE)
        held.close()
        assert (found.step, found.is_of_another_run) == (3, True)
        keep_origin(found)
        (run / "checkpoints/00000003/model.safetensors").unlink()
        again, problems = _find_checkpoint(run, loaded, resume, found.data)
        assert again.path == found.checkpoint.path.resolve()
        assert ["00000003: cannot be loaded" in problem for problem in problems] == [True]
        shutil.rmtree(run / "checkpoints")
        (run / "metrics.jsonl").write_text("{}\n")
        later = found.checkpoint.position.model_copy(update={"step": 4})  # of the other, which goes on
        checkpoint.save(base, state(2.0), later, RetentionPolicy(9))
    shutil.rmtree(base)
    with pytest.raises(InputError, match="base/checkpoints/00000003: no such run or checkpoint folder"):
        _acquire(run, loaded, "auto", ALONE)


@pytest.mark.parametrize(
    "name",
    [
        *("checkpoints", "checkpoints/00000003", "checkpoints/00000003/COMPLETE", "checkpoints/.writing-4"),
        *(".lock", "leases", "leases/run.1", "recipe.yaml", ".recipe.yaml", "done.json", "skipped_ranges.json"),
        *("metrics.jsonl", "metrics.superseded.jsonl", "starts.jsonl", "events.out.tfevents.1.n", "trackers.json"),
        *("images", "images/.first_batch.png", "stacks", "stacks/rank-0.txt", "profile", "wandb", "slurm"),
    ],
)
def test_no_link_in_a_run_folder_is_followed(digits, tmp_path, name):
    """Of one that someone has sent: what a link leads to is neither written nor removed."""
    run, theirs = tmp_path / "run", tmp_path / "theirs"
    acquire(run, digits)
    (theirs / "2024").mkdir(parents=True)
    content = (run / name).read_bytes() if (run / name).is_file() else b"years of work"
    (theirs / "2024/data").write_bytes(content)
    shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink(missing_ok=True)
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(theirs / ("2024/data" if "." in name else ""))
    before = sorted(path.lstat().st_mtime_ns for path in [*run.rglob("*"), *theirs.rglob("*")])
    with pytest.raises(InputError, match=rf"{re.escape(str(run / name))}: is a link to {theirs}.*; put that itself"):
        acquire(run, digits)
    assert sorted(path.lstat().st_mtime_ns for path in [*run.rglob("*"), *theirs.rglob("*")]) == before


@pytest.mark.parametrize(
    "name", [".lock", ".recipe.yaml", "metrics.jsonl", "leases/run.1", "images/.first_batch.png"]
)
def test_no_pipe_in_a_run_folder_is_waited_at(digits, tmp_path, name):
    acquire(tmp_path / "run", digits)
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / "run" / name)
    with pytest.raises(InputError, match=rf"run/{re.escape(name)}: is not a regular file; remove it"):
        acquire(tmp_path / "run", digits)


def test_links_that_weights_and_biases_makes_are_its_own(digits, tmp_path):
    acquire(tmp_path / "run", digits)
    (tmp_path / "run/wandb/run-1").mkdir(parents=True)
    (tmp_path / "run/wandb/latest-run").symlink_to("run-1")
    acquire(tmp_path / "run", digits)


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
        assert {path.name for path in run.iterdir()} == {".lock", "leases", "recipe.yaml", "environment.json"}


@pytest.mark.usefixtures("without_ranks")
@pytest.mark.parametrize("there", [True, False])
def test_a_folder_is_removed_only_by_who_made_it(digits, tmp_path, there):
    run, loaded = tmp_path / "run", load_recipe(ROOT / "recipes/digits/mixer.yaml", [("data.path", str(digits))])
    if there:
        run.mkdir()
    with pytest.raises(InputError, match="no"), acquire_run_dir(run, loaded, "auto", ALONE):
        raise InputError("no")
    assert run.exists() == there


@pytest.mark.usefixtures("without_ranks")
@pytest.mark.parametrize(
    ("written", "error", "stays"),
    [
        ("deepspeed.json", InputError, False),
        ("metrics.jsonl", InputError, True),
        ("deepspeed.json", KeyboardInterrupt, True),
        ("deepspeed.json", RunError, True),
    ],
)
def test_a_folder_is_removed_only_by_a_mistake_before_the_first_line(digits, tmp_path, written, error, stays):
    run, loaded = tmp_path / "run", load_recipe(ROOT / "recipes/digits/mixer.yaml", [("data.path", str(digits))])

    def start():
        with acquire_run_dir(run, loaded, "auto", ALONE):
            (run / written).write_text("{}")
            raise error

    with pytest.raises(error):
        start()
    assert run.exists() is stays
    if stays:
        assert {path.name for path in run.iterdir()} == {".lock", "recipe.yaml", "environment.json", written}


@pytest.mark.usefixtures("without_ranks")
def test_a_mistake_is_said_though_the_folder_has_been_removed_meanwhile(digits, tmp_path):
    run = tmp_path / "run"

    def start():
        with acquire_run_dir(run, mixer(data__path=str(digits)), "auto", ALONE):
            shutil.rmtree(run)
            raise InputError("no such key")

    with pytest.raises(InputError, match="no such key"):
        start()
    assert not run.exists()


@pytest.mark.usefixtures("without_ranks")
def test_a_folder_is_locked_until_the_run_has_ended_whichever_way(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "KILLED_S", 0.1)
    run = tmp_path / "run"

    def start():
        with acquire_run_dir(run, mixer(data__path=str(digits)), "auto", ALONE):
            (run / "metrics.jsonl").write_text("{}\n")
            with pytest.raises(InputError, match="is writing there"), hold(run):
                pass
            raise RunError("the loss is nan")

    for _ in range(2):
        with pytest.raises(RunError, match="the loss is nan"):
            start()


@pytest.mark.parametrize(
    ("step", "due", "begins"), [(3, False, False), (3, True, True), (5, False, True), (6, False, True)]
)
def test_a_start_begins_with_the_evaluation_of_its_checkpoint_where_it_is_due_or_at_the_end(
    tmp_path, step, due, begins
):
    """At the end: the run was killed before it had its result, and its last evaluation is made again."""
    checkpoint.save(tmp_path, state(), position(step, evaluation_due=due), RetentionPolicy(1))
    assert ResumeState(tmp_path, checkpoint.newest(tmp_path)).evaluates(last_step=5) is begins
    assert not ResumeState(tmp_path).evaluates(last_step=0)


@pytest.mark.parametrize(
    ("done", "last_step", "complete"),
    [({"step": 5}, 4, True), ({"step": 5}, 5, True), ({"step": 5}, 6, False), ({}, 3, True), ({}, 4, False)],
)
def test_a_run_is_complete_by_the_steps_of_its_result(tmp_path, done, last_step, complete):
    """Those of old versions, which did not note them, by the steps of the checkpoint."""
    checkpoint.save(tmp_path, state(), position(3), RetentionPolicy(1))
    assert ResumeState(tmp_path, checkpoint.newest(tmp_path), done).is_complete(last_step) is complete
    assert not ResumeState(tmp_path, checkpoint.newest(tmp_path)).is_complete(last_step)


def test_a_run_reached_by_a_link_is_no_other_run(tmp_path):
    run, link = tmp_path / "run", tmp_path / "link"
    run.mkdir()
    link.symlink_to(run)
    checkpoint.save(run, state(), position(3), RetentionPolicy(1))
    for one, other in ((run, link), (link, run)):
        assert not ResumeState(one, checkpoint.newest(other)).is_of_another_run


def test_a_start_knows_what_is_skipped_and_what_is_damaged_and_finds_what_was_being_replaced(digits, tmp_path):
    first = acquire(tmp_path, digits)
    assert first.prepared == Prepared.of(read_manifest(digits))
    assert (first.skipped_ranges, first.problems) == ([], [])
    write_skipped_ranges(tmp_path, [(9, 12), (3, 7)])
    checkpoint.save(tmp_path, state(), position(5), RetentionPolicy(2))
    (tmp_path / "checkpoints/00000005/model.safetensors").write_bytes(b"damaged")
    (tmp_path / "checkpoints/00000003").rename(tmp_path / "checkpoints/.replaced-00000003")
    found = acquire(tmp_path, digits)
    assert (found.step, found.skipped_ranges) == (3, [(9, 12), (3, 7)])
    assert found.prepared == first.prepared
    (problem,) = found.problems
    assert "00000005/model.safetensors: is damaged" in problem


@pytest.mark.parametrize("content", ["[[3, 7]", "[[3]]", '[["a", 7]]', "[3]", '{"3": 7}', "{}", '""'])
def test_damaged_skipped_ranges_are_named(tmp_path, content):
    assert read_skipped_ranges(tmp_path) == []
    (tmp_path / "skipped_ranges.json").write_text(content)
    with pytest.raises(InputError, match=r"skipped_ranges.json: cannot be read \("):
        read_skipped_ranges(tmp_path)


def mixer(**changes):
    overrides = [(name.replace("__", "."), value) for name, value in changes.items()]
    return load_recipe(ROOT / "recipes/digits/mixer.yaml", overrides)


@pytest.mark.parametrize(
    ("name", "content", "is_result"),
    [
        ("metrics.jsonl", "{}", True),
        ("metrics.jsonl", "", False),
        ("metrics.superseded.jsonl", "{}", True),
        ("done.json", "{}", True),
        ("checkpoints/00000003/COMPLETE", "{}", True),
        ("checkpoints/00000003/model.safetensors", "", False),
        ("environment.json", "{}", False),
    ],
)
def test_a_folder_takes_another_recipe_until_it_has_a_result_of_the_first(tmp_path, name, content, is_result):
    (tmp_path / "recipe.yaml").write_text(dump_recipe(mixer()))
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(content)
    _check_usable(tmp_path, mixer(), "auto")
    with pytest.raises(InputError) if is_result else nullcontext() as raised:
        _check_usable(tmp_path, mixer(optim__lr="0.1"), "auto")
    assert not is_result or "with another recipe (optim.lr differ)" in str(raised.value)
    with pytest.raises(InputError, match="holds a run already") if is_result else nullcontext():
        _check_usable(tmp_path, mixer(), "never")


def test_only_a_complete_run_says_that_its_epochs_are_over(tmp_path):
    (tmp_path / "recipe.yaml").write_text(dump_recipe(mixer()))
    longer, other = {"train__epochs": "90"}, {"train__epochs": "90", "optim__lr": "0.1"}
    for name, changes, says in (
        ("metrics.jsonl", longer, "with another recipe (train.epochs differ)"),
        ("done.json", other, "with another recipe ("),
        ("done.json", longer, "is complete, after train.epochs 30"),
    ):
        (tmp_path / name).write_text("{}")
        with pytest.raises(InputError) as raised:
            _check_usable(tmp_path, mixer(**changes), "auto")
        assert says in str(raised.value)


def test_what_a_job_leaves_in_a_folder_before_the_first_start_is_no_run_and_anything_else_is_refused(tmp_path):
    for name in (".lock", ".recipe.yaml", "leases", "slurm"):
        (tmp_path / name).mkdir()
    _check_usable(tmp_path, mixer(), "auto")
    _check_usable(tmp_path, mixer(), "never")
    (tmp_path / "lock").touch()
    with pytest.raises(InputError, match="is not empty and not a run folder"):
        _check_usable(tmp_path, mixer(), "auto")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data.train_split", "test"),
        ("data.order", "paged"),
        ("data.memory_gib", "3"),
        ("data.shuffle_window_mib", "5"),
        ("train.global_batch", "32"),
        ("train.seed", "7"),
        ("augment.aug_repeats", "2"),
        ("model.drop_path", "0.1"),
        ("optim.name", "sgd"),
        ("optim.lr", None),
        ("train.epochs", None),
        ("augment.hflip", None),
        ("data.workers", None),
        ("eval.batch_size", None),
    ],
)
def test_a_run_goes_on_from_another_only_with_its_network_its_optimizer_and_its_order_of_the_data(
    tmp_path, name, value
):
    """Anything else, such as learning rates, may differ."""
    saved = position(3, recipe=mixer().model_dump(mode="json"), data={"train.beton": "1", "other.beton": "2"})
    path = checkpoint.save(tmp_path, state(), saved, RetentionPolicy(1))
    changed = mixer(**{name: value or {"augment.hflip": "0.25", "optim.lr": "0.1"}.get(name, "3")})
    data = {"train.beton": "1", "test.beton": "3"}
    if value:
        with pytest.raises(InputError, match=rf"\({name} differ\); train.init_from takes weights alone"):
            _find_checkpoint(tmp_path / "new", changed, str(tmp_path), data)
        return
    assert _find_checkpoint(tmp_path / "new", changed, str(tmp_path), data)[0].path == path
    assert _find_checkpoint(tmp_path / "new", changed, "never", data) == (None, [])
    (path / "optimizer.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"optimizer.safetensors: is damaged"):
        _find_checkpoint(tmp_path / "new", changed, str(tmp_path), data)


def test_the_result_has_the_recipes_hash(tmp_path):
    done = write_result(tmp_path, mixer(), {"top1": 50.0, "step": 3})
    assert done == {"top1": 50.0, "step": 3, "recipe": recipe_hash(mixer())}
    assert json.loads((tmp_path / "done.json").read_text()) == done


@pytest.mark.parametrize("content", [b"[]", b"\xff", b"3", None])
def test_a_damaged_result_is_named_and_not_taken_for_none(digits, tmp_path, content):
    if content is None:
        (tmp_path / "done.json").mkdir()
    else:
        (tmp_path / "done.json").write_bytes(content)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(mixer(data__path=str(digits))))
    with pytest.raises(InputError, match=rf"^{tmp_path}/done.json: cannot be read \(.*; remove it to continue"):
        _acquire(tmp_path, mixer(data__path=str(digits)), "auto", ALONE)


def test_a_run_folder_may_be_a_link_and_what_it_starts_from_is_noted_before_it_is_kept(tmp_path, monkeypatch):
    base, run, link = (tmp_path / name for name in ("base", "run", "link"))
    for folder in (base, run):
        folder.mkdir()
    link.symlink_to(run)
    _check_usable(link, mixer(), "auto")
    path = checkpoint.save(base, state(), position(3), RetentionPolicy(1))

    def refuse(*_):
        raise OSError("there is no space left")

    monkeypatch.setattr(checkpoint, "keep", refuse)
    with pytest.raises(OSError, match="there is no space left"):
        keep_origin(ResumeState(link, checkpoint.read(path)))
    assert json.loads((run / "origin.json").read_text()) == {"checkpoint": str(path), "step": 3}


@pytest.mark.parametrize(("before", "now"), [("1", "2"), ("2", "1"), ("4", "2")])
def test_micro_batches_of_batch_norms_become_neither_more_nor_fewer(tmp_path, before, now):
    recipes = [load_recipe(ROOT / "tests/engine/repmlp.yaml", [("train.grad_accum_steps", n)]) for n in (before, now)]
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipes[0]))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    _check_usable(tmp_path, recipes[0], "auto")
    with pytest.raises(InputError, match=r"another recipe \(train.grad_accum_steps differ\)"):
        _check_usable(tmp_path, recipes[1], "auto")

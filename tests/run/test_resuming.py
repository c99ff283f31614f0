"""What a run folder accepts when a run is resumed: the same data, and changes that change no number."""

import json
import os
import re
import shutil
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.run.saved import ALONE, position, state
from widemix import lock
from widemix.errors import InputError, RunError
from widemix.formats.manifest import Prepared, manifest_json, read_manifest
from widemix.lock import hold
from widemix.recipe import dump_recipe, load_recipe, recipe_hash
from widemix.run import checkpoint
from widemix.run.checkpoint import RetentionPolicy
from widemix.run.resume import ResumeState, keep_origin, read_skipped_ranges, write_skipped_ranges
from widemix.run.run_dir import (
    acquire_run_dir,
    write_result,
)

pytestmark = pytest.mark.usefixtures("alone", "quick")

MIXER, NORMED = "recipes/digits/mixer.yaml", "tests/engine/repmlp.yaml"
LONGER = {"train.epochs": "90"}


def recipe_of(data, changes=(), recipe=MIXER):
    return load_recipe(ROOT / recipe, [("data.path", str(data)), *dict(changes).items()])


def acquire(run, data, resume="auto", changes=(), recipe=MIXER) -> ResumeState:
    """Where a run starts that ends at once."""
    with acquire_run_dir(run, recipe_of(data, changes, recipe), resume, ALONE) as found:
        return found


def begin(run, data, changes=(), recipe=MIXER, step: int = 3) -> ResumeState:
    """A run that has trained to a step."""
    found = acquire(run, data, "auto", changes, recipe)
    (run / "metrics.jsonl").write_text("{}\n")
    dumped = recipe_of(data, changes, recipe).model_dump(mode="json")
    checkpoint.save(run, state(), position(step, recipe=dumped, data=found.data), RetentionPolicy(2))
    return found


@pytest.fixture
def copied(digits, tmp_path):
    """The prepared digits, under another path."""
    return shutil.copytree(digits, tmp_path / "copied")


def other_bytes(folder, split: str) -> None:
    """Other bytes in a split, by its manifest."""
    manifest = read_manifest(folder)
    blocks = tuple("0" * len(block) for block in manifest.splits[split].blocks)
    splits = manifest.splits | {split: manifest.splits[split].model_copy(update={"blocks": blocks})}
    (folder / "manifest.json").write_text(manifest_json(manifest.model_copy(update={"splits": splits})))


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_data_may_move_but_not_change(digits, copied, tmp_path, split):
    run = tmp_path / "run"
    assert begin(run, digits).data
    assert acquire(run, copied).step == 3
    other_bytes(copied, split)
    for name, resume in (("run", "auto"), ("other", str(run))):
        with pytest.raises(
            InputError,
            match=rf"copied: {split}.beton is not the file that .*/00000003 was trained with; .*train.init_from",
        ):
            acquire(tmp_path / name, copied, resume)
    assert acquire(run, digits).step == 3


@pytest.mark.parametrize(
    ("recipe", "before", "now", "differs"),
    [
        (MIXER, {}, {"train.grad_accum_steps": "2"}, None),
        (MIXER, {}, {"model.drop_path": "0.1"}, "model.drop_path"),
        (MIXER, {}, LONGER, "train.epochs"),
        *(
            (NORMED, {"train.grad_accum_steps": one}, {"train.grad_accum_steps": other}, "train.grad_accum_steps")
            for one, other in (("1", "2"), ("2", "1"), ("4", "2"))
        ),
    ],
)
def test_a_run_goes_on_with_what_changes_no_number(digits, tmp_path, recipe, before, now, differs):
    """The batch of a batch norm is a micro-batch."""
    begin(tmp_path / "run", digits, before, recipe)
    said = re.escape(f"was started with another recipe ({differs} differ); name another folder")
    with pytest.raises(InputError, match=said) if differs else nullcontext():
        assert acquire(tmp_path / "run", digits, "auto", now, recipe).step == 3


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
def test_a_folder_takes_another_recipe_until_it_has_results(digits, tmp_path, name, content, is_result):
    for number, (changes, resume, said) in enumerate(
        (
            ({"optim.lr": "0.1"}, "auto", r"with another recipe \(optim.lr differ\)"),
            ({}, "never", "holds a run already; --resume never needs a new folder"),
        )
    ):
        run = tmp_path / str(number)
        (run / name).parent.mkdir(parents=True)
        (run / "recipe.yaml").write_text(dump_recipe(recipe_of(digits)))
        (run / name).write_text(content)
        with pytest.raises(InputError, match=said) if is_result else nullcontext():
            acquire(run, digits, resume, changes)


def test_only_a_complete_run_says_that_its_epochs_are_over(digits, tmp_path):
    begin(tmp_path, digits)
    (tmp_path / "done.json").write_text("{}")
    for changes, said in ((LONGER | {"optim.lr": "0.1"}, "recipe ("), (LONGER, "is complete, after train.epochs 30")):
        with pytest.raises(InputError, match=re.escape(said)):
            acquire(tmp_path, digits, changes=changes)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["lock"], "is not empty and not a run folder"),
        ([".lock", ".recipe.yaml"], None),
        (["leases/run.0", "slurm/1"], None),
    ],
)
def test_what_a_job_leaves_before_is_no_run(digits, tmp_path, names, said):
    for number, resume in enumerate(("auto", "never")):
        for name in names:
            (tmp_path / f"{number}/{name}").parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / f"{number}/{name}").touch()
        with pytest.raises(InputError, match=said) if said else nullcontext():
            acquire(tmp_path / str(number), digits, resume)


def test_a_complete_run_keeps_its_recipe_and_environment(digits, tmp_path):
    begin(tmp_path, digits)
    for complete in (False, True):
        if complete:
            (tmp_path / "done.json").write_text('{"step": 3}')
        (tmp_path / "environment.json").write_text("{}")
        found = acquire(tmp_path, digits, changes={"log.every": "88" if complete else "77"})
        assert found.environment["ranks"] == 1
        assert found.done == ({"step": 3} if complete else None)
        assert "every: 77" in (tmp_path / "recipe.yaml").read_text()
        assert ((tmp_path / "environment.json").read_text() == "{}") is complete


def test_a_run_that_started_from_another_goes_on_likewise(digits, tmp_path, monkeypatch):
    """Also where the other has gone on, or is gone; and without --resume it does not begin anew."""
    base, run, link = tmp_path / "base", tmp_path / "run", tmp_path / "link"
    begin(base, digits)
    first = acquire(run, digits, str(base))
    assert first.is_of_another_run
    assert acquire(run, digits, str(base)).is_of_another_run  # killed before it had begun
    keep_origin(first)
    (run / "metrics.jsonl").write_text("{}\n")
    checkpoint.save(base, state(2.0), first.checkpoint.position.model_copy(update={"step": 4}), RetentionPolicy(1))
    assert not first.checkpoint.path.exists()
    monkeypatch.chdir(tmp_path)
    link.symlink_to(base)
    for resume in (str(base), "base", "link", str(first.checkpoint.path), "auto"):
        found = acquire(run, digits, resume)
        assert (found.step, found.is_of_another_run) == (3, False)
        found.checkpoint.verify()
    for resume in (str(run), "never", str(tmp_path), str(base / "checkpoints")):
        with pytest.raises(InputError, match="holds a run already"):
            acquire(run, digits, resume)


def test_an_origin_that_could_not_be_kept_is_found_again(digits, tmp_path, monkeypatch):
    """From wherever the same command is given, and where the run folder is a link."""
    base, run, link = tmp_path / "base", tmp_path / "run", tmp_path / "link"
    run.mkdir()
    link.symlink_to(run)
    begin(base, digits)
    for resume, place in (("base", tmp_path), ("auto", digits), (str(base), digits)):
        monkeypatch.chdir(place)
        found = acquire(link, digits, resume)
        assert (found.step, found.is_of_another_run) == (3, True)
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        (run / "checkpoints").touch()  # in whose place no folder can be made
        with pytest.raises(OSError, match="checkpoints"):
            keep_origin(found)
        (run / "checkpoints").unlink()
        origin = {"checkpoint": str(found.checkpoint.path.resolve()), "step": 3}
        assert json.loads((run / "origin.json").read_text()) == origin
        keep_origin(found)
        (run / "checkpoints/00000003/model.safetensors").unlink()
        again = acquire(link, digits, resume)
        assert again.checkpoint.path == found.checkpoint.path.resolve()
        assert ["00000003: cannot be loaded" in problem for problem in again.problems] == [True]
        shutil.rmtree(run / "checkpoints")
        (run / "metrics.jsonl").write_text("{}\n")
        later = found.checkpoint.position.model_copy(update={"step": 4})  # of the other, which goes on
        checkpoint.save(base, state(2.0), later, RetentionPolicy(9))
    shutil.rmtree(base)
    with pytest.raises(InputError, match="base/checkpoints/00000003: no such run or checkpoint folder"):
        acquire(link, digits)


@pytest.mark.parametrize(
    ("name", "value", "may"),
    [
        ("data.train_split", "test", False),
        ("data.order", "paged", False),
        ("data.memory_gib", "3", False),
        ("data.shuffle_window_mib", "5", False),
        ("train.global_batch", "32", False),
        ("train.seed", "7", False),
        ("augment.aug_repeats", "2", False),
        ("model.drop_path", "0.1", False),
        ("optim.name", "sgd", False),
        ("optim.lr", "0.1", True),
        ("train.epochs", "3", True),
        ("augment.hflip", "0.25", True),
        ("data.workers", "3", True),
        ("eval.batch_size", "3", True),
    ],
)
def test_a_run_goes_on_from_one_of_its_network(digits, tmp_path, name, value, may):
    """Anything else, such as learning rates, may differ."""
    begin(tmp_path / "base", digits)
    changes = {name: value}
    said = rf"\({re.escape(name)} differ\); train.init_from takes weights alone"
    with nullcontext() if may else pytest.raises(InputError, match=said):
        found = acquire(tmp_path / "new", digits, str(tmp_path / "base"), changes)
    if not may:
        return
    assert found.checkpoint.path == tmp_path / "base/checkpoints/00000003"
    assert acquire(tmp_path / "never", digits, "never", changes).checkpoint is None
    (found.checkpoint.path / "optimizer.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"optimizer.safetensors: is damaged"):
        acquire(tmp_path / "again", digits, str(tmp_path / "base"), changes)


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
    begin(run, digits)
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
    begin(tmp_path, digits)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=rf"{re.escape(name)}: is not a regular file; remove it"):
        acquire(tmp_path, digits)


def test_links_that_weights_and_biases_makes_are_its_own(digits, tmp_path):
    begin(tmp_path, digits)
    (tmp_path / "wandb/run-1").mkdir(parents=True)
    (tmp_path / "wandb/latest-run").symlink_to("run-1")
    assert acquire(tmp_path, digits).step == 3


def test_a_run_has_its_folder_for_itself_until_it_ends(digits, tmp_path, monkeypatch):
    """Whichever way it ends; one that comes meanwhile leaves the folder to it."""
    monkeypatch.setattr(lock, "KILLED_S", 0.1)
    run, recipe = tmp_path / "run", recipe_of(digits)

    def start():
        with acquire_run_dir(run, recipe, "auto", ALONE):
            with pytest.raises(InputError, match="is writing there"), hold(run):
                pass
            with pytest.raises(InputError, match="is writing there"):
                acquire(run, digits)
            assert {path.name for path in run.iterdir()} == {".lock", "leases", "recipe.yaml", "environment.json"}
            raise RunError("the loss is nan")

    for _ in range(2):
        with pytest.raises(RunError, match="the loss is nan"):
            start()


def test_the_one_of_two_that_is_second_leaves_the_folder(digits, tmp_path, monkeypatch, system):
    """To the other, also where it made the folder, and that was faster to lock it."""
    monkeypatch.setattr(lock, "KILLED_S", 0.1)
    run, recipe, mkdir = tmp_path / "run", recipe_of(digits), Path.mkdir
    with ExitStack() as winner:

        def and_taken_by_another(path, *words, **options):
            mkdir(path, *words, **options)
            if path == run:
                system({"pathlib.Path.mkdir": mkdir})
                winner.enter_context(acquire_run_dir(run, recipe, "auto", ALONE))

        system({"pathlib.Path.mkdir": and_taken_by_another})
        with pytest.raises(InputError, match="is writing there"):
            acquire(run, digits)
        assert {path.name for path in run.iterdir()} == {".lock", "leases", "recipe.yaml", "environment.json"}


@pytest.mark.parametrize(
    ("there", "written", "error", "stays"),
    [
        (False, None, InputError, False),
        (True, None, InputError, True),
        (False, "deepspeed.json", InputError, False),
        (False, "gone", InputError, False),
        (False, "metrics.jsonl", InputError, True),
        (False, "deepspeed.json", KeyboardInterrupt, True),
        (False, "deepspeed.json", RunError, True),
    ],
)
def test_a_mistake_before_the_first_line_removes_a_new_folder(digits, tmp_path, there, written, error, stays):
    run = tmp_path / "run"
    if there:
        run.mkdir()

    def start():
        with acquire_run_dir(run, recipe_of(digits), "auto", ALONE):
            if written == "gone":
                shutil.rmtree(run)
            elif written:
                (run / written).write_text("{}")
            raise error("no such key")

    with pytest.raises(error, match="no such key"):
        start()
    assert run.exists() is stays
    left = {".lock", "recipe.yaml", "environment.json"} | ({written} if written else set())
    assert not stays or {path.name for path in run.iterdir()} - {"leases"} == left


@pytest.mark.parametrize(
    ("step", "due", "begins"), [(3, False, False), (3, True, True), (5, False, True), (6, False, True)]
)
def test_a_start_begins_with_an_evaluation_where_it_is_due(tmp_path, step, due, begins):
    """Or at the end: the run was killed before it had its result, and its last evaluation is made again."""
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
    (tmp_path / "link").symlink_to(tmp_path)
    for one, other in ((tmp_path, tmp_path / "link"), (tmp_path / "link", tmp_path)):
        assert not ResumeState(one, checkpoint.newest(other)).is_of_another_run


def test_a_start_knows_what_is_skipped_damaged_and_being_replaced(digits, tmp_path):
    first = begin(tmp_path, digits)
    assert first.prepared == Prepared.of(read_manifest(digits))
    assert (first.skipped_ranges, first.problems, first.step, first.data_step, first.seconds) == ([], [], 0, 0, 0.0)
    write_skipped_ranges(tmp_path, [(9, 12), (3, 7)])
    checkpoint.save(tmp_path, state(), position(5), RetentionPolicy(2))
    (tmp_path / "checkpoints/00000005/model.safetensors").write_bytes(b"damaged")
    (tmp_path / "checkpoints/00000003").rename(tmp_path / "checkpoints/.replaced-00000003")
    found = acquire(tmp_path, digits)
    assert (found.step, found.data_step, found.seconds, found.skipped_ranges) == (3, 3, 1.5, [(9, 12), (3, 7)])
    assert found.prepared == first.prepared
    (problem,) = found.problems
    assert "00000005/model.safetensors: is damaged" in problem


def test_the_result_has_the_recipes_hash(digits, tmp_path):
    done = write_result(tmp_path, recipe_of(digits), {"top1": 50.0, "step": 3})
    assert done == {"top1": 50.0, "step": 3, "recipe": recipe_hash(recipe_of(digits))}
    assert json.loads((tmp_path / "done.json").read_text()) == done


SKIPPED = ("[[3, 7]", "[[3]]", '[["a", 7]]', "[3]", '{"3": 7}', "{}", '""')


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("done.json", content) for content in (b"[]", b"\xff", b"3", None)),
        *(("skipped_ranges.json", text.encode()) for text in SKIPPED),
        *(("origin.json", content) for content in (b"[]", b"{")),
    ],
)
def test_a_damaged_file_is_not_taken_for_none(digits, tmp_path, name, content):
    assert read_skipped_ranges(tmp_path) == []
    (tmp_path / name).mkdir() if content is None else (tmp_path / name).write_bytes(content)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe_of(digits)))
    with pytest.raises(InputError, match=rf"^{tmp_path}/{name}: cannot be read \("):
        acquire(tmp_path, digits)

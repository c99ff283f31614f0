"""Checkpoints are complete or absent, whatever fails while they are written."""

import contextlib
import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from widemix.engine.state import State
from widemix.errors import InputError
from widemix.run import checkpoint
from widemix.run.checkpoint import Position, RetentionPolicy


def state(value: float = 1.0) -> State:
    weights = {"fc.weight": torch.full((3, 2), value), "fc.bias": torch.full((3,), value)}
    return State(weights, {f"exp_avg/{name}": tensor + 1 for name, tensor in weights.items()}, {"loss_scale": 2.0})


def position(step: int, **others) -> Position:
    fixed = {"seconds": 1.5, "scalars": {"loss_scale": 2.0}, "recipe": {}}
    return Position(**(fixed | {"step": step, "data_step": step, "metrics": {}} | others))


def folders(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


class Killed(BaseException):
    """The process ends there: nothing is tidied up."""


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Killed()], ids=["fails", "killed"])
@pytest.mark.parametrize("call", ["rename", "unlink", "fsync", "rmtree"])
def test_a_checkpoint_whose_step_is_saved_again_is_there_until_the_new_one_is(tmp_path, monkeypatch, call, error):
    """As after a stop that left its evaluation due: the only checkpoint, in each call that puts another there."""
    place = {"rename": Path, "unlink": Path, "fsync": os, "rmtree": shutil}[call]
    works, seen = getattr(place, call), []
    for number in range(1, 12):
        run = tmp_path / str(number)
        run.mkdir()
        checkpoint.save(run, state(1.0), position(7), RetentionPolicy(1))
        left = number

        def ends(*arguments, **options):
            nonlocal left
            left -= 1
            if left == 0:
                raise error
            return works(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(place, call, ends)
            with contextlib.suppress(OSError, Killed):
                checkpoint.save(run, state(2.0), position(7), RetentionPolicy(1))
        if left > 0:  # there is no such call left
            break
        checkpoint.put_back(run)  # as the next start does
        found = checkpoint.newest(run)
        seen.append(found.load().model["fc.bias"].tolist()[0])
        assert folders(run)[-1] == "00000007"
        checkpoint.save(run, state(3.0), position(7), RetentionPolicy(1))
        assert folders(run) == ["00000007"]
    assert seen
    assert set(seen) <= {1.0, 2.0}
    assert left > 0


def test_a_checkpoint_that_could_not_be_put_back_is_by_the_next_save(tmp_path):
    checkpoint.save(tmp_path, state(1.0), position(7), RetentionPolicy(2))
    (tmp_path / "checkpoints/00000007").rename(tmp_path / "checkpoints/.replaced-00000007")
    checkpoint.save(tmp_path, state(2.0), position(7), RetentionPolicy(2))
    assert folders(tmp_path) == ["00000007"]
    assert checkpoint.newest(tmp_path).load().model["fc.bias"].tolist()[0] == 2.0


def test_an_old_checkpoint_that_cannot_be_removed_is_no_failure_of_the_new_one(tmp_path, monkeypatch, capsys):
    def refused(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(39, "Directory not empty", str(path))

    checkpoint.save(tmp_path, state(1.0), position(1), RetentionPolicy(1))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refused)
        for step in (2, 3):
            saved = checkpoint.save(tmp_path, state(2.0), position(step), RetentionPolicy(1))
            assert saved.name == f"0000000{step}"
            assert "warning: " in (told := capsys.readouterr().err)
            assert f"0000000{step - 1}" in told
            assert checkpoint.newest(tmp_path).position.step == step
    checkpoint.save(tmp_path, state(3.0), position(4), RetentionPolicy(1))
    assert folders(tmp_path) == ["00000004"]


@pytest.mark.parametrize("call", ["rename", "mkdir", "write_text", "fsync"])
def test_whichever_call_fails_nothing_of_it_is_left(tmp_path, monkeypatch, call):
    """Not even where all is written and marked, and then cannot be flushed."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # which may take seconds
    checkpoint.save(tmp_path, state(), position(1), RetentionPolicy(2))
    failed = []
    # The two folders; state.json and the hashes; the final names of folder and marker; files and folders flushed.
    place = os if call == "fsync" else Path
    works = getattr(place, call)
    for number in range(1, 9):
        left = number

        def fails(*arguments, **options):
            nonlocal left
            left -= 1
            if left == 0:
                failed.append(number)  # noqa: B023
                raise OSError(28, "No space left on device")
            return works(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(place, call, fails)
            try:
                checkpoint.save(tmp_path, state(), position(2), RetentionPolicy(2))
            except OSError:
                assert folders(tmp_path) == ["00000001"]
                continue
        break
    assert failed
    assert folders(tmp_path) == ["00000001", "00000002"]
    assert checkpoint.newest(tmp_path).load().model["fc.bias"].tolist() == [1, 1, 1]
    files = [path for path in (tmp_path / "checkpoints/00000002").rglob("*") if path.is_file()]
    assert len({path.stat().st_mode for path in files}) == 1  # whoever may read one may read all


def test_folders_that_someone_else_has_named_are_left_alone(tmp_path):
    copied = checkpoint.save(tmp_path, state(), position(1), RetentionPolicy(1)).rename(
        tmp_path / "checkpoints/00000001-good"
    )
    (tmp_path / "checkpoints/notes").mkdir()
    for step in (2, 3):
        checkpoint.save(tmp_path, state(), position(step), RetentionPolicy(1, every=10))
    assert checkpoint.newest(tmp_path).position.step == 3
    assert folders(tmp_path) == ["00000001-good", "00000003", "notes"]
    assert checkpoint.find(copied).position.step == 1  # but by its own name


def test_everything_is_on_disk_before_the_checkpoint_is_marked_complete(tmp_path, monkeypatch):
    """A machine may lose its power between any two of these calls, and with it all that was not flushed."""
    calls = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor):
        calls.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def noted_rename(path, target):
        calls.append(("rename", path, target))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    with_ema = State(**vars(state()) | {"ema": state().model})
    final = checkpoint.save(tmp_path, with_ema, position(1), RetentionPolicy(2))
    folder, writing = final.parent, final.with_name(".writing-1")
    files = ["model.safetensors", "optimizer.safetensors", "state.json", "ema/model.safetensors", ".COMPLETE"]
    flushed = [*(writing / name for name in files), writing / "ema"]
    assert sorted(calls[: len(flushed)]) == sorted(("fsync", path) for path in flushed)
    assert calls[len(flushed) :] == [
        ("rename", writing, final),
        ("fsync", folder),
        ("rename", final / ".COMPLETE", final / "COMPLETE"),
        ("fsync", final),
    ]


def test_a_checkpoint_whose_removal_is_interrupted_is_never_read(tmp_path, monkeypatch):
    old = checkpoint.save(tmp_path, state(), position(1), RetentionPolicy(1))

    def interrupted(path):
        assert path == old
        (path / "model.safetensors").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, state(), position(2), RetentionPolicy(1))
    assert old.exists()
    assert [path.name for path in checkpoint.complete_checkpoints(tmp_path)] == ["00000002"]


def test_a_path_of_any_bytes_in_the_recipe_is_saved_and_read(tmp_path):
    recipe = {"data": {"path": os.fsdecode(b"/data/\xff")}}
    path = checkpoint.save(tmp_path, state(), position(3, recipe=recipe), RetentionPolicy(1))
    assert checkpoint.read(path).position.recipe == recipe


@pytest.mark.parametrize("content", [b'{"step": 1', b"\xff", None])
def test_one_whose_position_cannot_be_read_is_not_the_best_and_stops_no_save(tmp_path, content):
    for step, top1 in ((1, 90.0), (2, 50.0)):
        checkpoint.save(tmp_path, state(), position(step, metrics={"top1": top1}), RetentionPolicy(2, best="top1"))
    damaged = tmp_path / "checkpoints/00000001/state.json"
    damaged.unlink() if content is None else damaged.write_bytes(content)
    with pytest.raises(InputError, match=r"00000001/state.json: cannot be read \("):
        checkpoint.read(damaged.parent)
    checkpoint.save(tmp_path, state(), position(3, metrics={"top1": 40.0}), RetentionPolicy(1, best="top1"))
    assert folders(tmp_path) == ["00000002", "00000003"]


def test_a_damaged_checkpoint_stays_until_its_step_is_saved_again(tmp_path):
    for step in (1, 2):
        path = checkpoint.save(tmp_path, state(), position(step), RetentionPolicy(2))
    hashes = (path / "COMPLETE").read_bytes()
    checkpoint.mark_damaged(path)
    assert (path / "DAMAGED").read_bytes() == hashes
    checkpoint.save(tmp_path, state(), position(3), RetentionPolicy(1))
    assert folders(tmp_path) == ["00000002", "00000003"]
    assert not (path / "COMPLETE").exists()
    checkpoint.save(tmp_path, state(2.0), position(2), RetentionPolicy(2))
    assert not (path / "DAMAGED").exists()
    assert checkpoint.read(path).load().model["fc.bias"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("links", [True, False])
def test_a_checkpoint_of_another_run_is_kept_by_its_step_also_on_a_disk_without_links(tmp_path, monkeypatch, links):
    def refuse(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    run, ema = tmp_path / "run", State(**vars(state()) | {"ema": state(5.0).model})
    run.mkdir()
    origin = checkpoint.save(tmp_path, ema, position(7), RetentionPolicy(1)).rename(tmp_path / "good")
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    checkpoint.keep(checkpoint.read(origin), run)
    assert (origin / "model.safetensors").stat().st_nlink == 1 + links
    shutil.rmtree(origin)
    assert folders(run) == ["00000007"]
    assert checkpoint.newest(run).load().ema["fc.bias"].tolist() == [5, 5, 5]


@pytest.fixture
def quick(monkeypatch):
    """Without waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("content", [b"no tensors", None])
def test_what_cannot_be_loaded_unverified_is_said_too(tmp_path, content):
    path = checkpoint.save(tmp_path, state(), position(7), RetentionPolicy(1))
    damaged = path / "optimizer.safetensors"
    damaged.unlink() if content is None else damaged.write_bytes(content)
    with pytest.raises(InputError, match=rf"^{path}: cannot be loaded \("):
        checkpoint.read(path).load(verify=False)
    with pytest.raises(InputError, match=rf"^{path}: cannot" if content is None else rf"^{damaged}: is damaged \("):
        checkpoint.read(path).load()


@pytest.mark.usefixtures("quick")
def test_no_checkpoint_is_removed_where_every_step_is_kept_and_a_metric_may_be_0(tmp_path):
    for step, r2 in ((1, -0.5), (2, 0.0), (3, -0.25)):
        checkpoint.save(tmp_path, state(), position(step, metrics={"r2": r2}), RetentionPolicy(1, every=1))
    assert folders(tmp_path) == ["00000001", "00000002", "00000003"]
    assert checkpoint.best(tmp_path, "r2").name == "00000002"


@pytest.mark.usefixtures("quick")
def test_what_a_killed_save_of_another_step_has_left_is_removed(tmp_path):
    for name in (".writing-5", "00000006"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    checkpoint.save(tmp_path, state(), position(7), RetentionPolicy(1))
    assert folders(tmp_path) == ["00000007"]


@pytest.mark.usefixtures("quick")
def test_an_error_of_safetensors_is_one_of_the_disk_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    with pytest.raises(OSError, match=r"00000007: the checkpoint could not be written \(No space left"):
        checkpoint.save(tmp_path, state(), position(7), RetentionPolicy(1))
    assert folders(tmp_path) == []


@pytest.mark.usefixtures("quick")
def test_a_checkpoint_of_another_run_is_kept_where_a_killed_start_or_a_damaged_copy_was(tmp_path):
    origin = checkpoint.save(tmp_path, state(), position(7), RetentionPolicy(1)).rename(tmp_path / "good")
    (tmp_path / "checkpoints/.writing-00000007").mkdir()
    for damaged in (False, True):
        if damaged:
            checkpoint.mark_damaged(tmp_path / "checkpoints/00000007")
        checkpoint.keep(checkpoint.read(origin), tmp_path)
        assert folders(tmp_path) == ["00000007"]
        assert checkpoint.newest(tmp_path).load().scalars == {"loss_scale": 2.0}
    (tmp_path / "link").symlink_to(tmp_path)
    checkpoint.keep(checkpoint.newest(tmp_path), tmp_path / "link")
    assert checkpoint.newest(tmp_path).load().scalars == {"loss_scale": 2.0}


@pytest.mark.usefixtures("quick")
def test_each_checkpoint_that_was_being_replaced_is_put_back_or_removed(tmp_path):
    paths = [checkpoint.save(tmp_path, state(step), position(step), RetentionPolicy(9)) for step in (5, 7, 9)]
    for path in paths:
        shutil.copytree(path, path.with_name(f".replaced-{path.name}"))
    shutil.rmtree(paths[2])
    (tmp_path / "checkpoints/00000007/COMPLETE").unlink()
    checkpoint.put_back(tmp_path)
    assert folders(tmp_path) == ["00000005", "00000007", "00000009"]
    found = [checkpoint.read(path).load().model for path in checkpoint.complete_checkpoints(tmp_path)]
    assert [weights["fc.bias"].tolist() for weights in found] == [3 * [5], 3 * [7], 3 * [9]]


@pytest.mark.usefixtures("quick")
def test_a_checkpoint_is_as_readable_as_other_files(tmp_path):
    averaged = State(**vars(state()) | {"ema": state(5.0).model})
    before = os.umask(0o027)
    try:
        path = checkpoint.save(tmp_path, averaged, position(7), RetentionPolicy(1))
    finally:
        os.umask(before)
    names = ("model.safetensors", "optimizer.safetensors", "ema/model.safetensors", "state.json", "COMPLETE")
    modes = {file.relative_to(path).as_posix(): file.stat().st_mode & 0o777 for file in path.rglob("*")}
    assert modes == dict.fromkeys(names, 0o640) | {"ema": 0o750}


@pytest.mark.usefixtures("quick")
def test_the_newest_that_is_intact_is_found_behind_any_number_of_others(tmp_path):
    paths = [checkpoint.save(tmp_path, state(), position(step), RetentionPolicy(9)) for step in range(1, 5)]
    for path in paths[1:]:
        (path / "model.safetensors").write_bytes(b"damaged")
    found, problems = checkpoint.newest_valid(tmp_path)
    assert found.path == paths[0]
    assert [text.partition(":")[0] for text in problems] == [f"{path}/model.safetensors" for path in paths[:0:-1]]
    (paths[0] / "state.json").write_bytes(b"damaged")
    found, (problem,) = checkpoint.newest_valid(tmp_path)
    assert found is None
    assert problem.startswith(f"{paths[0]}/state.json: cannot be read")
    for path, what in ((paths[1], "is an incomplete checkpoint"), (tmp_path, "holds no complete checkpoint")):
        with pytest.raises(InputError, match=rf"^{path}: {what}; name the run folder"):
            checkpoint.find(path)
    with pytest.raises(InputError, match=rf"holds no complete checkpoint; name the run folder, {tmp_path}$"):
        checkpoint.find(tmp_path / "checkpoints")

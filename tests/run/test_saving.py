"""Saving during training: the parts of many ranks become one complete checkpoint, or none."""

import errno
import json
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from tests.run.test_checkpoint import folders, position
from widemix.distributed.topology import Topology
from widemix.engine.state import Shard
from widemix.errors import InputError, RunError
from widemix.run import checkpoint, saving
from widemix.run.checkpoint import RetentionPolicy
from widemix.run.saving import Saver

WHOLE = {
    "model/fc.weight": torch.arange(15.0).view(3, 5),
    "optimizer/exp_avg/fc.weight": torch.arange(15.0, 30.0).view(3, 5),
    "ema/fc.weight": -torch.arange(15.0).view(3, 5),
}


def parts(rank: int, cuts: list[int]) -> list[Shard]:
    """The values between two cuts of each flattened tensor; rank 0 also has an index that fp32 cannot represent."""
    first, stop = cuts[rank : rank + 2]
    found = [Shard(key, (3, 5), first, whole.reshape(-1)[first:stop].clone()) for key, whole in WHOLE.items()]
    if rank == 0:
        found.append(Shard("model/index", (2,), 0, torch.tensor([2**40 + 1, 3])))
    return found


def savers(run: Path, world: int, keep: RetentionPolicy | None = None) -> list[Saver]:
    store = dist.HashStore()
    return [
        Saver(run, Topology(r, world, r, world, torch.device("cpu")), store, keep or RetentionPolicy(2))
        for r in range(world)
    ]


def save(ranks: list[Saver], cuts: list[int], step: int, **others) -> str | None:
    """Why it failed, if it did."""
    for rank, saver in enumerate(ranks):
        assert saver.begin(parts(rank, cuts), position(step, **others)) is None
    failed, *_ = [saver.finish() for saver in ranks]
    return failed


@pytest.mark.parametrize("cuts", [[0, 15], [0, 7, 15], [0, 0, 15, 15], [0, 4, 8, 12, 15]])
def test_the_whole_is_the_same_however_many_ranks_had_parts_of_it(tmp_path, cuts):
    assert save(savers(tmp_path, len(cuts) - 1), cuts, 3) is None
    state = checkpoint.newest(tmp_path).load()
    assert torch.equal(state.model["fc.weight"], WHOLE["model/fc.weight"])
    assert torch.equal(state.optimizer["exp_avg/fc.weight"], WHOLE["optimizer/exp_avg/fc.weight"])
    assert torch.equal(state.ema["fc.weight"], WHOLE["ema/fc.weight"])
    assert state.model["index"].tolist() == [2**40 + 1, 3]
    assert state.scalars == {"loss_scale": 2.0}
    assert folders(tmp_path) == ["00000003"]


def test_parts_that_do_not_cover_a_tensor_raise(tmp_path):
    ranks = savers(tmp_path, 2)
    with pytest.raises(AssertionError, match="not the whole of"):
        save(ranks, [0, 7, 14], 1)
    assert folders(tmp_path) == []


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_full_disk_on_any_rank_leaves_the_last_checkpoint_and_the_next_save_succeeds(tmp_path, monkeypatch, rank):
    ranks, cuts, save_file = savers(tmp_path, 3), [0, 7, 11, 15], saving.save_file
    assert save(ranks, cuts, 1) is None

    def full(tensors, path, **options):
        if rank and not path.name.startswith(f"{rank}-"):
            return save_file(tensors, path, **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*((saving, "save_file") if rank else (checkpoint, "save_tensors")), full)
        failed = save(ranks, cuts, 2)
    assert "No space left on device" in failed
    assert [f"rank {each}" in failed for each in (1, 2)] == [rank == 1, rank == 2]
    assert ranks[0].failure() is None  # reported once
    assert folders(tmp_path) == ["00000001"]
    assert save(ranks, cuts, 3) is None
    assert folders(tmp_path) == ["00000001", "00000003"]


def test_a_step_can_be_saved_again_on_several_ranks(tmp_path):
    """As after a rollback to before it, in the same process."""
    ranks = savers(tmp_path, 3)
    for _ in range(2):
        assert save(ranks, [0, 4, 9, 15], 7) is None
    assert checkpoint.newest(tmp_path).position.step == 7
    checkpoint.newest(tmp_path).verify()


def test_training_continues_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    (saver,) = savers(tmp_path, 1)
    writing, may_end = threading.Event(), threading.Event()
    save_tensors = checkpoint.save_tensors

    def slow(*arguments):
        writing.set()
        assert may_end.wait(300)
        save_tensors(*arguments)

    monkeypatch.setattr(checkpoint, "save_tensors", slow)
    mine = parts(0, [0, 15])
    saver.begin(mine, position(1))  # returns
    assert writing.wait(300)
    assert saver.failure() is None
    assert checkpoint.newest(tmp_path) is None
    may_end.set()
    assert saver.finish() is None
    assert checkpoint.newest(tmp_path).position.step == 1


def test_one_save_waits_for_the_one_before(tmp_path, monkeypatch):
    (saver,) = savers(tmp_path, 1, RetentionPolicy(9))
    running, save_checkpoint = [], checkpoint.save

    def alone(*words):
        running.append("begins")
        threading.Event().wait(0.02)
        save_checkpoint(*words)
        running.append("ends")

    monkeypatch.setattr(checkpoint, "save", alone)
    for step in (1, 2, 3):
        assert saver.begin(parts(0, [0, 15]), position(step)) is None
    assert saver.finish() is None
    assert running == 3 * ["begins", "ends"]
    assert folders(tmp_path) == ["00000001", "00000002", "00000003"]
    assert not saver.writing


def test_what_a_killed_run_left_behind_is_removed_at_the_next_start(tmp_path):
    left = tmp_path / "checkpoints" / ".parts-7"
    left.mkdir(parents=True)
    (left / "1").write_bytes(b"half a part")
    others = [Saver(tmp_path, Topology(1, 2, 1, 2, torch.device("cpu")), dist.HashStore(), RetentionPolicy(2))]
    assert folders(tmp_path) == [".parts-7"]  # other ranks may come when rank 0 is already writing
    savers(tmp_path, 2)
    assert folders(tmp_path) == []
    assert not others[0].writing


def test_keeps_the_newest_the_best_and_every_so_many(tmp_path):
    (saver,) = savers(tmp_path, 1, RetentionPolicy(2, best="top1", every=4))
    for step, top1 in enumerate([10, 70, None, 30, 50, 60, 20], start=1):
        metrics = {} if top1 is None else {"top1": top1}
        assert save([saver], [0, 15], step, metrics=metrics) is None
    assert folders(tmp_path) == ["00000002", "00000004", "00000006", "00000007"]
    assert checkpoint.best(tmp_path, "top1").name == "00000002"
    assert checkpoint.best(tmp_path, "loss") is None


def test_of_equally_good_checkpoints_the_newer_is_the_best(tmp_path):
    (saver,) = savers(tmp_path, 1, RetentionPolicy(1, best="top1"))
    for step, top1 in enumerate([50.0, 70.0, 70.0, 60.0], start=1):
        save([saver], [0, 15], step, metrics={"top1": top1})
    assert checkpoint.best(tmp_path, "top1").name == "00000003"
    assert folders(tmp_path) == ["00000003", "00000004"]


def test_the_best_loss_is_the_smallest(tmp_path):
    (saver,) = savers(tmp_path, 1, RetentionPolicy(1, best="ema_loss"))
    for step, loss in enumerate([3.0, 1.0, 2.0, 4.0], start=1):
        save([saver], [0, 15], step, metrics={"ema_loss": loss})
    assert folders(tmp_path) == ["00000002", "00000004"]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "ema/model.safetensors", "state.json"]
)
def test_one_flipped_bit_is_found_and_the_checkpoint_before_is_taken(tmp_path, name):
    (saver,) = savers(tmp_path, 1)
    for step in (1, 2):
        save([saver], [0, 15], step)
    path = tmp_path / "checkpoints/00000002" / name
    damaged = bytearray(path.read_bytes())
    damaged[-2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(InputError):
        checkpoint.newest(tmp_path).load()
    origin, problems = checkpoint.newest_valid(tmp_path)
    assert origin.position.step == 1
    assert len(problems) == 1
    assert name in problems[0]
    assert checkpoint.newest(tmp_path).position.step == 1  # the other is never read again


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "ema/model.safetensors"])
def test_a_file_that_is_gone_is_damage(tmp_path, name):
    (saver,) = savers(tmp_path, 1)
    for step in (1, 2):
        save([saver], [0, 15], step)
    (tmp_path / "checkpoints/00000002" / name).unlink()
    with pytest.raises(InputError, match=r"checkpoints/00000002: cannot be loaded \("):
        checkpoint.newest(tmp_path).verify()
    assert checkpoint.newest_valid(tmp_path)[0].position.step == 1


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "ema/model.safetensors", "state.json"]
)
def test_a_file_without_a_hash_is_not_taken_for_intact(tmp_path, name):
    (saver,) = savers(tmp_path, 1)
    save([saver], [0, 15], 1)
    mark = tmp_path / "checkpoints/00000001/COMPLETE"
    hashes = json.loads(mark.read_text())
    del hashes[name]
    mark.write_text(json.dumps(hashes))
    with pytest.raises(InputError, match=rf"{name}: is damaged \(its hash is not the one in COMPLETE\)"):
        checkpoint.newest(tmp_path).load()
    assert save([saver], [0, 15], 2) is None  # until the run reaches that step again
    assert checkpoint.newest(tmp_path).position.step == 2


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff"])
def test_a_checkpoint_whose_mark_is_damaged_is_not_resumed(tmp_path, content):
    (saver,) = savers(tmp_path, 1)
    for step in (1, 2):
        save([saver], [0, 15], step)
    (tmp_path / "checkpoints/00000002/COMPLETE").write_bytes(content)
    origin, (problem,) = checkpoint.newest_valid(tmp_path)
    assert origin.position.step == 1
    assert "00000002" in problem


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_whose_folder_is_moved_ends_and_does_not_make_it_again(tmp_path, world):
    run, cuts = tmp_path / "run", [0, 7, 15] if world == 2 else [0, 15]
    run.mkdir()
    ranks = savers(run, world)
    assert save(ranks, cuts, 1) is None
    run.rename(tmp_path / "moved")
    with pytest.raises(RunError, match="run: was renamed or removed while the run wrote to it"):
        save(ranks, cuts, 2)
    assert not run.exists()
    assert folders(tmp_path / "moved") == ["00000001"]


def test_a_part_that_is_torn_on_its_way_costs_that_save_alone(tmp_path, monkeypatch):
    """As on a full disk of a file system that tells it late."""
    ranks, save_file = savers(tmp_path, 2), saving.save_file

    def torn(tensors, path, metadata):
        save_file(tensors, path, metadata=metadata)
        os.truncate(path, 100)

    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_file", torn)
        assert ".parts-1/1-" in save(ranks, [0, 7, 15], 1)
    assert folders(tmp_path) == []
    assert save(ranks, [0, 7, 15], 2) is None


@pytest.mark.parametrize("error", [RuntimeError(), SafetensorError("No space left")])
def test_whatever_fails_on_another_rank_rank_0_is_told(tmp_path, monkeypatch, error):
    def fails(*_, **__):
        raise error

    ranks = savers(tmp_path, 2)
    monkeypatch.setattr(saving, "save_file", fails)
    assert (str(error) or "RuntimeError") in save(ranks, [0, 7, 15], 1)


def test_other_ranks_fail_with_rank_0_where_the_last_checkpoint_is_not_saved(tmp_path, monkeypatch):
    _, other = savers(tmp_path, 2)
    monkeypatch.setattr(saving, "on_main", lambda *_: "there is no space left")
    with pytest.raises(RunError, match="there is no space left"):
        other.finish_all_ranks()


def test_a_run_whose_last_checkpoint_is_not_saved_fails(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saving, "on_main", lambda _, act: act())
    (saver,) = savers(tmp_path, 1)
    saver.begin(parts(0, [0, 15]), position(1))
    saver.finish_all_ranks()
    monkeypatch.setattr(checkpoint, "save_tensors", full)
    saver.begin(parts(0, [0, 15]), position(2))
    with pytest.raises(RunError, match=r"00000002: the checkpoint could not be written .*No space left on device"):
        saver.finish_all_ranks()

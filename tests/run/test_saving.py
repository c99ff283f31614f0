"""Saving during training: the parts of many ranks become one complete checkpoint, or none."""

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.run.saved import folders, position
from tests.shims import disk_of
from widemix.distributed.topology import Topology
from widemix.engine.state import Shard
from widemix.errors import RunError
from widemix.run import checkpoint
from widemix.run.checkpoint import RetentionPolicy
from widemix.run.saving import Saver

SIZE = 3000
WHOLE = {
    "model/fc.weight": torch.arange(float(SIZE)).view(3, -1),
    "optimizer/exp_avg/fc.weight": torch.arange(float(SIZE), 2.0 * SIZE).view(3, -1),
    "ema/fc.weight": -torch.arange(float(SIZE)).view(3, -1),
}


def parts(rank: int, cuts: list[int]) -> list[Shard]:
    """The values between two cuts of each flattened tensor; rank 0 also has an index that fp32 cannot represent."""
    first, stop = cuts[rank : rank + 2]
    found = [Shard(key, whole.shape, first, whole.reshape(-1)[first:stop].clone()) for key, whole in WHOLE.items()]
    if rank == 0:
        found.append(Shard("model/index", (2,), 0, torch.tensor([2**40 + 1, 3])))
    return found


def savers(run: Path, world: int, keep: RetentionPolicy | None = None) -> list[Saver]:
    store = dist.HashStore()
    return [
        Saver(run, Topology(r, world, r, world, torch.device("cpu")), store, keep or RetentionPolicy(2))
        for r in range(world)
    ]


def save(ranks: list[Saver], cuts: list[int], step: int) -> str | None:
    """Why it failed, if it did."""
    for rank, saver in enumerate(ranks):
        assert saver.begin(parts(rank, cuts), position(step)) is None
    failed, *_ = [saver.finish() for saver in ranks]
    return failed


@pytest.mark.parametrize("cuts", [[0, SIZE], [0, 7, SIZE], [0, 0, SIZE, SIZE], [0, 4, 8, 12, SIZE]])
def test_the_whole_is_the_same_however_many_ranks_had_parts(tmp_path, cuts):
    ranks = savers(tmp_path, len(cuts) - 1)
    for _ in range(2):  # the second time as after a rollback to before it, in the same process
        assert save(ranks, cuts, 3) is None
        state = checkpoint.newest(tmp_path).load()
        assert torch.equal(state.model["fc.weight"], WHOLE["model/fc.weight"])
        assert torch.equal(state.optimizer["exp_avg/fc.weight"], WHOLE["optimizer/exp_avg/fc.weight"])
        assert torch.equal(state.ema["fc.weight"], WHOLE["ema/fc.weight"])
        assert state.model["index"].tolist() == [2**40 + 1, 3]
        assert state.scalars == {"loss_scale": 2.0}
        assert folders(tmp_path) == ["00000003"]


def test_parts_that_do_not_cover_a_tensor_raise(tmp_path):
    with pytest.raises(AssertionError, match="not the whole of"):
        save(savers(tmp_path, 2), [0, 7, 14], 1)
    assert folders(tmp_path) == []


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_full_disk_on_any_rank_costs_that_save_alone(tmp_path, rank):
    ranks, cuts = savers(tmp_path, 3), [0, 7, 11, SIZE]
    assert save(ranks, cuts, 1) is None
    largest = [[0, SIZE - 2, SIZE - 1, SIZE], [0, 1, SIZE - 1, SIZE], [0, 1, 2, SIZE]][rank]
    with disk_of(3 * SIZE):  # of the bytes that its part has, and no other's
        failed = save(ranks, largest, 2)
    assert "File too large" in failed
    assert [f"step 2 was not saved: rank {each}: " in failed for each in (1, 2)] == [rank == 1, rank == 2]
    assert ranks[0].failure() is None  # reported once
    assert folders(tmp_path) == ["00000001"]
    assert save(ranks, cuts, 3) is None
    assert folders(tmp_path) == ["00000001", "00000003"]


def test_training_continues_while_a_checkpoint_is_written(tmp_path):
    """It waits for the part of the other rank."""
    main, other = savers(tmp_path, 2)
    cuts = [0, 7, SIZE]
    main.begin(parts(0, cuts), position(1))  # returns
    assert main.writing
    assert main.failure() is None
    assert checkpoint.newest(tmp_path) is None
    other.begin(parts(1, cuts), position(1))
    assert [main.finish(), other.finish()] == [None, None]
    assert checkpoint.newest(tmp_path).position.step == 1
    assert not main.writing


def test_one_save_waits_for_the_one_before(tmp_path):
    (saver,) = savers(tmp_path, 1, RetentionPolicy(9))
    for step in (1, 2, 3):
        assert saver.begin(parts(0, [0, SIZE]), position(step)) is None
        assert [path.name for path in checkpoint.complete_checkpoints(tmp_path)][: step - 1] == [
            f"{each:08d}" for each in range(1, step)
        ]
    assert saver.finish() is None
    assert folders(tmp_path) == ["00000001", "00000002", "00000003"]


def test_what_a_killed_run_left_is_removed_by_rank_0(tmp_path):
    left = tmp_path / "checkpoints" / ".parts-7"
    left.mkdir(parents=True)
    (left / "1").write_bytes(b"half a part")
    other = Saver(tmp_path, Topology(1, 2, 1, 2, torch.device("cpu")), dist.HashStore(), RetentionPolicy(2))
    assert folders(tmp_path) == [".parts-7"]  # other ranks may come when rank 0 is already writing
    savers(tmp_path, 2)
    assert folders(tmp_path) == []
    assert not other.writing


@pytest.mark.parametrize("cuts", [[0, SIZE], [0, 7, SIZE]])
def test_a_run_whose_folder_is_moved_ends(tmp_path, cuts):
    """And does not make it again."""
    run = tmp_path / "run"
    run.mkdir()
    ranks = savers(run, len(cuts) - 1)
    assert save(ranks, cuts, 1) is None
    run.rename(tmp_path / "moved")
    with pytest.raises(RunError, match="run: was renamed or removed while the run wrote to it"):
        save(ranks, cuts, 2)
    assert not run.exists()
    assert folders(tmp_path / "moved") == ["00000001"]


def test_a_part_that_is_torn_costs_that_save_alone(tmp_path):
    """As on a full disk of a file system that tells it late."""
    main, other = savers(tmp_path, 2)
    cuts = [0, 7, SIZE]
    other.begin(parts(1, cuts), position(1))
    while other.writing:
        pass
    (part,) = (tmp_path / "checkpoints/.parts-1").iterdir()
    os.truncate(part, 100)
    main.begin(parts(0, cuts), position(1))
    assert ".parts-1/1-" in main.finish()
    assert other.finish() is None
    assert folders(tmp_path) == []
    assert save([main, other], cuts, 2) is None


def test_other_ranks_fail_where_the_last_checkpoint_is_not_saved(tmp_path, system):
    def answer(shared, **_):
        shared[0] = "there is no space left"

    _, other = savers(tmp_path, 2)
    system({"torch.distributed.broadcast_object_list": answer})
    with pytest.raises(RunError, match="there is no space left"):
        other.finish_all_ranks()


@pytest.mark.usefixtures("alone")
def test_a_run_whose_last_checkpoint_is_not_saved_fails(tmp_path):
    (saver,) = savers(tmp_path, 1)
    for step, onward in ((1, "begins anew, since none is complete"), (2, ""), (3, "goes on from step 2")):
        with disk_of(100) if onward else nullcontext():
            saver.begin(parts(0, [0, SIZE]), position(step))
            refused = rf"{step}: the checkpoint could not be written .*File too large.*; raise .*: it {onward}$"
            with pytest.raises(RunError, match=refused) if onward else nullcontext():
                saver.finish_all_ranks()

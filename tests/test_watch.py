"""How a rank that fails takes leave, where several share a run folder and a store."""

import threading
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from pipeline.errors import InputError
from pipeline.topology import Topology
from pipeline.watch import Watch

WORLD = 2


def ranks_that_fail(run: Path, store: HashStore, *errors: Exception | None) -> list[BaseException | None]:
    """What leaves each rank's watch when these are raised in turn, with all ranks within theirs."""
    places = [Topology(rank, WORLD, rank, WORLD, torch.device("cpu")) for rank in range(WORLD)]
    watches = [Watch(run, place, store, 600) for place in places]
    left: list[BaseException | None] = []
    for watch in watches:
        watch.__enter__()
    for watch, error in zip(watches, errors, strict=True):
        try:
            watch.__exit__(type(error) if error else None, error, None)
            left.append(error)
        except RuntimeError as other:
            left.append(other)
    assert not (run / "stacks").exists()
    return left


def test_a_mistake_that_all_ranks_find_stays_a_mistake_on_each(tmp_path):
    first, second = ranks_that_fail(tmp_path, HashStore(), InputError("no such key"), InputError("no such key"))
    assert isinstance(first, InputError)
    assert isinstance(second, InputError)


def test_a_rank_whose_collective_broke_says_who_had_failed_before(tmp_path):
    _, second = ranks_that_fail(tmp_path, HashStore(), InputError("no data here"), OSError("connection closed"))
    assert str(second).startswith("rank 0 on ")
    assert "no data here; so this rank ends (connection closed)" in str(second)


def test_ranks_that_leave_at_once_quarrel_over_no_folder(tmp_path):
    """Each removes its empty stacks, the last the folder; one may come while another goes."""

    def come_and_go(rank: int, turns: int = 60) -> None:
        place = Topology(rank, 1, rank, 1, torch.device("cpu"))
        for _ in range(turns):
            with Watch(tmp_path, place, HashStore(), 600):
                pass

    failed = []
    threads = [threading.Thread(target=come_and_go, args=(rank,)) for rank in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", failed.append)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed
    assert list(tmp_path.iterdir()) == []

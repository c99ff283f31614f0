"""How a rank that fails takes leave, where several share a run folder and a store."""

from pathlib import Path

import torch
from torch.distributed import HashStore

from pipeline.distributed.topology import Topology
from pipeline.distributed.watchdog import Watch
from pipeline.errors import InputError

WORLD = 2


def ranks_that_fail(run: Path, store: HashStore, *errors: BaseException | None) -> list[BaseException | None]:
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


def test_a_second_ctrl_c_on_one_rank_is_the_reason_on_the_others(tmp_path):
    interrupt = KeyboardInterrupt()
    first, other = ranks_that_fail(tmp_path, HashStore(), interrupt, RuntimeError("Connection closed by peer"))
    assert first is interrupt
    assert "rank 0 on " in str(other)
    assert ": interrupted; so this rank ends (Connection closed by peer)" in str(other)
    both = [KeyboardInterrupt(), KeyboardInterrupt()]
    assert ranks_that_fail(tmp_path, HashStore(), *both) == both


def test_what_all_ranks_find_is_said_once_by_each(tmp_path):
    """As when the loss diverges: nobody needs to hear it twice in a line."""
    _, second = ranks_that_fail(
        tmp_path, HashStore(), RuntimeError("the loss is nan"), RuntimeError("the loss is nan")
    )
    assert str(second) == "the loss is nan"


def test_a_rank_that_leaves_takes_no_folder_from_under_one_that_comes(tmp_path, monkeypatch):
    """Each removes the folder of stacks if it is empty, also just after another has made it."""
    made, mkdir = [], Path.mkdir

    def and_removed_by_another(path, *words, **options):
        mkdir(path, *words, **options)
        made.append(path)
        if len(made) == 1:
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", and_removed_by_another)
    with Watch(tmp_path, Topology(0, 1, 0, 1, torch.device("cpu")), HashStore(), 600):
        assert (tmp_path / "stacks/rank-0.txt").exists()
    assert len(made) == 2
    assert list(tmp_path.iterdir()) == []

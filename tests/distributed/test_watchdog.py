"""What a rank that fails raises and leaves behind, where several share a run folder and a store."""

from pathlib import Path

import torch
from torch.distributed import HashStore

from pipeline.distributed.topology import Topology
from pipeline.distributed.watchdog import Watchdog
from pipeline.errors import InputError

WORLD = 2


def ranks_that_fail(run_dir: Path, store: HashStore, *errors: BaseException | None) -> list[BaseException | None]:
    """What leaves each rank's watchdog when these are raised in turn, with all ranks within theirs."""
    topologies = [Topology(rank, WORLD, rank, WORLD, torch.device("cpu")) for rank in range(WORLD)]
    watchdogs = [Watchdog(run_dir, topology, store, 600) for topology in topologies]
    raised: list[BaseException | None] = []
    for watchdog in watchdogs:
        watchdog.__enter__()
    for watchdog, error in zip(watchdogs, errors, strict=True):
        try:
            watchdog.__exit__(type(error) if error else None, error, None)
            raised.append(error)
        except RuntimeError as other:
            raised.append(other)
    assert not (run_dir / "stacks").exists()
    return raised


def test_an_input_error_on_all_ranks_stays_an_input_error_on_each(tmp_path):
    first, second = ranks_that_fail(tmp_path, HashStore(), InputError("no such key"), InputError("no such key"))
    assert isinstance(first, InputError)
    assert isinstance(second, InputError)


def test_a_rank_whose_collective_broke_names_the_rank_that_failed_first(tmp_path):
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


def test_an_error_of_all_ranks_is_not_repeated_within_its_message(tmp_path):
    """As when the loss diverges."""
    _, second = ranks_that_fail(
        tmp_path, HashStore(), RuntimeError("the loss is nan"), RuntimeError("the loss is nan")
    )
    assert str(second) == "the loss is nan"


def test_a_rank_that_ends_removes_no_folder_that_another_is_about_to_use(tmp_path, monkeypatch):
    """Each removes the folder of stacks if it is empty, also just after another has made it."""
    made, mkdir = [], Path.mkdir

    def and_removed_by_another(path, *arguments, **options):
        mkdir(path, *arguments, **options)
        made.append(path)
        if len(made) == 1:
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", and_removed_by_another)
    with Watchdog(tmp_path, Topology(0, 1, 0, 1, torch.device("cpu")), HashStore(), 600):
        assert (tmp_path / "stacks/rank-0.txt").exists()
    assert len(made) == 2
    assert list(tmp_path.iterdir()) == []

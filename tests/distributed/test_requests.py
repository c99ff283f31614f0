"""Requests reach all ranks at the same step, whichever rank has them."""

import itertools
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.forks import Forks, group_of
from widemix.distributed.requests import Request, SharedRequests
from widemix.distributed.topology import Topology

WORLD, AFTER = 3, 5


def poll(folder: Path, asking: int) -> None:
    """One rank of WORLD: rank `asking` is asked to stop at its tenth step, rank 0 to save at its fifth alone.

    It ends AFTER steps later than it has read that. Rank 0 notes its first step once rank `asking` has said so.
    """
    rank = int(os.environ["RANK"])
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, timeout=timedelta(seconds=600), rank=rank, world_size=WORLD)
    shared = SharedRequests(Topology(rank, WORLD, rank, WORLD, torch.device("cpu")), dist.PrefixStore("run", store))
    read: list[int] = []
    left = folder / "left"
    for step in itertools.count():
        own = Request.STOP if rank == asking and step >= 10 else Request.NONE
        own |= Request.SAVE if step == 5 else Request.NONE
        if rank == 0 and left.exists() and not (folder / "seen").exists():
            time.sleep(0.1)  # it looks into the store ten times a second
            (folder / "seen").write_text(f"{step}")
        read.append(int(shared.poll(own)))
        if own & Request.STOP:
            left.touch()
        time.sleep(0.002 * (rank + 1))
        if len(read) > AFTER and read[-1 - AFTER] & Request.STOP:
            break
    shared.finish()
    (folder / f"{rank}").write_text(json.dumps(read))
    dist.destroy_process_group()


@pytest.mark.parametrize("asking", [0, 2])
def test_every_rank_reads_the_same_requests_at_the_same_step(tmp_path, asking):
    codes, output = Forks(poll, tmp_path, asking, log=tmp_path / "log", environs=group_of(WORLD)).wait()
    assert codes == [0] * WORLD, output
    first, *others = ((tmp_path / f"{rank}").read_text() for rank in range(WORLD))
    assert others == [first] * (WORLD - 1)
    read = [Request(value) for value in json.loads(first)]
    assert [step for step, requests in enumerate(read) if Request.SAVE in requests] == [6]
    stopped = [step for step, requests in enumerate(read) if Request.STOP in requests]
    assert stopped == list(range(stopped[0], len(read)))
    seen = tmp_path / "seen"  # unless rank 0 has read the request before it was noted
    assert 11 <= stopped[0] <= (11 if asking == 0 else int(seen.read_text()) + 1 if seen.exists() else len(read))

"""Process groups for the engines: one rank in the test's own process, several in others."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.ranks import JOBS, run_rank
from tests.forks import Forks, group_of


@pytest.fixture(scope="package")
def alone():
    """One rank for all of these tests: DeepSpeed keeps the first process group that it sees."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        patch.setenv("LOCAL_RANK", "0")
        patch.setenv("DS_ACCELERATOR", "cpu")
        # ZeRO 3 replaces it for the whole process, by one that TorchScript can't compile
        patch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def ranks(digits, tmp_path_factory) -> dict[int, dict[str, Any]]:
    """The results of tests/engine/ranks.py: by the number of ranks, by job."""
    folder = tmp_path_factory.mktemp("ranks")
    for world in JOBS:
        codes, output = Forks(run_rank, digits, folder, log=folder / "log", environs=group_of(world)).wait()
        assert codes == [0] * world, output
    return {world: torch.load(folder / f"{world}.pt") for world in JOBS}

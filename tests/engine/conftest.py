"""Process groups for the engines: one rank in the test's own process, several in others."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.ranks import run_rank
from tests.forks import Forks, group_of


@pytest.fixture(scope="package")
def alone():
    """One rank for all of these tests: DeepSpeed keeps the first process group that it sees.

    A process of pytest-xdist leaves the package and comes back, with another group.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        patch.setenv("LOCAL_RANK", "0")
        patch.setenv("DS_ACCELERATOR", "cpu")
        import deepspeed
        import deepspeed.runtime.zero.muon.muon_optimizer  # which brings torch's compiler: any ZeRO imports it

        gc.collect()
        gc.freeze()  # as tests/conftest.py does
        # ZeRO 3 replaces it for the whole process, by one that TorchScript can't compile
        patch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)
        # DeepSpeed forgets its groups only when it destroys them itself.
        (deepspeed.comm if deepspeed.comm.is_initialized() else dist).destroy_process_group()


@pytest.fixture(scope="session")
def ranks(digits, tmp_path_factory) -> Callable[[int, str], Any]:
    """`ranks(world, job)` is the result of a job of tests/engine/ranks.py on so many ranks.

    Each job runs once, in processes of its own: one that fails or hangs fails the tests of its result alone.
    """
    folder = tmp_path_factory.mktemp("ranks")

    @functools.cache
    def run(world: int, job: str) -> tuple[Any, str]:
        """The result, or why there is none."""
        to = folder / f"{job}-{world}"
        to.mkdir()
        try:
            codes, output = Forks(run_rank, digits, to, job, log=to / "log", environs=group_of(world)).wait()
        except TimeoutError as error:
            return None, str(error)
        if codes != [0] * world:
            return None, f"exit codes {codes}, a signal's negative:\n{output}"
        return torch.load(to / "result.pt"), ""

    def result(world: int, job: str) -> Any:
        found, failure = run(world, job)
        if failure:
            pytest.fail(failure)
        return found

    return result

import pytest
import torch.distributed as dist


@pytest.fixture
def quick(system):
    """Without waiting for the disk, which may take seconds."""
    system({"os.fsync": lambda descriptor: None})


@pytest.fixture
def alone():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()

"""Weights that are offloaded to the host from a GPU: the optimizer reads there only what was computed there.

A copy from the GPU that torch does not wait for would be read before it has arrived. Tensors are fake, of no GPU.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear

from widemix.data.batches import Batch
from widemix.data.precision import autocast
from widemix.distributed.topology import Topology
from widemix.engine.torch_engine import TorchEngine
from widemix.optim.section import OptimSection
from widemix.recipe.sections import TrainSection

GPU = torch.device("cuda", 0)


class Offloaded(nn.Module):
    """Has a weight on the host, as a DTensor, and copies it to the GPU where it is used, as FSDP does."""

    def __init__(self, mesh):
        super().__init__()
        self.weight = nn.Parameter(DTensor.from_local(torch.zeros(3, 4), mesh, [Shard(0)]))

    def forward(self, x):
        return linear(x, self.weight.to_local().to(x.device))


class OneRank(TorchEngine):
    """What FSDP and DDP have in common, without either."""

    def accumulate(self, last):
        return nullcontext()

    def evaluate_mode(self):
        return autocast(self.device, torch.float32)

    def full_tensor(self, name, local):
        return local

    def local_slice(self, name, local):
        return 0, local.view(-1)


@pytest.fixture
def no_gpu(system):
    """Without a GPU autograd can't run on its tensors, and fp16 is switched off."""

    def backward(loss):
        assert loss.device == GPU
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)

    parameters: list[nn.Parameter] = []
    system({"torch.Tensor.backward": backward, "torch.cuda.amp.common.amp_definitely_not_available": lambda: False})
    return parameters


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.usefixtures("alone")
def test_whether_to_skip_is_computed_where_the_weights_are(precision, optimizer, no_gpu):
    optim = OptimSection(name=optimizer, lr=0.1, clip_grad=1.0)
    train = TrainSection(epochs=1, global_batch=2, precision=precision)
    mesh = init_device_mesh("cpu", (1,))
    with FakeTensorMode():
        network = Offloaded(mesh)
        no_gpu += network.parameters()
        engine = OneRank(network, optim, train, Topology(0, 1, 0, 1, GPU))
        read: list[torch.device] = []
        engine.optimizer.step = lambda: read.append(engine.optimizer.found_inf.device)
        inputs, targets = (torch.zeros(2, size, device=GPU) for size in (4, 3))
        result = engine.step([Batch(inputs, targets, np.arange(2))], 0.1)
    assert read == [torch.device("cpu")]
    assert result.loss.device == result.grad_norm.device == GPU

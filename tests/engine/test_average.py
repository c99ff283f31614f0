"""The average in host memory: behind the step, and equal to the one on the device."""

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from widemix.engine.ema import Ema, swapped
from widemix.recipe.sections import TrainSection


@pytest.fixture
def pair() -> tuple[Ema, Ema, list[torch.Tensor]]:
    """Two averages of the same weights, the second as if these lay on a device."""
    section = TrainSection(epochs=1, global_batch=1, ema_decay=0.9, ema_warmup=True, ema_device="cpu")
    weights = [torch.ones(3), torch.zeros(2, 2)]
    averages = Ema(section, weights), Ema(section, weights)
    averages[1].behind = True
    return *averages, weights


def test_it_is_the_same_average_though_the_weights_change(pair):
    one, other, weights = pair
    for step in range(6):
        for weight in weights:
            weight += step
        for average in (one, other):
            average.update(weights, torch.tensor(step != 3))
    assert other.updates == one.updates == 5
    for expected, found in zip(one.tensors, other.tensors, strict=True):
        assert torch.equal(expected, found)


def test_the_step_does_not_wait_for_it(pair, system):
    """But who asks for it does."""
    _, average, weights = pair
    may, lerp = threading.Event(), torch._foreach_lerp_

    def slow(*arguments):
        assert may.wait(60)
        lerp(*arguments)

    system({"torch._foreach_lerp_": slow})
    weights[0] += 1
    average.update(weights, torch.tensor(True))  # returns
    weights[0] += 5  # the next step
    may.set()
    assert torch.equal(average.tensors[0], torch.full((3,), 2.0))


def test_its_errors_are_raised(pair, system):
    _, average, weights = pair

    def fails(*_):
        raise MemoryError

    system({"torch._foreach_lerp_": fails})
    average.update(weights, torch.tensor(True))
    with pytest.raises(MemoryError):
        _ = average.tensors


def test_weights_on_host_and_gpu_are_averaged_where_they_are(system):
    """As with engine.cpu_offload and batch norms. torch compares the devices of fake tensors one by one alone."""

    def one_by_one(averages, weights, fractions):
        for average, weight, fraction in zip(averages, weights, fractions, strict=True):
            average.lerp_(weight, fraction)

    system({"torch._foreach_lerp_": one_by_one})
    with FakeTensorMode():
        weights = [torch.zeros(3, device=device) for device in ("cpu", "cuda")]
        average = Ema(TrainSection(epochs=1, global_batch=1, ema_decay=0.9), weights)
        average.update(weights, torch.tensor(True, device="cuda"))
    assert [tensor.device.type for tensor in average.tensors] == ["cpu", "cuda"]


def test_an_average_on_the_host_is_behind_the_step():
    for device, places, behind in (("cpu", ("cpu", "cpu"), True), ("same", ("cpu", "cuda"), False)):
        with FakeTensorMode():
            weights = [torch.zeros(3, device=device) for device in ("cpu", "cuda")]
            average = Ema(TrainSection(epochs=1, global_batch=1, ema_decay=0.9, ema_device=device), weights)
        assert tuple(tensor.device.type for tensor in average.tensors) == places
        assert average.behind is behind


def test_weights_are_back_also_after_an_evaluation_that_failed():
    weights, others = [torch.ones(2), torch.zeros(3)], [torch.full((2,), 5.0), torch.full((3,), 7.0)]
    synced = []

    def evaluate():
        with swapped(weights, others, lambda: synced.append([weight[0].item() for weight in weights])):
            assert [weight[0].item() for weight in (*weights, *others)] == [5, 7, 1, 0]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate()
    assert [weight[0].item() for weight in (*weights, *others)] == [1, 0, 5, 7]
    assert synced == [[5, 7], [1, 0]]


def test_the_average_is_of_fp32_without_skipped_steps():
    """After the first the decay is the recipe's, without a warm-up."""
    weights = [torch.ones(2, dtype=torch.bfloat16), torch.zeros(1)]
    average = Ema(TrainSection(epochs=1, global_batch=1, ema_decay=0.75), weights)
    assert [tensor.dtype for tensor in average.tensors] == [torch.float32] * 2
    for step, (stepped, expected) in enumerate([(True, 2.0), (False, 2.0), (True, 2.5), (True, 3.125)], start=1):
        weights[0].fill_(step + 1)
        average.update(weights, torch.tensor(stepped))
        assert average.tensors[0].tolist() == [expected] * 2
    assert average.updates == 3

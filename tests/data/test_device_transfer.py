"""Batches on the device: the same numbers as on the CPU, during the step."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tests.cli.test_arguments import arguments_of
from tests.data.loading import BATCH, FULL, place, read, section, train_loader
from tests.sections import train_section
from widemix.data import batches
from widemix.data.batches import StepPart
from widemix.data.loader import EvalLoader
from widemix.data.precision import DTYPES

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def loaders(folder, device="cpu", precision="fp32"):
    """Of mixed, erased training images, and of the evaluation split."""
    topology, train = place(device=device), train_section(BATCH, seed=7, precision=precision)
    yield train_loader(section(folder), FULL, topology, train)
    yield EvalLoader(section(folder), 4, topology, DTYPES[precision])


@pytest.mark.parametrize(
    ("precision", "device"), [("bf16", "cpu"), ("fp16", "cpu"), pytest.param("fp32", "cuda:0", marks=GPU)]
)
def test_batches_are_those_of_fp32_on_the_cpu_rounded_once(images, precision, device):
    for plain, other in zip(loaders(images), loaders(images, device, precision), strict=True):
        for expected, found in zip(read(plain), read(other), strict=True):
            assert found.inputs.dtype == DTYPES[precision]
            assert found.inputs.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(found.inputs.cpu(), expected.inputs.to(DTYPES[precision]))
            assert torch.allclose(found.targets.cpu(), expected.targets)


def test_every_tensor_is_marked_as_used_by_the_step(images):
    """Its memory would be given to a later batch while the step reads it."""
    for loader, count in zip(loaders(images), (3, 2), strict=True):
        with loader.batches(0) as loaded:
            marked = arguments_of(lambda: next(loaded), "data.batches.record_stream")["tensors"]
            batch = next(loaded)
        tensors = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
        assert [tensor.dtype for tensor in marked] == [tensor.dtype for tensor in tensors]
        assert len(marked) == count


@GPU
def test_batches_come_while_the_step_computes(images):
    loader, _ = loaders(images, "cuda:0")
    assert loader.source.read(StepPart(loader.order.step(0, 0))).inputs.is_pinned()
    with loader.batches(0) as loaded:
        next(loaded)
        torch.cuda._sleep(10**10)  # cycles of the step's own stream: some seconds
        second = next(loaded)
        assert not torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        assert second.inputs.isfinite().all()


def test_no_thread_goes_back_to_another_ranks_gpu(system):
    """A thread begins on GPU 0. To go back to it, as leaving a stream does, would take half a GiB of its memory."""
    gpu, on, went_to, waited_for = torch.device("cuda", 7), [0], [], []

    def go(to):
        on[0] = torch.device(to).index
        went_to.append(on[0])

    @contextmanager
    def stream(_):  # as torch's
        before = on[0]
        go(gpu)
        yield
        go(f"cuda:{before}")

    current = lambda of: SimpleNamespace(synchronize=lambda: waited_for.append(of))  # noqa: E731
    system({"torch.cuda.set_device": go, "torch.cuda.stream": stream, "torch.cuda.current_stream": current})
    system({"torch.cuda.Stream": lambda device, priority: (device, priority)})
    for count, batch in enumerate(batches.on_side_stream([1, 2], lambda host: host, gpu), 1):
        assert batch == count
        assert waited_for == [gpu] * count  # so that the batch is complete
    assert count == 2
    assert set(went_to) == {7}


def test_memory_is_kept_until_the_stream_that_computes_is_done(system):
    """Of every tensor; on the CPU there is nothing to say."""
    marked: list = []
    tensors = [SimpleNamespace(record_stream=lambda stream, n=n: marked.append((n, stream))) for n in range(3)]
    system({"torch.cuda.current_stream": lambda device: f"stream of {device}"})
    batches.record_stream(torch.device("cuda", 1), *tensors)
    batches.record_stream(torch.device("cpu"), *tensors)
    assert marked == [(number, "stream of cuda:1") for number in range(3)]

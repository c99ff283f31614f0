"""Batches on the device: the same numbers as on the CPU, during the step; exceptions are raised at once."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tests.data.test_loader import BATCH, FULL, folder, place, section  # noqa: F401 - a fixture
from tests.sections import train_section
from widemix.data import batches as batches_module
from widemix.data import device_transfer
from widemix.data.batches import Batches
from widemix.data.loader import EvalLoader, TrainLoader
from widemix.data.precision import DTYPES
from widemix.data.prefetch import Prefetch
from widemix.distributed.topology import Topology

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU = torch.device("cpu")


def both_splits(data, topology: Topology, precision="fp32") -> list[tuple[torch.Tensor, torch.Tensor]]:
    """An epoch of mixed, erased training images, then all of the evaluation split."""
    train, found = train_section(BATCH, seed=7, precision=precision), []
    for batches in (
        TrainLoader(section(data), FULL, train, topology).batches(1),
        EvalLoader(section(data), 4, topology, DTYPES[precision]).batches(),
    ):
        with batches:
            found += [(batch.inputs, batch.targets) for batch in batches]
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_halves_are_the_same_images_rounded_once(folder, precision):  # noqa: F811
    pairs = zip(both_splits(folder, place()), both_splits(folder, place(), precision), strict=True)
    for (expected, targets), (inputs, same) in pairs:
        assert inputs.dtype == DTYPES[precision]
        assert inputs.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(inputs, expected.to(DTYPES[precision]))
        assert torch.equal(targets, same)


def test_exceptions_of_reading_are_raised_before_the_batch_that_is_ready():
    asked, reached = threading.Event(), threading.Event()

    def hosts():
        yield 1
        asked.wait()
        reached.set()
        raise RuntimeError("sample 7 is damaged")

    reading = Prefetch(hosts(), ahead=1)
    with Batches(reading, lambda host: host, CPU) as batches:
        asked.set()
        reached.wait()
        reading._thread.join()
        with pytest.raises(RuntimeError, match="sample 7"):
            next(batches)


def test_what_a_step_waited_is_that_for_finished_batches():
    with Batches(Prefetch(iter(range(2)), ahead=1), lambda host: host, CPU) as batches:
        batches._hosts.waited, batches._ready.waited = 7.0, 3.0
        assert batches.waited == 3.0


def test_one_batch_is_ready_on_the_device_and_no_more(monkeypatch):
    counts = []

    class Counted(Prefetch):
        def __init__(self, source, ahead):
            counts.append(ahead)
            super().__init__(source, ahead)

    monkeypatch.setattr(batches_module, "Prefetch", Counted)
    with Batches(Prefetch(iter(range(9)), ahead=3), lambda host: host, CPU):
        assert counts == [1]


def test_exceptions_of_finishing_are_raised():
    def finish(host):
        raise RuntimeError("out of memory on the device")

    with Batches(Prefetch(iter(range(9)), ahead=1), finish, CPU) as batches, pytest.raises(RuntimeError, match="out"):
        next(batches)


def test_leaving_while_the_reader_is_slow_ends_both_threads():
    """Inside the with block the thread that finishes waits for a batch that is not to come any more."""
    before, slow = set(threading.enumerate()), threading.Event()

    def hosts():
        yield from iter(slow.wait, None)

    batches = Batches(Prefetch(hosts(), ahead=1), lambda host: host, CPU)
    assert len(set(threading.enumerate()) - before) == 2
    timer = threading.Timer(0.05, slow.set)
    timer.start()
    batches.__exit__()
    assert set(threading.enumerate()) - before <= {timer}


def test_every_tensor_of_a_batch_is_marked_as_used_by_the_steps_stream(folder, monkeypatch):  # noqa: F811
    """Its memory would be given to a later batch while the step reads it."""
    marked: list[torch.Tensor] = []
    monkeypatch.setattr(batches_module, "record_stream", lambda device, *tensors: marked.extend(tensors))
    train = TrainLoader(section(folder), FULL, train_section(BATCH, seed=7), place())
    for loader, names in (
        (train.batches(0), {"inputs", "targets", "keys"}),
        (eval_batches(folder), {"inputs", "targets"}),
    ):
        with loader as batches:
            batch = next(batches)
        tensors = {name for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        assert tensors == names
        assert {id(tensor) for tensor in marked} == {id(getattr(batch, name)) for name in names}
        marked.clear()


def eval_batches(data) -> Batches:
    return EvalLoader(section(data), 4, place()).batches()


@GPU
def test_a_gpus_batches_are_the_cpus(folder):  # noqa: F811
    topology = Topology(0, 1, 0, 1, torch.device("cuda", 0))
    for (expected, targets), (inputs, same) in zip(
        both_splits(folder, place()), both_splits(folder, topology), strict=True
    ):
        assert torch.equal(inputs.cpu(), expected)
        assert torch.allclose(same.cpu(), targets)


@GPU
def test_batches_come_while_the_step_computes(folder):  # noqa: F811
    topology = Topology(0, 1, 0, 1, torch.device("cuda", 0))
    loader = TrainLoader(section(folder), FULL, train_section(BATCH, seed=7), topology)
    assert loader.source.read(*[loader.order.step(0, 0)] * 2, 0)[0].is_pinned()
    with loader.batches(0) as batches:
        next(batches)
        torch.cuda._sleep(10**10)  # cycles of the step's own stream: some seconds
        second = next(batches)
        assert not torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        assert second.inputs.isfinite().all()


def test_no_thread_goes_back_to_another_ranks_gpu(monkeypatch):
    """A thread begins on GPU 0. To go back to it, as leaving a stream does, would take half a GiB of its memory."""
    gpu, on, went_to, waited_for = torch.device("cuda", 1), [0], [], []

    def go(to):
        on[0] = torch.device(to).index
        went_to.append(on[0])

    @contextmanager
    def stream(_):  # as torch's
        before = on[0]
        go(gpu)
        yield
        go(f"cuda:{before}")

    monkeypatch.setattr(torch.cuda, "set_device", go)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    current = lambda of: SimpleNamespace(synchronize=lambda: waited_for.append(of))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(device_transfer, "_side_stream", lambda _: None)
    for count, batch in enumerate(device_transfer.on_side_stream([1, 2], lambda host: host, gpu), 1):
        assert batch == count
        assert waited_for == [gpu] * count  # so that the batch is complete
    assert count == 2
    assert set(went_to) == {1}


def test_memory_is_kept_until_the_stream_that_computes_is_done(monkeypatch):
    """Of every tensor; on the CPU there is nothing to say."""
    marked: list = []
    tensors = [SimpleNamespace(record_stream=lambda stream, n=n: marked.append((n, stream))) for n in range(3)]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    device_transfer.record_stream(torch.device("cuda", 1), *tensors)
    device_transfer.record_stream(CPU, *tensors)
    assert marked == [(number, "stream of cuda:1") for number in range(3)]

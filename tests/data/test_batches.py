"""Batches: read ahead without a loss, item or thread, and on the device, during the step, the CPU's numbers."""

import gc
import threading
import weakref
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.cli.test_arguments import arguments_of
from tests.data.loading import BATCH, FULL, no_thread_is_left, place, read, section, train_loader
from tests.sections import train_section
from widemix.data.batches import Batch, Batches, Prefetch, StepPart, on_side_stream, prefetch, record_stream
from widemix.data.loader import EvalLoader
from widemix.data.precision import DTYPES

CPU = torch.device("cpu")
DAMAGED = RuntimeError("sample 7 is damaged")


def until(event: threading.Event, error: BaseException | type[BaseException], reached=None, before=(1,)):
    """Items, and then, once the event is set, an exception."""
    yield from before
    event.wait()
    if reached:
        reached.set()
    raise error


def test_items_come_in_order_and_the_thread_ends():
    before = set(threading.enumerate())
    with no_thread_is_left(), Prefetch(iter(range(100)), ahead=3) as items:
        assert all(thread.daemon for thread in set(threading.enumerate()) - before)  # a process may end without it
        assert list(items) == list(range(100))
        assert list(items) == []


def test_an_exception_is_raised_before_the_items_that_are_ready():
    asked, reached = threading.Event(), threading.Event()
    asked.set()
    with no_thread_is_left(), Prefetch(until(asked, DAMAGED, reached, range(3)), ahead=2) as items:
        assert next(items) == 0
        reached.wait()
        with pytest.raises(RuntimeError, match="sample 7"):
            list(items)  # one item at most comes between the event and the exception
        with pytest.raises(StopIteration):
            next(items)
        with pytest.raises(RuntimeError, match="sample 7"):
            items.check()  # of whoever else asks


def test_an_exception_wakes_a_reader_that_waits():
    asked = threading.Event()
    with Prefetch(until(asked, DAMAGED), ahead=2) as items:
        assert next(items) == 1
        threading.Timer(0.05, asked.set).start()
        with pytest.raises(RuntimeError, match="sample 7"):
            next(items)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError, GeneratorExit])
def test_whatever_ends_the_source_reaches_the_reader(kind):
    """Who would wait for ever else."""
    before, asked = set(threading.enumerate()), threading.Event()
    with Prefetch(until(asked, kind), ahead=2) as items:
        [thread] = set(threading.enumerate()) - before
        asked.set()
        thread.join()
        with pytest.raises(kind):
            items.check()
        with pytest.raises(StopIteration):
            next(items)


def test_it_reads_as_far_ahead_as_asked_and_no_further():
    seen, third = [], threading.Event()

    def source():
        for i in range(100):
            seen.append(i)
            if i == 2:
                third.set()
            yield i

    with Prefetch(source(), ahead=2) as items:
        assert third.wait(timeout=60)  # before any is asked for: two ready, one being put
        for expected in range(10):
            assert next(items) == expected
            assert max(seen) <= expected + 3  # one in hand besides


@pytest.mark.parametrize(
    ("threads", "ahead", "ended"), [(1, 3, [0, 1]), (2, 1, [0, 1]), (2, 3, [1, 0]), (8, 2, [1, 0])]
)
def test_two_batches_are_read_at_once_and_come_in_order(threads, ahead, ended):
    """Of which the first waits for the second here; not on one thread, nor in the memory of one batch."""
    second, found = threading.Event(), []

    def read(number: int) -> int:
        if number == ended[1] == 0:
            assert second.wait(60)
        if number == 1:
            second.set()
        found.append(number)
        return number

    data = SimpleNamespace(prefetch_batches=ahead, prefetch_mib=1)
    source = SimpleNamespace(threads=threads, host_bytes=lambda count: count)
    with no_thread_is_left(), prefetch((partial(read, number) for number in range(6)), data, source, 1) as items:
        assert list(items) == [0, 1, 2, 3, 4, 5]
    assert found[:2] == ended
    assert sorted(found) == [0, 1, 2, 3, 4, 5]


def test_the_seconds_are_counted_in_which_the_reader_waits(system):
    clock = iter([10.0, 12.0, 20.0, 20.5, 30.0, 33.0])
    system({"time.perf_counter": lambda: next(clock)})
    with Prefetch(iter("ab"), ahead=2) as items:
        assert items.waited == 0
        assert (next(items), items.waited) == ("a", 2.0)
        assert (list(items), items.waited) == (["b"], 5.5)


def test_batches_count_the_seconds_of_the_step(system):
    """Not those of the thread before it, which waits 7 s for an item here."""
    clock, waits, made = [0.0], threading.Event(), threading.Event()
    system({"time.perf_counter": lambda: (waits.set(), clock[0])[1]})

    def source():
        waits.wait()
        clock[0] += 7
        yield 1

    hosts = Prefetch(source(), ahead=1)
    with Batches(hosts, lambda host: made.set() or plain_batch(), CPU) as batches:
        made.wait()
        next(batches)
        assert (hosts.waited, batches.waited) == (7.0, 0.0)


def plain_batch():
    return Batch(torch.zeros(1), torch.zeros(1), torch.zeros(1).numpy())


def test_closing_frees_the_items_that_are_ready():
    class Item:
        pass

    full, made = threading.Event(), []

    def source():
        for number in range(9):
            if number == 5:
                full.set()
            item = Item()
            made.append(weakref.ref(item))
            yield item

    items = Prefetch(source(), ahead=5)
    full.wait()
    items.close()
    gc.collect()
    assert sum(item() is not None for item in made) <= 1  # one may be put while room is made


def test_closing_wakes_a_reader_in_another_thread():
    """One that waits for an item which never comes: the source ends when it sees that nobody wants more."""
    closing, asked, found = threading.Event(), threading.Event(), []

    def source():
        yield 1
        asked.set()
        closing.wait()

    items = Prefetch(source(), ahead=1)
    reader = threading.Thread(target=lambda: found.extend(items))
    reader.start()
    asked.wait()
    threading.Timer(0.05, closing.set).start()
    items.close()
    reader.join(timeout=300)
    assert not reader.is_alive()
    assert found == [1]


def test_exceptions_of_reading_come_before_the_batch_that_is_ready():
    asked, before = threading.Event(), set(threading.enumerate())
    reading = Prefetch(until(asked, DAMAGED), ahead=1)
    [thread] = set(threading.enumerate()) - before
    with Batches(reading, lambda host: host, CPU) as batches:
        asked.set()
        thread.join()
        with pytest.raises(RuntimeError, match="sample 7"):
            next(batches)


def test_exceptions_of_finishing_are_raised():
    def finish(host):
        raise RuntimeError("out of memory on the device")

    with Batches(Prefetch(iter(range(9)), ahead=1), finish, CPU) as batches, pytest.raises(RuntimeError, match="out"):
        next(batches)


def test_one_batch_is_ready_on_the_device_and_no_more():
    hosts = Prefetch(iter(range(9)), ahead=3)
    call = lambda: Batches(hosts, lambda host: host, CPU)  # noqa: E731
    assert arguments_of(call, "data.batches.Prefetch")["ahead"] == 1
    hosts.close()


def test_leaving_while_the_reader_is_slow_ends_both_threads():
    """Inside the with block the thread that finishes waits for a batch that is not to come any more."""
    slow, before = threading.Event(), set(threading.enumerate())
    with no_thread_is_left():
        batches = Batches(Prefetch(iter(slow.wait, None), ahead=1), lambda host: host, CPU)
        assert len(set(threading.enumerate()) - before) == 2
        threading.Timer(0.05, slow.set).start()
        batches.__exit__()


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
    for count, batch in enumerate(on_side_stream([1, 2], lambda host: host, gpu), 1):
        assert batch == count
        assert waited_for == [gpu] * count  # so that the batch is complete
    assert count == 2
    assert set(went_to) == {7}


def test_memory_is_kept_until_the_stream_that_computes_is_done(system):
    marked: list = []
    tensors = [SimpleNamespace(record_stream=lambda stream, n=n: marked.append((n, stream))) for n in range(3)]
    system({"torch.cuda.current_stream": lambda device: f"stream of {device}"})
    record_stream(torch.device("cuda", 1), *tensors)
    record_stream(torch.device("cpu"), *tensors)
    assert marked == [(number, "stream of cuda:1") for number in range(3)]

"""Prefetch and the batches made of it: no item or exception is lost, no thread is left."""

import gc
import threading
import weakref

import pytest
import torch

from tests.cli.test_arguments import arguments_of
from tests.data.loading import no_thread_is_left
from widemix.data.batches import Batches, Prefetch

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
    from widemix.data.batches import Batch

    return Batch(torch.zeros(1), torch.zeros(1), torch.zeros(1).numpy())


@pytest.mark.parametrize("closed", [True, False])
def test_early_exits_leave_no_thread(closed):
    with no_thread_is_left():
        for _ in range(1000 if closed else 5):
            items = Prefetch(iter(range(100)), ahead=2)
            if closed:
                next(items)
                items.close()
            del items  # one that is dropped ends its thread, too
            gc.collect(0)


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

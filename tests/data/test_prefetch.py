"""Prefetch: no item or exception is lost, no thread is left."""

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from widemix.data import prefetch
from widemix.data.batches import Batches
from widemix.data.prefetch import Prefetch


def test_items_come_in_order_and_the_thread_ends():
    with Prefetch(iter(range(100)), ahead=3) as items:
        assert items._thread.daemon  # a process that ends does not wait for it
        assert list(items) == list(range(100))
        assert list(items) == []
    assert not items._thread.is_alive()


def test_an_exception_is_raised_before_the_items_that_are_ready():
    reached = threading.Event()

    def source():
        yield from range(3)
        reached.set()
        raise RuntimeError("sample 7 is damaged")

    with Prefetch(source(), ahead=2) as items:
        assert next(items) == 0
        reached.wait()
        with pytest.raises(RuntimeError, match="sample 7"):
            list(items)  # one item at most comes between the event and the exception
        with pytest.raises(StopIteration):
            next(items)
        with pytest.raises(RuntimeError, match="sample 7"):
            items.check()  # of whoever else asks
    assert not items._thread.is_alive()


def test_an_exception_wakes_a_reader_that_waits():
    asked = threading.Event()

    def source():
        yield 1
        asked.wait()
        raise RuntimeError("sample 7 is damaged")

    with Prefetch(source(), ahead=2) as items:
        assert next(items) == 1
        threading.Timer(0.05, asked.set).start()
        with pytest.raises(RuntimeError, match="sample 7"):
            next(items)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError, GeneratorExit])
def test_whatever_ends_the_source_reaches_the_reader(kind):
    """Who would wait for ever else."""

    def source():
        yield 1
        raise kind

    with Prefetch(source(), ahead=2) as items:
        items._thread.join()
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


def test_the_seconds_are_counted_in_which_the_reader_waits(monkeypatch):
    clock = iter([10.0, 12.0, 20.0, 20.5, 30.0, 33.0])
    monkeypatch.setattr(prefetch, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with Prefetch(iter("ab"), ahead=2) as items:
        assert items.waited == 0
        assert (next(items), items.waited) == ("a", 2.0)
        assert (list(items), items.waited) == (["b"], 5.5)


def test_batches_count_the_seconds_of_the_step_not_those_of_the_thread_before_it():
    hosts = Prefetch(iter(()), ahead=1)
    with Batches(hosts, lambda host: host, torch.device("cpu")) as batches:
        hosts.waited, batches._ready.waited = 9.0, 3.5
        assert batches.waited == 3.5


def test_a_thousand_early_exits_leave_no_thread():
    before = set(threading.enumerate())  # some of which may end by themselves
    for _ in range(1000):
        with Prefetch(iter(range(100)), ahead=2) as items:
            next(items)
    assert set(threading.enumerate()) <= before


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


def test_a_dropped_iterator_frees_its_thread():
    items = Prefetch(iter(range(100)), ahead=2)
    thread = items._thread
    del items
    gc.collect()
    thread.join(timeout=300)
    assert not thread.is_alive()


def test_closing_wakes_a_reader_in_another_thread():
    """One that waits for an item which never comes: the source ends when it sees that nobody wants more."""
    closing, asked, found = threading.Event(), threading.Event(), []

    def source():
        yield 1
        asked.set()
        closing.wait()
        yield 2

    items = Prefetch(source(), ahead=1)
    reader = threading.Thread(target=lambda: found.extend(items))
    reader.start()
    asked.wait()
    items._stop.set()  # as close does first
    closing.set()
    items.close()
    reader.join(timeout=300)
    assert not reader.is_alive()
    assert found == [1]

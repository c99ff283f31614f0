"""Batches, from a source of samples to the device.

One thread reads some batches ahead, two at once where several threads decode; another moves the next one to the
device on a CUDA stream of its own, while the step computes. Decoded images are transferred as uint8 [B, H, W, 3] from
pinned memory. Normalised on the host they would be four times the bytes (588 KiB an image of 224 pixels; in bf16
two), and take 41 us of a CPU each, of about 1.2 ms for decoding. Erasing and mixup work on normalised float32 values,
so they run on the device too. On the CPU the steps are the same, without a transfer.
"""

import contextlib
import functools
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from widemix.data.mixup import Mixture
from widemix.data.split import PreparedFile
from widemix.errors import InputError
from widemix.recipe.data import AnyDataSection

Item = TypeVar("Item")
_END = object()
_POLL = 0.1  # seconds between checks of the stop flag


@dataclass(frozen=True)
class Batch:
    """A batch on the device.

    `inputs` are normalised images [B, 3, H, W] (channels last in memory) or token ids int64 [B, T];
    `targets` are probabilities [B, classes] in training, labels int64 [B] in evaluation; where
    `data.targets` is not class, the numbers to predict, float32 [B, targets].
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    samples: np.ndarray  # int64 [B]: the samples' numbers in the split
    replaced: int = 0  # how many of them replace one that cannot be read
    keys: torch.Tensor | None = (
        None  # int64 [B] on the device, of (seed, epoch, view id): stochastic depth samples by them
    )

    def __len__(self) -> int:
        return len(self.samples)


class StepPart(NamedTuple):
    """A part of the samples of a step, by default all.

    They are given by view ids (see `widemix.data.order`): a view id modulo `len(file)` is the sample.
    """

    step_view_ids: np.ndarray  # int64 [global batch]: those of the whole step, on all ranks
    epoch: int = 0
    part: slice = slice(None)

    @property
    def view_ids(self) -> np.ndarray:
        """Those that are read: int64 [B]."""
        return self.step_view_ids[self.part]


@dataclass(frozen=True)
class HostBatch:
    """A batch on the host, and how its images are mixed and rounded on the device."""

    inputs: torch.Tensor  # images uint8 [B, H, W, 3], or token ids int64 [B, T]; pinned where there is a GPU
    labels: torch.Tensor  # int64 [B], or targets float32 [B, targets]
    view_ids: np.ndarray  # int64 [B]: others than those asked for where a sample was replaced
    epoch: int
    replaced: int = 0  # how many were
    mixture: Mixture | None = None
    dtype: torch.dtype = torch.float32
    to: torch.Tensor | None = None  # float32 [B, H, W, 3] on the device, which the images are written to


class Source(Protocol):
    """One split, as images or tokens: `read` by the background thread, then brought `to_device`."""

    @property
    def file(self) -> PreparedFile:
        """The split's opened file."""

    @property
    def descriptor(self) -> int:
        """The descriptor by which its samples are read."""

    @property
    def threads(self) -> int:
        """How many threads `read` uses."""

    def read(self, part: StepPart) -> HostBatch:
        """The samples of a part of a step."""

    def labels(self, view_ids: np.ndarray) -> torch.Tensor:
        """Labels int64 [B], or targets float32 [B, targets], on the host."""

    def to_device(self, host: HostBatch) -> torch.Tensor:
        """The model's inputs on the device: images normalised, erased, mixed and rounded, or ids."""

    def host_bytes(self, count: int) -> int:
        """Upper bound of the host memory of a batch of `count` samples."""


class Prefetch(Generic[Item]):
    """Iterate over `source` with up to `ahead` items ready. Use it in a `with` block, or call `close`.

    An exception of the source is raised at the next call, before the items that are ready: there may be many. A
    forked process has neither the thread nor a usable queue, whose lock the thread may have held: `InputError`.
    """

    def __init__(self, source: Iterator[Item], ahead: int):
        self._ready: queue.Queue[Any] = queue.Queue(ahead)
        self._stop = threading.Event()
        self._raised: list[BaseException] = []
        self._process = os.getpid()
        self.waited = 0.0  # seconds in which the consumer found no item ready
        # The thread has no reference to self: an iterator that is no longer used is collected, and stops the thread.
        arguments = (source, self._ready, self._raised, self._stop)
        self._thread = threading.Thread(target=_run, args=arguments, daemon=True)
        weakref.finalize(self, self._stop.set)
        self._thread.start()

    def __iter__(self) -> "Prefetch[Item]":
        return self

    def __next__(self) -> Item:
        if self._process != os.getpid():
            raise InputError(
                "this iteration was begun before a fork, by threads of the parent; begin another one here"
            )
        if self._stop.is_set():
            raise StopIteration
        began = time.perf_counter()
        item: Any = _END if self._raised else self._ready.get()
        self.waited += time.perf_counter() - began
        self.check()
        if item is _END:
            self.close()
            raise StopIteration
        return item

    def check(self) -> None:
        """Raise the exception of the source, if there is one."""
        if self._raised:
            self.close()
            raise self._raised[0]

    def __enter__(self) -> "Prefetch[Item]":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and join it. A consumer that waits in another thread is woken by StopIteration."""
        if self._process != os.getpid():
            return
        self._stop.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()  # makes room, so that the thread sees the flag at once
        self._thread.join()
        with contextlib.suppress(queue.Full):  # then the consumer is woken by what is there
            self._ready.put_nowait(_END)


class Batches:
    """Iterator over batches on the device, one ahead of the training step. Use it in a `with` block."""

    def __init__(self, hosts: Prefetch[HostBatch], to_device: Callable[[HostBatch], Batch], device: torch.device):
        self._hosts, self._device = hosts, device
        self._ready: Prefetch[Batch] = Prefetch(on_side_stream(hosts, to_device, device), ahead=1)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        self._hosts.check()
        batch = next(self._ready)
        record_stream(self._device, batch.inputs, batch.targets, *([] if batch.keys is None else [batch.keys]))
        return batch

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_) -> None:
        self._hosts.close()
        self._ready.close()

    @property
    def waited(self) -> float:
        """Seconds so far in which the step waited for a batch."""
        return self._ready.waited


def prefetch(
    reads: Iterable[Callable[[], HostBatch]], data: AnyDataSection, source: Source, count: int
) -> Prefetch[HostBatch]:
    """Read batches of at most `count` samples ahead, within `data.prefetch_batches` and `data.prefetch_mib`."""
    ahead = max(1, min(data.prefetch_batches, (data.prefetch_mib << 20) // source.host_bytes(count)))
    at_once = min(source.threads, ahead)
    return Prefetch(_read(reads, at_once), ahead - at_once + 1)


def _read(reads: Iterable[Callable[[], Item]], at_once: int) -> Iterator[Item]:
    """Yield what the calls return, in their order, with `at_once` of them running.

    The decoding threads go on with the next batch while the last images of one are decoded, and while Python
    prepares it. Three let 16 threads do 97 % of 16 times the work of one, two 87 % (`widemix bench curve`).
    """
    if at_once == 1:
        yield from (read() for read in reads)
        return
    with ThreadPoolExecutor(at_once, thread_name_prefix="reads") as pool:
        running: deque[Future[Item]] = deque()
        for read in reads:
            running.append(pool.submit(read))
            if len(running) == at_once:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def on_side_stream(
    hosts: Iterable[Item], to_device: Callable[[Item], Batch], device: torch.device
) -> Iterator[Batch]:
    """`to_device` of each host batch, computed on the device's side stream. To be iterated by one background thread.

    The thread synchronises with the stream, so every batch that was yielded is complete on the device.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a new thread is on GPU 0, and would go back there after the stream
    with torch.cuda.stream(_side_stream(device)) if device.type == "cuda" else nullcontext():
        for host in hosts:
            batch = to_device(host)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            yield batch


def record_stream(device: torch.device, *tensors: torch.Tensor) -> None:
    """Mark tensors of `on_side_stream` as used by the current stream, so that their memory is not reused before."""
    if device.type == "cuda":
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream(device))


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the life of the process, of high priority: its kernels are few, and a thread waits for them."""
    return torch.cuda.Stream(device, priority=-1)


def _run(source: Iterator, ready: queue.Queue, raised: list[BaseException], stop: threading.Event) -> None:
    try:
        for item in source:
            if not _put(ready, item, stop):
                return
    except BaseException as error:
        raised.append(error)
    _put(ready, _END, stop)


def _put(ready: queue.Queue, entry: Any, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            ready.put(entry, timeout=_POLL)
            return True
        except queue.Full:
            continue
    return False

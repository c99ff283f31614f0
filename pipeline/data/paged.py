"""Sample order for files larger than memory: samples near in the file are near in time.

The file is divided into pages, which each epoch puts into another random order. That sequence of samples is divided
into lanes, the same number for every world size, and each step takes a run of samples from each lane. A rank has
neighbouring lanes in each micro-batch, so that it reads no pages of other ranks, unless ranks x micro-batches are
more than the lanes. Within a lane samples are shuffled in windows of many pages: only a window has to be in memory,
and the next one is requested in the order of the file while it is used.
"""

import functools
import math

import numpy as np

from widemix.data.compiled import jit
from widemix.data.order import ClassSampling, Weighted, shuffled, split_views
from widemix.data.random import PAGE, WINDOW, key, uniform
from widemix.files import advise

PAGE_BYTES = 1 << 20  # read at full speed from any disk, yet a window of 4 GiB has thousands
_PIECE = 128 << 10  # bytes; of a longer request Linux reads the beginning and forgets the rest
LANES = 64  # at most: as many nodes can divide the reading among themselves


class PagedOrder:
    """Shuffles pages, and samples within windows of pages; see above.

    offset, size: int64 [n], the place of each sample in the file, bytes. window_bytes: of the file, over all lanes.
    repeats: views of each sample, see `widemix.data.order`. weighted: an epoch has what `widemix.data.order` says,
    sorted by the place in the file, in place of each sample once.
    """

    def __init__(
        self,
        offset: np.ndarray,
        size: np.ndarray,
        global_batch: int,
        seed: int,
        window_bytes: int,
        repeats: int = 1,
        page_bytes: int = PAGE_BYTES,
        weighted: Weighted | None = None,
    ):
        self.count, self.seed, self.repeats = len(offset), seed, repeats
        mean = float(size.mean())
        self.page = max(1, round(page_bytes / mean))  # samples
        self.lanes = math.gcd(global_batch, LANES)
        self.run = global_batch // self.lanes  # view ids of a lane in a step
        self.length = -(-(self.count // global_batch) * self.run // repeats)  # samples of a lane in an epoch
        most = max(1, int(window_bytes / mean / self.lanes))
        self.window = max(
            1, -(-self.length // max(1, -(-self.length // most)))
        )  # samples; windows are of about equal size

        self._by_place: np.ndarray | None = None
        self._offset, self._size = offset, size  # in the order of the file
        if not (offset[1:] >= offset[:-1]).all():
            self._by_place = np.argsort(offset, kind="stable")
            self._offset, self._size = offset[self._by_place], size[self._by_place]

        self._sampling: ClassSampling | None = None
        if weighted is not None:
            label = weighted.label if self._by_place is None else weighted.label[self._by_place]
            self._sampling = ClassSampling(weighted._replace(label=label), self.lanes * self.length, seed, repeats)
        self._paged = self._sampling.length if self._sampling else self.count  # samples that are divided into pages

    def step(self, epoch: int, step: int) -> np.ndarray:
        """The view ids of one step of an epoch, lane by lane: int64 [global_batch]."""
        places, views = split_views(step * self.run, self.run, self.repeats)
        first, last = int(places.min()), int(places.max()) + 1
        positions = _deal(first, last, self.lanes, self.length, self.window, self.seed, epoch)
        view_ids = self._places(epoch, positions[:, places - first])
        if self._by_place is not None:
            view_ids = self._by_place[view_ids % self.count] + view_ids // self.count * self.count
        return view_ids + self.count * np.tile(views, self.lanes)

    def prefetch_ranges(self, epoch: int, step: int, is_first: bool, parts: list[slice]) -> np.ndarray:
        """The samples of this step one window later; in the first step also all of the current window."""
        begin, end = (-(-at * self.run // self.repeats) for at in (step, step + 1))
        now = step * self.run // self.repeats // self.window * self.window
        begin = now if is_first else begin + self.window
        wanted = np.arange(begin, min(end + self.window, self.length), dtype=np.int64)
        runs = [range(part.start // self.run, -(-part.stop // self.run)) for part in parts]
        lanes = np.array(sorted(set().union(*runs)), np.int64)
        places = self._places(epoch, self.length * lanes[:, None] + wanted)
        if self._sampling:
            places %= self.count
        cuts = np.flatnonzero(np.diff(places).view(np.uint64) > 1)  # 0 where an epoch has a sample several times
        starts, stops = places[np.append(0, cuts + 1)[: len(places)]], places[np.append(cuts, -1)[: len(places)]]
        return np.stack([self._offset[starts], self._offset[stops] + self._size[stops]], axis=1)

    def _places(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Places in the file, in samples, of positions in the epoch's sequence of pages, + count x earlier views."""
        begin = int(uniform(key(self.seed, epoch, 0, PAGE), 0) * self._paged)
        places = _in_pages(positions.reshape(-1), self._pages(epoch), self.page, self._paged, begin)
        return places if self._sampling is None else self._sampled(epoch)[places]

    @functools.lru_cache(maxsize=2)  # noqa: B019  as `_pages`
    def _sampled(self, epoch: int) -> np.ndarray:
        """Return an epoch's samples in the order of the file: places in it + count x earlier views, int64 [paged]."""
        assert self._sampling is not None
        view_ids = self._sampling.view_ids(np.arange(self._paged), epoch)
        return view_ids[np.argsort(view_ids % self.count, kind="stable")]

    @functools.lru_cache(maxsize=2)  # noqa: B019  a loader has one order all its life
    def _pages(self, epoch: int) -> np.ndarray:
        """The pages in the epoch's order. The short page comes last; each epoch it is another part of the file."""
        whole = self._paged // self.page
        order = shuffled(np.arange(whole), whole, key(self.seed, epoch, 1, PAGE))
        return np.append(order, whole)


@jit
def _deal(first, last, lanes, length, window, seed, epoch):
    """Positions in the epoch's sequence of samples first to last of each lane: int64 [lanes, last - first]."""
    dealt = np.empty((lanes, last - first), np.int64)
    for lane in range(lanes):
        at = first
        while at < last:
            number = at // window
            start = number * window
            end, size = min(start + window, last), min(window, length - start)
            stream = key(seed, epoch, (lane << 32) | number, WINDOW)
            inside = shuffled(np.arange(at - start, end - start), size, stream)
            dealt[lane, at - first : end - first] = lane * length + start + inside
            at = end
    return dealt


@jit
def _in_pages(positions, pages, page, count, begin):
    """Places in a file whose pages begin at sample `begin` and wrap around at its end."""
    places = np.empty(len(positions), np.int64)
    for i in range(len(positions)):
        number = positions[i] // page
        place = begin + pages[number] * page + positions[i] - number * page
        places[i] = place if place < count else place - count
    return places


def request_ranges(file: int, ranges: np.ndarray) -> None:
    """Let the kernel read these bytes, int64 [n, 2] of start and stop, into its page cache; returns at once.

    `file` is the open descriptor that they are then read by: the file may be renamed meanwhile.
    """
    for start, stop in ranges.tolist():
        for piece in range(start, stop, _PIECE):
            advise(file, piece, min(_PIECE, stop - piece), "WILLNEED")

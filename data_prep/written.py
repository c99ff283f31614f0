"""What a writer knows of the samples that it has taken so far, and the journal entries that record it."""

import base64
from typing import Any

import numpy as np

from widemix.data_prep.samples import Origin
from widemix.formats.checksums import NUMBER
from widemix.formats.tables import ALLOCATION

ORIGIN = np.dtype([("checksum", "<u4"), ("size", "<i8"), ("mtime_ns", "<i8"), ("ctime_ns", "<i8")])
PER_SAMPLE = ("samples", "table", "checksums", "stored")  # the tables with a row for each sample that was written


class Written:
    """The tables of a file, row by row, and what each sample was read from."""

    def __init__(self, expected: int, sample: np.dtype, parts: int, position: int) -> None:
        """Of at most `expected` samples, whose data begin at byte `position`.

        sample: the dtype of a record in the table of samples; parts: the fields that have data.
        """
        self.samples = np.zeros(expected, sample)
        self.table = np.zeros((expected, parts), ALLOCATION)
        self.checksums = np.zeros(expected, NUMBER)
        self.bands = bytearray()  # the checksums of bands, of the samples that have them
        self.origins = np.zeros(expected, ORIGIN)  # of all that were taken
        self.stored = np.zeros(expected, "<i8")  # the numbers of those that were written, among all that were taken
        self.exceptions: list[dict[str, str]] = []
        self.taken = 0  # samples processed, including those left out
        self.count = 0  # samples written
        self.position = position  # bytes; the end of the data
        self._mark()

    def take(self, name: str, rule: str, origin: Origin) -> None:
        """Count a sample as processed."""
        self.origins[self.taken] = (origin.checksum, *origin.status)
        self.taken += 1
        if rule:
            self.exceptions.append({"file": name, "rule": rule})

    def add(self, row: tuple, places: list[tuple[int, int]], checksum: int, bands: bytes) -> None:
        """Count the sample that was taken last as written, with position and size in bytes of each of its parts."""
        for number, place in enumerate(places):
            self.table[self.count, number] = (self.count, *place)
        self.samples[self.count] = row
        self.checksums[self.count] = checksum
        self.stored[self.count] = self.taken - 1
        self.bands += bands
        self.count += 1

    @property
    def unsaved(self) -> int:
        """Bytes of data after the last entry."""
        return self.position - self._saved[-1]

    def next_entry(self) -> dict[str, Any]:
        """A journal entry of what came after the last one."""
        taken, count, bands, exceptions, _ = self._saved
        new = slice(count, self.count)
        tables = {name: getattr(self, name)[new] for name in PER_SAMPLE}
        tables |= {"origins": self.origins[taken : self.taken], "bands": self.bands[bands:]}
        self._mark()
        encoded = {name: base64.b64encode(bytes(table)).decode("ascii") for name, table in tables.items()}
        return {"taken": self.taken, "end": self.position, "exceptions": self.exceptions[exceptions:], **encoded}

    def restore(self, entry: dict[str, Any]) -> None:
        """Continue after a journal entry."""
        for name in PER_SAMPLE:
            table = getattr(self, name)
            rows = np.frombuffer(base64.b64decode(entry[name]), table.dtype).reshape(-1, *table.shape[1:])
            table[self.count : self.count + len(rows)] = rows
        self.origins[self.taken : entry["taken"]] = np.frombuffer(base64.b64decode(entry["origins"]), ORIGIN)
        self.bands += base64.b64decode(entry["bands"])
        self.exceptions += entry["exceptions"]
        self.taken, self.count, self.position = entry["taken"], self.count + len(rows), entry["end"]
        self._mark()

    def _mark(self) -> None:
        self._saved = (self.taken, self.count, len(self.bands), len(self.exceptions), self.position)

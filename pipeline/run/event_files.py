"""TensorBoard's event files of a run folder.

TensorBoard plots one file after the other, in the order of their names: steps that were trained twice would be
plotted twice. So each start writes a new file that begins with what is kept of the others, and removes those.
"""

import itertools
import os
import platform
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

from widemix.files import open_to_write

BY_EPOCH = "over_epochs_x100/"  # tags whose steps are hundredths of an epoch begin so
Dropped = Callable[[str, int], bool]  # of a tag and the step of its line

_PREFIX = "events.out.tfevents."
_BUFFER = 8 << 20  # bytes of events that are kept in memory while the disk is full
_FILES = itertools.count()  # of this process


class EventFile:
    """A new event file with what is kept of those in the run folder, which it replaces. `places`: the last step of
    each tag by hundredths of an epoch. With `dropped` None those, of which another process may write one, stay.

    It is written by the thread that adds an event. torch's own is written by a thread that ends, with a traceback, on
    a full disk. This one keeps the events in memory, as `MetricsWriter` does its lines.
    """

    def __init__(self, run_dir: Path, dropped: Dropped | None):
        self._run_dir = run_dir
        earlier = sorted(run_dir.glob(f"{_PREFIX}*"))
        # After those that are there, whatever the clock says.
        seconds = max([int(time.time()), *(_seconds(path) + 1 for path in earlier)])
        path = run_dir / f"{_PREFIX}{seconds:010d}.{platform.node()}.{os.getpid()}.{next(_FILES)}"
        hidden = path.with_name(f".{path.name}")
        for stale in run_dir.glob(f".{_PREFIX}*") if dropped else ():  # of a start that was killed while it wrote one
            stale.unlink()
        self._file = open_to_write(hidden, "wb", _BUFFER)
        self._records = RecordWriter(self._file)
        self.add_event(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self.places: dict[str, int] = {}
        if dropped:
            self._replace(earlier, dropped)
        hidden.rename(path)
        for replaced in earlier if dropped else ():
            replaced.unlink()

    def _replace(self, earlier: list[Path], dropped: Dropped) -> None:
        """Write what is kept of earlier files, of which TensorBoard then leaves out all from step 0 on."""
        self.add_event(Event(wall_time=time.time(), step=0, session_log=SessionLog(status=SessionLog.START)))
        for (tag, step), record in _kept(earlier, dropped).items():
            self._file.write(record)
            if tag.startswith(BY_EPOCH):
                self.places[tag] = step
        if earlier:
            self._file.flush()
            os.fsync(self._file.fileno())

    def get_logdir(self) -> str:
        """Return the run folder; torch's FileWriter asks for it."""
        return str(self._run_dir)

    def add_event(self, event: Event) -> None:
        """Write an event, or keep it in memory."""
        with suppress(OSError):  # more than the buffer holds: the curves have a gap
            self._records.write(event.SerializeToString())

    def flush(self) -> None:
        """Write what is in memory, if there is space."""
        with suppress(OSError):  # later, when there is space
            self._file.flush()

    def close(self) -> None:
        """Write what is in memory, if there is space, and close the file."""
        with suppress(OSError):
            self._file.close()


def _kept(paths: list[Path], dropped: Dropped) -> dict[tuple[str, int], bytes]:
    """The records that are not dropped, by tag and step, the last of each, in the order of their lines."""
    found: dict[tuple[str, int], tuple[int, bytes]] = {}  # with the step of the line
    for path in paths:
        line = 0
        for event, record in _events(path):
            if event.session_log.status == SessionLog.START:
                found = {place: known for place, known in found.items() if known[0] < event.step}
            for tag in [value.tag for value in event.summary.value][:1]:
                if not tag.startswith(BY_EPOCH):  # those follow the other metrics of their line
                    line = event.step
                found.pop((tag, event.step), None)
                found[tag, event.step] = line, record
    ordered = sorted(found.items(), key=lambda item: item[1][0])
    return {(tag, step): record for (tag, step), (line, record) in ordered if not dropped(tag, line)}


def _events(path: Path) -> Iterator[tuple[Event, bytes]]:
    """The events of a file, each with its record (length, data, checksums), up to the first that is damaged."""
    data, place = path.read_bytes(), 0
    while place + 12 <= len(data):
        begin, end = place + 12, place + 12 + struct.unpack_from("<Q", data, place)[0]
        if end + 4 > len(data):
            return
        ends_file = end + 20 > len(data)  # a killed run tears the last record; the checksum of each takes too long
        if ends_file and struct.pack("<I", masked_crc32c(data[begin:end])) != data[end : end + 4]:
            return
        try:
            event = Event.FromString(data[begin:end])
        except DecodeError:
            return
        yield event, data[place : end + 4]
        place = end + 4


def _seconds(path: Path) -> int:
    """The time in a file's name, s since 1970."""
    text = path.name.removeprefix(_PREFIX).partition(".")[0]
    return int(text) if text.isdecimal() else 0

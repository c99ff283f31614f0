"""Ctrl-C, SIGTERM, SIGHUP, SIGQUIT and SIGUSR1 ask the run to stop after the current step, with a checkpoint."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from widemix.processes import KEYS, leave_closed_terminal, stop_signals


class Stopped(Exception):
    """A signal came while there was nothing to save; its text is the signal's name."""


class StopRequest:
    """A flag that a signal sets and the training loop reads; use it in a `with` block.

    A second Ctrl-C, or Ctrl-\\, raises KeyboardInterrupt at once, as Python does without a handler. One after another
    signal is the first: the SIGTERM that whoever started this rank passes on may overtake it.
    """

    came = False  # whether any in this process has been set

    def __init__(self) -> None:
        self.requested = False
        self._key = False  # a key of the terminal was among the signals
        self._at_once = False

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._request) for number in stop_signals()}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise `Stopped` for a signal while in this block, which waits for what may never come."""
        self._at_once = True
        try:
            if self.requested:
                raise Stopped("a signal")
            yield
        finally:
            self._at_once = False

    def _request(self, number: int, frame: FrameType | None) -> None:
        leave_closed_terminal()
        key, again = number in KEYS, self._key and number in KEYS
        known, self.requested, self._key = self.requested, True, self._key or key
        StopRequest.came = True
        if self._at_once:
            self._at_once = False
            raise Stopped(_name(number))
        if again:
            raise KeyboardInterrupt
        if (key or not known) and os.environ.get("RANK", "0") == "0":
            more = f"; a second {KEYS[number]} stops at once" if key else ""
            with suppress(OSError):  # Ctrl-C also ended what read it, such as tee
                # not print: the signal may have interrupted another one
                os.write(2, f"{_name(number)}: stopping after this step, with a checkpoint{more}\n".encode())


@contextmanager
def stops_once() -> Iterator[None]:
    """Let a process that only trains in this block end with its own exit code once it was asked to stop.

    A stop often comes twice: from a terminal, `pkill` or a batch system, and from whoever started the rank. After the
    `StopRequest` that took the first one, all but keys are ignored.
    """
    others = [number for number in stop_signals() if number not in KEYS]

    def late(number: int, _: FrameType | None) -> None:
        if not StopRequest.came:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    for number in others:
        signal.signal(number, late)
    try:
        yield
    finally:
        if StopRequest.came:
            for number in others:
                signal.signal(number, signal.SIG_IGN)  # which holds until the process has ended, as `late` does not


def _name(number: int) -> str:
    return KEYS.get(number) or signal.Signals(number).name

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

    A second Ctrl-C, or Ctrl-\\, raises KeyboardInterrupt at once, as Python does without a handler.
    """

    def __init__(self) -> None:
        self.requested = False
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
        if self._at_once:
            self.requested, self._at_once = True, False
            raise Stopped(_name(number))
        if self.requested and number in KEYS:
            raise KeyboardInterrupt
        known, self.requested = self.requested, True
        if not known and os.environ.get("RANK", "0") == "0":
            again = f"; a second {KEYS[number]} stops at once" if number in KEYS else ""
            with suppress(OSError):  # Ctrl-C also ended what read it, such as tee
                # not print: the signal may have interrupted another one
                os.write(2, f"{_name(number)}: stopping after this step, with a checkpoint{again}\n".encode())


def _name(number: int) -> str:
    return KEYS.get(number) or signal.Signals(number).name

"""Ctrl-C, SIGTERM and SIGUSR1 ask the run to stop after the current step, with a checkpoint."""

import os
import signal
from contextlib import suppress
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """A flag that a signal sets and the training loop reads; use it in a `with` block.

    A second Ctrl-C raises KeyboardInterrupt at once, as Python does without a handler.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._request) for number in _SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        known, self.requested = self.requested, True
        if not known and os.environ.get("RANK", "0") == "0":
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            again = "; a second Ctrl-C stops at once" if number == signal.SIGINT else ""
            with suppress(OSError):  # Ctrl-C also ended what read it, such as tee
                # not print: the signal may have interrupted another one
                os.write(2, f"{name}: stopping after this step, with a checkpoint{again}\n".encode())

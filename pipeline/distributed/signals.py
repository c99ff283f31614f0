"""Ctrl-C, SIGTERM and SIGUSR1 ask the run to stop at the next step, with a checkpoint."""

import signal
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Raised by a signal, read by the loop. A second Ctrl-C interrupts at once, as Python does."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._raise) for number in _SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

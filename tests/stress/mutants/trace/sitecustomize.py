"""Notes which lines of the project a process runs, as Python starts it: `tests.stress.mutants.coverage` sets it up.

Each line is written when it is first run, since processes are killed; of a function those that its first calls in
each test run, which costs little however often it is called.
"""

import os
import sys
import threading
from collections import Counter

CALLS = 30


def start(root: str, output: int) -> None:
    """Note the lines of files below `root` in a descriptor, for this process and its forks."""
    calls: Counter = Counter()
    seen: set[tuple[object, int]] = set()

    def line(frame, event, _):
        place = (frame.f_code, frame.f_lineno)
        if place not in seen:
            seen.add(place)
            try:
                os.write(output, f"{frame.f_code.co_filename}:{frame.f_lineno}\n".encode())
            except OSError:
                return None  # a test has closed it
        return line

    def call(frame, event, _):
        code = frame.f_code
        if code.co_name == "pytest_runtest_protocol":  # another test begins
            calls.clear()
        if not code.co_filename.startswith(root) or calls[code] >= CALLS:
            return None
        calls[code] += 1
        return line(frame, event, None)

    threading.settrace(call)
    sys.settrace(call)


if "WIDEMIX_TRACE" in os.environ:
    folder, place = os.environ["WIDEMIX_TRACE"].split(os.pathsep)
    start(place, os.open(f"{folder}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))

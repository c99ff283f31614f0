"""The command `widemix`."""

import io
import os
import sys
import threading

from widemix.terminal import ANY_TEXT


def main() -> None:
    """Run the command line of this process, and exit with its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        print_all_text(sys.stdout)
    timer = threading.Timer(2.0, _name_import)
    timer.daemon = True
    if sys.stderr.isatty():  # for somebody who waits; what reads an error needs that line alone
        timer.start()
    try:
        from widemix.cli.commands import exit_rank, run_command, tune_garbage_collector

        tune_garbage_collector()
        from widemix.cli.parser import make_parser  # takes a while, so Ctrl-C is handled here too

        code = run_command(make_parser(only=sys.argv[1] if len(sys.argv) > 1 else None))
        if os.environ.get("RANK"):
            exit_rank(code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 1
    finally:
        timer.cancel()
    sys.exit(code)


def print_all_text(stream: io.TextIOWrapper) -> None:
    r"""Let a stream take file names with the bytes that they have on disk, and what its encoding lacks as \xe9."""
    stream.reconfigure(errors=ANY_TEXT)


def _name_import() -> None:
    """Say on stderr that torch or timm is being imported, if one is: it takes seconds, on a slow disk many."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    names: list[str] = []  # of the modules that the main thread is in, from the innermost to the first of ours
    while frame and not (names and names[-1].startswith("widemix.")):
        names.append(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    if "importlib._bootstrap" in names and {"torch", "timm"} & {name.partition(".")[0] for name in names}:
        print("importing torch and timm", file=sys.stderr, flush=True)

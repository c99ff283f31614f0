"""The command `widemix`."""

import io
import sys


def main() -> None:
    """Run the command line of this process, and exit with its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # print file names with the bytes that they have on disk
        sys.stdout.reconfigure(errors="surrogateescape")
    try:
        from pipeline.cli.commands import run_command, tune_garbage_collector

        tune_garbage_collector()
        from pipeline.cli.parser import make_parser  # takes a while, so Ctrl-C is handled here too

        code = run_command(make_parser())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 1
    sys.exit(code)

"""The command `widemix`."""

import io
import sys


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):  # names go out as the bytes that they are on disk
        sys.stdout.reconfigure(errors="surrogateescape")
    try:
        from pipeline.cli.commands import run_command
        from pipeline.cli.parser import make_parser  # takes a while, in which Ctrl-C is answered as it is later

        code = run_command(make_parser())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 1
    sys.exit(code)

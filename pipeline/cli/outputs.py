"""What commands that analyse write: figures into a folder and a run's TensorBoard, numbers into files."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from widemix.errors import Exit
from widemix.files import write_output


def add_outputs(parser: argparse.ArgumentParser, to: str, json: str) -> None:
    """Add --to, --tensorboard and --json; the texts say what they write."""
    add = parser.add_argument
    add("--to", type=Path, metavar="DIR", help=to)
    add("--tensorboard", type=Path, metavar="RUN", help="add the figures to the TensorBoard of this run folder")
    add("--json", type=Path, metavar="FILE", help=json)


def write_outputs(
    arguments: argparse.Namespace,
    numbers: Any,
    figures: Mapping[str, Callable[[], Any]],
    tables: Mapping[str, str] | None = None,
) -> Exit:
    """Write figures and tables, by file name, into --to, the figures to --tensorboard, the numbers to --json.

    Only what is asked for is plotted. Prints the paths. A table without text is left out.
    """
    from widemix.plots.style import add_to_tensorboard, as_png

    plotted = (
        {name: as_png(plot()) for name, plot in figures.items()} if arguments.to or arguments.tensorboard else {}
    )
    if arguments.to:
        arguments.to.mkdir(parents=True, exist_ok=True)
        texts = {name: text.encode() for name, text in (tables or {}).items() if text}
        for name, content in {**plotted, **texts}.items():
            write_output(arguments.to / name, content)
            print(arguments.to / name)
    if arguments.tensorboard:
        print(add_to_tensorboard({Path(name).stem: png for name, png in plotted.items()}, arguments.tensorboard))
    if arguments.json:
        write_output(arguments.json, json.dumps(numbers, indent=1) + "\n")
        print(arguments.json)
    return Exit.DONE

"""What commands that analyse write: figures into a folder, numbers into a file."""

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.cli.commands import Exit
from pipeline.files import atomic_write


def write_outputs(arguments: argparse.Namespace, numbers: Any, figures: Mapping[str, Callable[[], Any]]) -> Exit:
    """Write the figures, by file name, into --to and the numbers to --json, where given; print their paths."""
    from pipeline.analysis.figures import save_figure

    if arguments.to:
        arguments.to.mkdir(parents=True, exist_ok=True)
        for name, draw in figures.items():
            print(save_figure(draw(), arguments.to / name))
    if arguments.json:
        atomic_write(arguments.json, json.dumps(numbers, indent=1) + "\n")
        print(arguments.json)
    return Exit.DONE

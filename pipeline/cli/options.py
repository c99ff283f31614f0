"""Options that several commands share: the network and data that they take, the files that they write."""

import argparse
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from widemix.errors import Exit, InputError
from widemix.files import write_output
from widemix.formats.manifest import find_split, find_trained_on, read_manifest
from widemix.models.hub import FORMS, HUB, TIMM, check_timm_name
from widemix.recipe import load_stored_recipe
from widemix.recipe.files import find_recipe
from widemix.run.choice import LAST, choose
from widemix.terminal import print

NETWORK = (
    "A NETWORK is a run folder (its newest checkpoint), a checkpoint folder, a folder of `widemix export`, a recipe "
    "(RECIPE.yaml, its weights at the start of training), timm:NAME (timm's pretrained weights) or hf:OWNER/NAME."
)


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add --checkpoint and --ema: which weights of a run are taken."""
    which = "of a run folder: its last checkpoint, the best by train.keep_best, or that of a step (default: last)"
    parser.add_argument("--checkpoint", default=LAST, metavar="last|best|STEP", help=which)
    add_ema(parser)


def add_ema(parser: argparse.ArgumentParser) -> None:
    """Add --ema."""
    parser.add_argument("--ema", action="store_true", help="use the averaged weights of train.ema_decay")


def add_evaluation(parser: argparse.ArgumentParser) -> None:
    """Add --data, --split, --batch, --checkpoint and --ema, whose defaults are the recipe's."""
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="prepared folder (default: the recipe's data.path)")
    add("--split", metavar="NAME", help="split to evaluate on (default: the recipe's data.eval_split)")
    add("--batch", type=int, metavar="N", help="batch size (default: the recipe's eval.batch_size, or 128)")
    add_checkpoint(parser)


def choose_networks(arguments: argparse.Namespace, *names: str) -> list[str]:
    """Return each NETWORK, of run folders the checkpoint of --checkpoint where that is not the last.

    `InputError` for one that is not there: at once, before torch and timm are imported.
    """
    for name in names:
        path = Path(name)
        check_timm_name(name, name)
        elsewhere = name.startswith((TIMM, HUB)) or path.suffix in (".yaml", ".yml")
        if not (elsewhere or path.exists() or find_recipe(name).is_file()):
            raise InputError(f"{path}: no such run or checkpoint folder; give {FORMS}")
        if hasattr(arguments, "split"):
            _check_data(arguments, path)
    which, is_main = getattr(arguments, "checkpoint", None), os.environ.get("RANK", "0") == "0"
    runs = [name for name in dict.fromkeys(names) if (Path(name) / "checkpoints").is_dir()]
    if which not in (None, LAST) and not runs:
        raise InputError(f"--checkpoint {which}: is for a run folder, which {' and '.join(names)} is not")
    chosen = {name: choose(Path(name), which, is_main) for name in runs} if which else {}
    return [str(chosen[name]) if name in chosen and which != LAST else name for name in names]


def _check_data(arguments: argparse.Namespace, network: Path) -> None:
    """`InputError` where --data, or the folder on which a run was trained, is not there or lacks --split."""
    folder, recipe = arguments.data, network / "recipe.yaml"
    if not folder and recipe.is_file():
        folder = find_trained_on(load_stored_recipe(recipe).data.path, network)
    manifest = read_manifest(folder) if folder else None
    if manifest and arguments.split:
        find_split(folder, arguments.split, manifest)


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
    plotted = {}
    if arguments.to or arguments.tensorboard:
        from widemix.plots.style import as_png

        plotted = {name: as_png(plot()) for name, plot in figures.items()}
    if arguments.to:
        arguments.to.mkdir(parents=True, exist_ok=True)
        texts = {name: text.encode() for name, text in (tables or {}).items() if text}
        for name, content in {**plotted, **texts}.items():
            write_output(arguments.to / name, content)
            print(arguments.to / name)
    if arguments.tensorboard:
        from widemix.run.tensorboard import add_to_tensorboard

        print(add_to_tensorboard({Path(name).stem: png for name, png in plotted.items()}, arguments.tensorboard))
    if arguments.json:
        write_output(arguments.json, json.dumps(numbers, indent=1) + "\n")
        print(arguments.json)
    return Exit.DONE

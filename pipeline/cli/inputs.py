"""What commands on trained networks take: a network, the data to evaluate it on, and which of its weights."""

import argparse
from pathlib import Path

from widemix.errors import InputError
from widemix.models.names import FORMS, HUB, TIMM
from widemix.recipe.files import find_recipe

NETWORK = (
    "A NETWORK is a run folder (its newest checkpoint), a checkpoint folder, a folder of `widemix export`, a recipe "
    "(RECIPE.yaml, its weights at the start of training), timm:NAME (timm's pretrained weights) or hf:OWNER/NAME."
)


def add_ema(parser: argparse.ArgumentParser) -> None:
    """Add --ema."""
    parser.add_argument("--ema", action="store_true", help="use the averaged weights of train.ema_decay")


def add_evaluation(parser: argparse.ArgumentParser) -> None:
    """Add --data, --split, --batch and --ema, whose defaults are the recipe's."""
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="prepared folder (default: the recipe's data.path)")
    add("--split", metavar="NAME", help="split to evaluate on (default: the recipe's data.eval_split)")
    add("--batch", type=int, metavar="N", help="batch size (default: the recipe's eval.batch_size, or 128)")
    add_ema(parser)


def check_networks(*names: str) -> None:
    """Raise `InputError` for a NETWORK that is not there: at once, before torch and timm are imported."""
    for name in names:
        path = Path(name)
        elsewhere = name.startswith((TIMM, HUB)) or path.suffix in (".yaml", ".yml")
        if not (elsewhere or path.exists() or find_recipe(name).is_file()):
            raise InputError(f"{path}: no such run or checkpoint folder; give {FORMS}")

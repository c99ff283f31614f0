"""widemix analyse: what runs and recipes do, as numbers and pictures."""

import argparse
from pathlib import Path

from pipeline.cli.commands import Exit, add_recipe_arguments, load_from_arguments
from pipeline.errors import InputError


def add_analyse(commands) -> None:
    parser = commands.add_parser(
        "analyse", help="look into recipes", description="Numbers and pictures of what a recipe does."
    )
    analyses = parser.add_subparsers(metavar="ANALYSIS", required=True)
    add_augment(analyses)


def add_augment(analyses) -> None:
    parser = analyses.add_parser(
        "augment",
        help="training pictures as the model sees them, and every operation beside Pillow's",
        description="Write training.png, the first pictures of a run as the model sees them, and operations.png, "
        "every operation over its range beside Pillow's result and the difference. Needs the prepared data.",
    )
    add_recipe_arguments(parser)
    add = parser.add_argument
    add("--to", type=Path, metavar="DIR", help="folder to write (default: analysis/<recipe>)")
    add("--pictures", type=int, default=32, metavar="N", help="training pictures to show (default: 32)")
    add(
        "--seed", type=int, metavar="N", help="of crop, policy, erasing and mixing (default: the recipe's train.seed)"
    )
    parser.set_defaults(command=_augment)


def _augment(arguments: argparse.Namespace) -> Exit:
    recipe = load_from_arguments(arguments)
    if arguments.pictures < 1:
        raise InputError(f"--pictures {arguments.pictures}: must be at least 1")
    if arguments.seed is not None and arguments.seed < 0:
        raise InputError(f"--seed {arguments.seed}: must not be negative")
    from pipeline.analysis.augment import draw_sheets

    name = Path(arguments.recipe)
    folder = arguments.to or Path("analysis") / f"{name.resolve().parent.name}-{name.stem}"
    seed = recipe.train.seed if arguments.seed is None else arguments.seed
    for path in draw_sheets(recipe, folder, arguments.pictures, seed):
        print(path)
    return Exit.DONE

"""widemix analyse: figures about recipes and runs."""

import argparse
from pathlib import Path

from widemix.cli.analyse_images import add_filters, add_pixels
from widemix.cli.analyse_networks import add_cka, add_spectrum, add_weights
from widemix.cli.analyse_theory import add_regularisation, add_separation_rank, add_sparse_spectrum
from widemix.command_line.arguments import add_recipe_arguments
from widemix.command_line.commands import check_least, load_from_arguments
from widemix.errors import Exit
from widemix.terminal import print


def add_analyse(commands) -> None:
    """Add `widemix analyse`."""
    text = "plot and measure what recipes and networks do"
    parser = commands.add_parser("analyse", help=text, description=f"{text.capitalize()}.")
    analyses = parser.add_subparsers(metavar="ANALYSIS", required=True)
    for add in (
        add_augment,
        add_cka,
        add_spectrum,
        add_weights,
        add_pixels,
        add_filters,
        add_sparse_spectrum,
        add_regularisation,
        add_separation_rank,
    ):
        add(analyses)


def add_augment(analyses) -> None:
    """Add `widemix analyse augment`."""
    parser = analyses.add_parser(
        "augment",
        help="augmented training images, and every operation next to Pillow's",
        examples="widemix analyse augment digits/rp_mixer --to figures",
        description="Write training.png, the first training images as the model gets them, and operations.png, "
        "every augmentation operation over its range of magnitudes, next to Pillow's result and the difference. "
        "Needs the prepared data.",
    )
    add_recipe_arguments(parser)
    add = parser.add_argument
    add("--to", type=Path, metavar="DIR", help="folder to write to (default: analysis/<recipe>)")
    add("--tensorboard", type=Path, metavar="RUN", help="add both to the TensorBoard of this run folder")
    add("--images", type=int, default=32, metavar="N", help="number of training images (default: 32)")
    add("--seed", type=int, metavar="N", help="seed of the augmentation (default: the recipe's train.seed)")
    parser.set_defaults(command=_augment)


def _augment(arguments: argparse.Namespace) -> Exit:
    recipe = load_from_arguments(arguments)
    check_least(arguments, 1, "images")
    check_least(arguments, 0, "seed")
    from widemix.analysis.augment import write_sheets

    path = Path(arguments.recipe)
    folder = arguments.to or Path("analysis") / f"{path.resolve().parent.name}-{path.stem}"
    seed = recipe.train.seed if arguments.seed is None else arguments.seed
    paths = write_sheets(recipe, folder, arguments.images, seed)
    for path in paths:
        print(path)
    if arguments.tensorboard:
        from widemix.plots.tensorboard import add_to_tensorboard

        print(add_to_tensorboard({path.stem: path.read_bytes() for path in paths}, arguments.tensorboard))
    return Exit.DONE

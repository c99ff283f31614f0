"""widemix analyse: its parser; augment, pixels and filters, which are about images."""

import argparse
from functools import partial
from pathlib import Path

from widemix.cli.analyse_networks import add_cka, add_spectrum, add_weights
from widemix.cli.analyse_theory import add_regularisation, add_separation_rank, add_sparse_spectrum
from widemix.cli.arguments import add_recipe_arguments
from widemix.cli.commands import check_least, load_from_arguments
from widemix.cli.options import NETWORK, add_checkpoint, add_evaluation, add_outputs, choose_networks, write_outputs
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
        from widemix.run.tensorboard import add_to_tensorboard

        print(add_to_tensorboard({path.stem: path.read_bytes() for path in paths}, arguments.tensorboard))
    return Exit.DONE


def add_pixels(analyses) -> None:
    """Add `widemix analyse pixels`."""
    parser = analyses.add_parser(
        "pixels",
        help="accuracy with the pixels of all images shuffled in one fixed way",
        examples="widemix analyse pixels runs/a runs/b --to figures",
        description="Accuracy with the original images, with their patches and the pixels within patches "
        "shuffled, and with all pixels shuffled, each by one fixed permutation (section 3.4 of Tolstikhin et al. "
        f"2021). Networks are trained on such images with --data.pixel_order. {NETWORK}",
    )
    add = parser.add_argument
    add("networks", metavar="NETWORK", nargs="+", help="networks to evaluate")
    add("--patch", type=int, metavar="P", help="side of the patches in pixels (default: the network's own, or 16)")
    add_evaluation(parser)
    add_outputs(
        parser,
        "plot pixels.png, the accuracies, and inputs.png, some images",
        "write top-1 and loss of each network and order",
    )
    parser.set_defaults(command=_pixels)


def _pixels(arguments: argparse.Namespace) -> Exit:
    names = choose_networks(arguments, *arguments.networks)
    from widemix.analysis.pixels import ORDERS, pixel_scores, plot_inputs, plot_scores
    from widemix.evaluation.networks import load_network

    networks = [load_network(name, arguments.ema) for name in names]
    where = {"data": arguments.data, "split": arguments.split, "patch": arguments.patch}
    scores = [pixel_scores(network, batch=arguments.batch, **where) for network in networks]
    for each in scores:
        accuracies = ", ".join(f"{text} {each.top1[order]:.2f} %" for order, text in ORDERS.items())
        print(f"{each.network}, trained with pixel_order {each.trained}; top-1 by shuffled pixels: {accuracies}")
    figures = {
        "pixels.png": lambda: plot_scores(scores, networks[0].data.num_classes),
        "inputs.png": lambda: plot_inputs(networks[0], **where),
    }
    return write_outputs(arguments, [vars(each) for each in scores], figures)


def add_filters(analyses) -> None:
    """Add `widemix analyse filters`."""
    parser = analyses.add_parser(
        "filters",
        help="filters of the patch layer and of token-mixing units, as sheets",
        examples="widemix analyse filters runs/a --to figures",
        description="Plot the filters of the first convolution and the weights by which token-mixing units read the "
        "grid of patches, sorted by frequency, with opposite phases next to each other (figure 5 of Tolstikhin et "
        f"al. 2021). {NETWORK}",
    )
    add = parser.add_argument
    add("network", metavar="NETWORK", help="network to look into")
    add("--blocks", type=int, nargs="+", metavar="N", help="blocks with token mixings, from 0 (default: the first 3)")
    add_checkpoint(parser)
    add_outputs(parser, "plot a PNG of each layer there", "write order, frequencies and cosines of the pairs")
    parser.set_defaults(command=_filters)


def _filters(arguments: argparse.Namespace) -> Exit:
    [name] = choose_networks(arguments, arguments.network)
    import numpy as np

    from widemix.analysis.filters import layer_filters, plot_filters
    from widemix.evaluation.networks import load_network

    network = load_network(name, arguments.ema)
    filters = layer_filters(network.module, arguments.blocks)
    for each in filters:
        low, high = np.percentile(each.frequency, [5, 95])
        size = " x ".join(map(str, each.values.shape[1:3]))
        frequencies = f"frequencies {low:.3f} to {high:.3f} cycles a position"
        pairs = f"median cosine of pairs {each.median_opposition:.3f}"
        print(f"{each.layer}: {len(each.values)} filters of {size}, {frequencies}, {pairs}")
    figures = {f"{each.layer}.png": partial(plot_filters, name, each) for each in filters}
    numbers = {"network": name, "layers": [each.as_json() for each in filters]}
    return write_outputs(arguments, numbers, figures)

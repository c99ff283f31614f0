"""widemix analyse pixels: what networks do with pictures."""

import argparse
from pathlib import Path

from pipeline.cli.analyse_networks import NETWORK
from pipeline.cli.commands import Exit
from pipeline.cli.outputs import write_outputs


def add_pixels(analyses) -> None:
    """Add `widemix analyse pixels`."""
    parser = analyses.add_parser(
        "pixels",
        help="accuracy with the pixels of all pictures shuffled in one fixed way",
        description="Accuracy with the original pictures, with their patches and the pixels within patches "
        "shuffled, and with all pixels shuffled, each by one fixed permutation (section 3.4 of Tolstikhin et al. "
        f"2021). Networks are trained on such pictures with --data.pixel_order. {NETWORK}",
    )
    add = parser.add_argument
    add("networks", metavar="NETWORK", nargs="+", help="networks to evaluate")
    add("--patch", type=int, metavar="P", help="side of the patches in pixels (default: the network's own, or 16)")
    add("--data", type=Path, metavar="DIR", help="prepared folder (default: the recipe's data.path)")
    add("--split", metavar="NAME", help="split to evaluate on (default: the recipe's data.eval_split)")
    add("--batch", type=int, metavar="N", help="batch size (default: the recipe's eval.batch_size, or 128)")
    add("--ema", action="store_true", help="use the averaged weights of train.ema_decay")
    add("--to", type=Path, metavar="DIR", help="draw pixels.png, the accuracies, and inputs.png, some pictures")
    add("--json", type=Path, metavar="FILE", help="write top-1 and loss of each network and order")
    parser.set_defaults(command=_pixels)


def _pixels(arguments: argparse.Namespace) -> Exit:
    from pipeline.analysis.pixels import ORDERS, draw_inputs, draw_scores, pixel_scores
    from pipeline.training.networks import load_network

    networks = [load_network(name, arguments.ema) for name in arguments.networks]
    where = {"data": arguments.data, "split": arguments.split, "patch": arguments.patch}
    scores = [pixel_scores(network, batch=arguments.batch, **where) for network in networks]
    for each in scores:
        accuracies = ", ".join(f"{text} {each.top1[order]:.2f} %" for order, text in ORDERS.items())
        print(f"{each.network}, trained with pixel_order {each.trained}; top-1 by shuffled pixels: {accuracies}")
    figures = {
        "pixels.png": lambda: draw_scores(scores, networks[0].data.num_classes),
        "inputs.png": lambda: draw_inputs(networks[0], **where),
    }
    return write_outputs(arguments, [vars(each) for each in scores], figures)

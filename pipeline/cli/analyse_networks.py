"""widemix analyse cka, spectrum, weights: figures of networks."""

import argparse
import math
import sys
from pathlib import Path

from widemix.cli.commands import check_least
from widemix.cli.options import NETWORK, add_checkpoint, add_ema, add_outputs, choose_networks, write_outputs
from widemix.errors import Exit, InputError
from widemix.terminal import print


def add_cka(analyses) -> None:
    """Add `widemix analyse cka`."""
    parser = analyses.add_parser(
        "cka",
        help="similarity of the features of networks, layer by layer",
        examples="widemix analyse cka runs/a runs/b --layers 'blocks.*.norm1' --to figures",
        description="Centered kernel alignment (CKA) between the layers of network A and those of each network B: in "
        "mini-batches, with the unbiased estimator of HSIC (Nguyen et al. 2021). By default the layers are those "
        "before each skip connection. Several B, or several A and the B after --with, also give figure 2a of Hayase "
        "& Karakida 2024: the mean of the diagonal by the sparsity of B, over all pairs of the same. "
        f"{NETWORK} Each network reads the samples with its own preprocessing.",
    )
    add = parser.add_argument
    add("networks", metavar="NETWORK", nargs="+", help="A, network of the rows, then the B, those of the columns")
    add("--with", dest="others", nargs="+", metavar="B", help="networks of the columns; all before it are A then")
    to = "plot heat maps there, and with several pairs their mean diagonals over 1/p, also as cka_diagonal.csv"
    add_outputs(parser, to, "write rows, columns (layer names) and values (the matrix)")
    add("--layers", nargs="+", default=(), metavar="PATTERN", help="layers of A, such as 'blocks.*.norm1'")
    add("--layers-b", nargs="+", metavar="PATTERN", help="layers of B (default: --layers)")
    add("--data", type=Path, metavar="DIR", help="prepared folder (default: that of A's recipe)")
    add("--split", metavar="NAME", help="split to compare on (default: the data.eval_split of A's recipe)")
    add("--batch", type=int, default=256, metavar="N", help="samples of a mini-batch (default: 256)")
    add("--samples", type=int, metavar="N", help="compare on so many samples, chosen by --seed (default: all)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the order of the samples (default: 0)")
    add_checkpoint(parser)
    parser.set_defaults(command=_cka)


def _cka(arguments: argparse.Namespace) -> Exit:
    names, others = arguments.networks, arguments.others
    if others is None:
        names, others = names[:1], names[1:]
    chosen = choose_networks(arguments, *names, *others)
    names, others = chosen[: len(names)], chosen[len(names) :]
    from widemix.analysis.cka import LEAST, diagonal_mean
    from widemix.analysis.similarity import (
        Samples,
        compare_each,
        mean_diagonals,
        mean_diagonals_csv,
        similarities_json,
        similarity_figures,
    )
    from widemix.evaluation.networks import load_network

    check_least(arguments, 0, "seed")
    check_least(arguments, LEAST, "batch", "samples")
    if not others:
        raise InputError("give two networks or more: A and the B, or several A and the B after --with")
    samples = Samples(arguments.data, arguments.split, arguments.batch, arguments.samples, arguments.seed)
    columns = arguments.layers if arguments.layers_b is None else arguments.layers_b
    firsts, similarities = [load_network(name, arguments.ema) for name in names], []
    for name in others:
        found = compare_each(firsts, load_network(name, arguments.ema), samples, arguments.layers, columns)
        similarities += found
        for each in found:
            mean = diagonal_mean(each.values)
            shape = f"{len(each.rows)} x {len(each.columns)} layers, {each.samples} samples"
            diagonal = "" if mean is None else f", mean of the diagonal {mean:.4f}"
            print(f"{each.row_network} with {name}: {shape}{diagonal}")
    for point in mean_diagonals(similarities) if len(similarities) > 1 else ():
        spread = "" if point["std"] is None else f" +- {point['std']:.4f}"
        print(f"1/p {point['inverse_density']:g}: {point['mean']:.4f}{spread} ({point['pairs']} pairs)")
    curve = {"cka_diagonal.csv": mean_diagonals_csv(similarities)} if len(similarities) > 1 else {}
    return write_outputs(arguments, similarities_json(similarities), similarity_figures(similarities), curve)


def add_spectrum(analyses) -> None:
    """Add `widemix analyse spectrum`."""
    parser = analyses.add_parser(
        "spectrum",
        help="singular values of a network's weights, at the start and along training",
        examples="widemix analyse spectrum runs/a --to figures\n"
        "widemix analyse spectrum runs/a runs/b runs/c --products --json products.json",
        description="Singular values of every linear layer, next to where the largest is at the start of training: "
        "the Marchenko-Pastur edge, of masked weights L+; of timm:NAME, whose start is not known, the edge of random "
        "weights of the same deviation. Of a run folder, at the start and at each checkpoint that it keeps. The wide "
        "matrix I (x) W of a Mixer, permuted or not, has those of W, each `repeats` times. Of matrices too large to "
        "decompose, the largest by Lanczos. Of several run folders, such as those of one "
        f"recipe with several seeds, what training changes: the largest by its edge, at start and end. {NETWORK}",
    )
    add = parser.add_argument
    add("networks", metavar="NETWORK", nargs="+", help="run folder, for all of its checkpoints, or another network")
    add("--layers", nargs="+", default=(), metavar="PATTERN", help="layers, such as 'blocks.*' (default: all)")
    add(
        "--products",
        action="store_true",
        help="of an S-Mixer's V (x) W instead, with their spread: 0.64 of random weights, less of sparse ones",
    )
    add_outputs(parser, "plot spectrum.png there", "write the singular values")
    add_ema(parser)
    parser.set_defaults(command=_spectrum)


def _spectrum(arguments: argparse.Namespace) -> Exit:
    choose_networks(arguments, *arguments.networks)
    if arguments.products and arguments.layers:
        raise InputError("--products: has no layers to choose from; leave out --layers")
    from widemix.analysis.training_spectrum import as_json, as_lines, changes, course, plot_changes, plot_course

    options = arguments.layers, arguments.ema, arguments.products
    courses = {name: course(name, *options) for name in arguments.networks}
    if len(courses) > 1:
        found = changes(courses)
        print("\n".join(as_lines(found)))
        return write_outputs(arguments, found, {"spectrum.png": lambda: plot_changes(found)})
    [(name, steps)] = courses.items()
    for layer in steps[-1][1]:
        rows, columns = layer.shape
        effective = f" x {layer.repeats}" if layer.repeats > 1 else ""
        spread = "" if layer.spread is None else f", spread {layer.spread:.4f}"
        print(f"{layer.layer:<32} {rows} x {columns}{effective}: {layer.largest:.4f}, edge {layer.edge:.4f}{spread}")
    figures = {"spectrum.png": lambda: plot_course(name, steps)}
    return write_outputs(arguments, as_json(name, steps), figures)


def add_weights(analyses) -> None:
    """Add `widemix analyse weights`."""
    parser = analyses.add_parser(
        "weights",
        help="the wide, sparse matrices that mixings stand for, and receptive fields by depth",
        examples="widemix analyse weights runs/a --to figures",
        description="Plot the effective weights of a block of each network, J2 (I (x) W) J1 or M * A (figure S.9 of "
        "Hayase & Karakida 2024), and the fraction of the features that reaches a unit after each mixing. For Mixers "
        f"and SW-MLPs. {NETWORK}",
    )
    add = parser.add_argument
    add("networks", metavar="NETWORK", nargs="+", help="networks to compare")
    add("--block", type=int, default=0, metavar="N", help="block to plot, from 0 (default: 0)")
    add("--values", action="store_true", help="plot the weights' values; without it, which weights there are")
    add("--units", type=int, default=64, metavar="N", help="units of which receptive fields are taken (default: 64)")
    add_outputs(
        parser,
        "plot weights.png and receptive_fields.png there",
        "write the shape and density of each weight, and the fields",
    )
    add_checkpoint(parser)
    parser.set_defaults(command=_weights)


def _weights(arguments: argparse.Namespace) -> Exit:
    names = choose_networks(arguments, *arguments.networks)
    from widemix.analysis.effective_weights import (
        TooLargeError,
        block_weights,
        input_features,
        plot_fields,
        plot_weights,
        receptive_fields,
    )
    from widemix.evaluation.networks import load_network

    check_least(arguments, 1, "units")
    matrices, numbers = {}, []
    for name in names:
        network = load_network(name, arguments.ema)
        module, side = network.module, network.data.image_size
        shape = input_features(module, side)
        features = math.prod(shape)
        fields = [receptive_fields(module, shape, arguments.units, skips) for skips in (False, True)]
        try:
            matrices[name] = block_weights(module, shape, arguments.block)
        except TooLargeError as error:
            print(f"{name}: {error}, so its receptive fields alone are plotted", file=sys.stderr)
        own = matrices.get(name, {})
        layers = {layer: [*matrix.shape, float((matrix != 0).mean())] for layer, matrix in own.items()}
        entry = {"network": name, "features": features, "block": arguments.block, "layers": layers}
        numbers.append(entry | {"fields": fields[0], "fields_with_skips": fields[1]})
        fractions = ", ".join(f"{field['mean']:.3f}" for field in fields[0][:4])
        print(f"{name}: m {features}; of the features reach a unit after 1, 2, ... mixings: {fractions}")
    figures = {"receptive_fields.png": lambda: plot_fields(numbers)}
    if matrices:
        figures["weights.png"] = lambda: plot_weights(matrices, arguments.values)
    return write_outputs(arguments, numbers, figures)

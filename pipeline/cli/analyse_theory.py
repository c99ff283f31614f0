"""widemix analyse sparse-spectrum, regularisation, separation-rank: experiments that need no data and no run."""

import argparse

from widemix.cli.arguments import add_recipe_arguments
from widemix.cli.commands import check_least, check_most, load_from_arguments
from widemix.cli.options import add_outputs, write_outputs
from widemix.errors import Exit, InputError
from widemix.terminal import print

_MOST_ROWS = 1e6
_MOST_ENTRIES = 36  # of a network whose separation rank is computed


def add_sparse_spectrum(analyses) -> None:
    """Add `widemix analyse sparse-spectrum`."""
    parser = analyses.add_parser(
        "sparse-spectrum",
        help="largest singular values of randomly masked weights as they widen",
        examples="widemix analyse sparse-spectrum --to figures",
        description="Sample masked random matrices [gamma m, m] with a fixed number of connections, and compare "
        "their largest singular value with L+ and with the Marchenko-Pastur edge of a Mixer's weights (figures 4 "
        "right and S.1 of Hayase & Karakida 2024). Needs no data and no run.",
    )
    add = parser.add_argument
    add("--connections", type=int, default=2**19, metavar="OMEGA", help="weights of a matrix (default: 524288)")
    add("--gamma", type=float, default=2.0, metavar="GAMMA", help="rows over columns (default: 2)")
    add("--widths", type=int, nargs="+", metavar="M", help="columns m (default: 1500 to 4096, within figure 4's)")
    add("--trials", type=int, default=10, metavar="N", help="matrices of each width (default: 10)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the matrices (default: 0)")
    add_outputs(parser, "plot figure4_right.png and figure_s1.png there", "write the singular values and the edges")
    parser.set_defaults(command=_sparse_spectrum)


def _sparse_spectrum(arguments: argparse.Namespace) -> Exit:
    from widemix.analysis.sparse_spectrum import plot_scaling, plot_widening, scalings, widening

    widths = arguments.widths or (1500, 2000, 2500, 3000, 3500, 4096)
    check_least(arguments, 1, "connections", "trials")
    check_least(arguments, 0, "seed")
    check_most(arguments, 1e8, "connections")
    check_most(arguments, 1e6, "trials")
    if arguments.gamma <= 0:
        raise InputError(f"--gamma {arguments.gamma:g}: must be above 0")
    least = (arguments.connections / arguments.gamma) ** 0.5
    if min(widths) < least:
        raise InputError(
            f"--widths {min(widths)}: holds no {arguments.connections} weights; the least is {least:.0f}"
        )
    if round(arguments.gamma * min(widths)) < 1:
        raise InputError(f"--gamma {arguments.gamma:g}: matrices of {min(widths)} columns have no row; raise it")
    if (largest := max(widths)) * max(1, arguments.gamma) > _MOST_ROWS:
        raise InputError(f"--widths {largest:g}: matrices have at most {_MOST_ROWS:g} rows and columns")
    entries = widening(arguments.connections, arguments.gamma, widths, arguments.trials, arguments.seed)
    for entry in entries:
        mean = sum(entry["largest"]) / len(entry["largest"])
        edges = f"sqrt(L+) {entry['l_plus']:.4f}, Marchenko-Pastur {entry['marchenko_pastur']:.4f}"
        print(f"m {entry['width']}, p {entry['density']:.4g}: largest {mean:.4f}, {edges}")
    figures = {"figure4_right.png": lambda: plot_widening(entries, arguments.connections, arguments.gamma)}
    exponents = scalings(1000, (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5), arguments.trials, arguments.seed)
    figures["figure_s1.png"] = lambda: plot_scaling(1000, exponents)
    scaled = [
        {"exponent": exponent, "width": values.shape[1], "largest": values[:, 0].tolist()}
        for exponent, values in exponents.items()
    ]
    return write_outputs(arguments, {"widening": entries, "scaling_of_1000_connections": scaled}, figures)


def add_regularisation(analyses) -> None:
    """Add `widemix analyse regularisation`."""
    parser = analyses.add_parser(
        "regularisation",
        help="the implicit L1 regularisation of a linear Mixer, and its bound",
        examples="widemix analyse regularisation --to figures",
        description="Compute both sides of proposition 3.3 of Hayase & Karakida 2024 for a small linear regression: "
        "the least loss of a Mixer V (x) W with weight decay, its L1 bound over all matrices, and the minimum with "
        "the Frobenius norm between the two. Needs no data and no run.",
    )
    add = parser.add_argument
    add("--tokens", type=int, default=4, metavar="S", help="size of W (default: 4)")
    add("--channels", type=int, default=4, metavar="C", help="size of V (default: 4)")
    add("--samples", type=int, default=40, metavar="N", help="samples of the regression (default: 40)")
    add(
        "--noise",
        type=float,
        default=0.3,
        metavar="FRACTION",
        help="noise over the signal's deviation (default: 0.3)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the teacher and the samples (default: 0)")
    add_outputs(parser, "plot regularisation.png there", "write the minima for each lambda")
    parser.set_defaults(command=_regularisation)


def _regularisation(arguments: argparse.Namespace) -> Exit:
    import numpy as np

    from widemix.analysis.regularisation import plot_sweep, regression, sweep

    check_least(arguments, 1, "tokens", "channels", "samples")
    check_least(arguments, 0, "noise", "seed")
    check_most(arguments, 1e6, "samples", "noise")
    sizes = (arguments.tokens, arguments.channels, arguments.samples)
    if arguments.tokens * arguments.channels > 64:
        raise InputError("--tokens times --channels: at most 64, the bound has that number of weights squared")
    problem = regression(*sizes, arguments.noise, arguments.seed)
    entries = sweep(problem, np.geomspace(1e-3, 30, 16), arguments.seed)
    for entry in entries:
        minima = f"Mixer {entry['mixer']:.4f}, Frobenius {entry['frobenius']:.4f}, L1 bound {entry['l1']:.4f}"
        print(f"lambda {entry['decay']:.4g}: {minima}")
    return write_outputs(arguments, entries, {"regularisation.png": lambda: plot_sweep(entries, problem)})


def add_separation_rank(analyses) -> None:
    """Add `widemix analyse separation-rank`."""
    parser = analyses.add_parser(
        "separation-rank",
        help="separation ranks of a small Mixer by its layers, next to attention and to the bounds",
        examples="widemix analyse separation-rank svhn/mixer_square --model.kind s_mixer \\\n"
        "    --model.expansion null --model.norm none --model.project_tokens 2 \\\n"
        "    --model.channels 2 --model.depth 2 --to figures",
        description="Compute the separation rank of a Mixer's blocks (activation square, no norms) after each layer, "
        "exactly, as ranks of matrices over a prime field, next to that of attention of the same size without "
        "softmax, and to theorems 5.5 to 5.7 of Navon & Bronstein 2023. A block has two layers. Needs no data and no "
        "run; ranks grow like the square of 2^layers.",
    )
    add_recipe_arguments(parser)
    parser.usage = "%(prog)s RECIPE.yaml [options]\n       [--section.key VALUE ...]"
    add = parser.add_argument
    split = "what is halved: tokens, or the channels of all tokens (default: tokens)"
    add("--partition", choices=("tokens", "channels"), default="tokens", help=split)
    add("--no-residuals", action="store_true", help="leave the skip connections out")
    add("--heads", type=int, default=1, metavar="H", help="heads of the attention (default: 1)")
    add("--most", type=int, default=512, metavar="N", help="ranks from here on are not computed (default: 512)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the weights and points (default: 0)")
    add_outputs(parser, "plot separation_rank.png there", "write the ranks and bounds")
    parser.set_defaults(command=_separation_rank)


def _separation_rank(arguments: argparse.Namespace) -> Exit:
    recipe = load_from_arguments(arguments)
    check_least(arguments, 1, "heads")
    check_least(arguments, 0, "seed")
    check_least(arguments, 16, "most")
    check_most(arguments, 4096, "most")
    from widemix.analysis.separation_rank import attention_layers, mixer_layers, plot_ranks, separation_ranks
    from widemix.studies.bounds import mixer_upper, transformer_upper

    layers, size = mixer_layers(recipe, not arguments.no_residuals, arguments.seed)
    tokens, channels = size
    if tokens * channels > _MOST_ENTRIES:
        raise InputError(f"model: {tokens} tokens of {channels} channels: at most {_MOST_ENTRIES} entries in all")
    if min(size) < 2:
        raise InputError(f"model: {tokens} tokens of {channels} channels: at least 2 of each, which are halved")
    depth = 2 * recipe.model.model_dump()["depth"]
    attention = attention_layers(depth, channels, arguments.heads, arguments.seed)
    options = (arguments.partition, arguments.most, arguments.seed)
    measured = {
        "Mixer": separation_ranks(layers, size, 2, *options),
        "attention": separation_ranks(attention, size, 3, *options),
    }
    shown = max(map(len, measured.values()))
    bounds = {
        "Mixers, upper bound (5.5)": [mixer_upper(p, channels, tokens) for p in range(1, shown + 1)],
        "transformers, upper bound (5.6)": [
            transformer_upper(p, channels, tokens, arguments.heads) for p in range(1, shown + 1)
        ],
    }
    for name, ranks in measured.items():
        for each in ranks:
            value = f"{arguments.most} or more" if each.greatest is None else f"{each.greatest}"
            span = "" if each.least == each.greatest else f" (least of the outputs {each.least})"
            print(f"{name}, {each.layers} layers: {value}{span}; at most {each.monomials} of its degree")
    numbers = {name: [vars(each) for each in ranks] for name, ranks in measured.items()}
    title = f"{tokens} tokens of {channels} channels, {arguments.partition} halved"
    figure = {"separation_rank.png": lambda: plot_ranks(measured, bounds, title)}
    return write_outputs(arguments, {"size": size, "measured": numbers, "bounds_log3": bounds}, figure)

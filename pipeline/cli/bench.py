"""widemix bench: widemix timed against other libraries, alternating within one run."""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from widemix.cli.arguments import add_recipe_arguments
from widemix.cli.commands import check_least, load_from_arguments
from widemix.cli.options import add_checkpoint, choose_networks
from widemix.distributed.launchers import export_torchrun_env
from widemix.errors import Exit, InputError
from widemix.terminal import print

# Modules of widemix.bench. Each has `run(arguments) -> rows`, and `VERSIONS`: packages
# whose versions are printed with the numbers.
BENCHES = {
    "augment": "decoding and augmenting by the ImageNet recipe, against timm and torchvision",
    "checkpoint": "saving Mixer-B/16 on two ranks: how long training stops, by engine",
    "curve": "the stages of a recipe's loader on one thread, and its speed on 1 to 64 by a model of them",
    "loader": "decoding, cropping and flipping, against FFCV, timm, torchvision, simplejpeg, SPDL and DALI",
    "loop": "training on a recipe's data, with loader and loop, against its bare step",
    "mixup": "mixup and CutMix as a fraction of a step of Mixer-B/16, against timm",
    "start": "a start until the first batch, against FFCV",
    "prep": "preparing ImageNet images, against FFCV's DatasetWriter, litdata and MosaicML's MDS",
    "step": "the training loop on Mixer-S/16, against 40 lines of plain PyTorch",
    "trainers": "50 steps of Lightning, Hugging Face's Trainer, FFCV and timm's train.py, on their loaders and ours",
    "views": "several views of each image from one decoding, against a loader for each view",
}
# Of widemix.bench.gpu, in order.
GPU_PARTS = (
    *("tests", "b16", "wait", "loader_16", "loader_1", "b_w", "figure7", "s_mixer", "loader_4", "loader_8"),
    *("loader_2", "mixup", "fp8", "checkpoint", "figure2d", "figureS8", "figureS1_left"),
)
SIZED = ("loader", "prep")  # those that repeat the data up to a size
SAMPLE = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "imagenet-sample"


def add_bench(commands) -> None:
    """Add `widemix bench` and its benchmarks."""
    parser = commands.add_parser(
        "bench",
        help="time widemix against other libraries",
        description="Time widemix and other libraries alternately in one run, with the ratio to the first of them.",
    )
    benches = parser.add_subparsers(metavar="BENCH", required=True)
    for name, text in BENCHES.items():
        bench = benches.add_parser(name, help=text, description=f"Time {text}.")
        add = bench.add_argument
        if name not in ("checkpoint", "curve", "loop", "mixup", "step"):
            add(
                "--from",
                dest="origin",
                type=Path,
                default=SAMPLE,
                metavar="DIR",
                help="folder of images; the benchmark prepares them (default: the sample in shared/)",
            )
        add(
            "--rounds",
            type=int,
            default=7,
            metavar="N",
            help="rounds, in each of which all are timed once (default: 7)",
        )
        add("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
        if name in SIZED:
            add(
                "--samples",
                type=int,
                default=5000,
                metavar="N",
                help="images, by repeating the data (default: 5000)",
            )
        if name == "loader":
            threads = "threads of a loader, or processes (default: 1, 2, 4 ... up to this machine's CPUs)"
            add("--threads", type=int, nargs="+", metavar="N", help=threads)
        if name == "trainers":
            add("--timm-train", type=Path, metavar="FILE", help="train.py of a timm checkout (default: without it)")
        if name in ("curve", "loop"):
            add("recipe", metavar="RECIPE.yaml", help="its data is prepared; its keys are options too")
        if name == "loop":
            timed = "a step without a network, in which so many milliseconds pass (default: the recipe's network)"
            add("--step-ms", type=float, metavar="MS", help=timed)
            launched = "CPU time of these in which the host starts operators (default: 0)"
            add("--launch-ms", type=float, default=0.0, metavar="MS", help=launched)
            add("--lines", type=int, default=2, metavar="N", help="lines of the log in a round (default: 2)")
            add("--to", type=Path, metavar="DIR", help="keep the runs in this folder, of train.profile the traces")
        if name == "step":
            network = (
                "time the network of a recipe instead, without loop and data: normal and RP, against timm's where it "
                "has the same; recipe keys are options too"
            )
            add("recipe", nargs="?", metavar="RECIPE.yaml", help=network)
            batch = "images a step (default: the recipe's; without a recipe 256 on a GPU, 1 on a CPU)"
            add("--batch", type=int, metavar="N", help=batch)
            add("--compiled", action="store_true", help="with a recipe: also compiled by torch.compile")
        bench.set_defaults(command=_bench, bench=name)
    add_inference(benches)
    add_scale(benches)
    add_gpu(benches)


def add_inference(benches) -> None:
    """Add `widemix bench inference`."""
    bench = benches.add_parser(
        "inference",
        help="latency and throughput of a network by batch size",
        examples="widemix bench inference runs/a --batches 1 64",
        description="Time forward passes of a network in evaluation mode, on batches in memory, by batch size.",
    )
    add = bench.add_argument
    network = "run, checkpoint, folder of `widemix export`, RECIPE.yaml (weights at the start), or timm:NAME"
    add("network", metavar="NETWORK", help=network)
    add("--batches", type=int, nargs="+", metavar="N", help="batch sizes (default: 1 8 64 256)")
    add("--rounds", type=int, default=20, metavar="N", help="forward passes of each size (default: 20)")
    precision = "precision of the forward pass (default: fp32)"
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help=precision)
    add_checkpoint(bench)
    add("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    bench.set_defaults(command=_inference)


def _inference(arguments: argparse.Namespace) -> Exit:
    check_least(arguments, 1, "rounds", "batches")
    [name] = choose_networks(arguments, arguments.network)
    from widemix.bench.inference import BATCHES, VERSIONS, measure_inference
    from widemix.bench.report import report
    from widemix.distributed.topology import read_topology
    from widemix.evaluation.networks import load_network

    network, device = load_network(name, arguments.ema), read_topology().device
    batches = list(dict.fromkeys(arguments.batches or BATCHES))
    rows = measure_inference(network, batches, arguments.rounds, arguments.precision, device)
    report(rows, VERSIONS, arguments.json)
    return Exit.DONE


def add_scale(benches) -> None:
    """Add `widemix bench scale`."""
    bench = benches.add_parser(
        "scale",
        help="weak scaling of a recipe, and the parts of a step's time",
        examples="widemix bench scale digits/rp_mixer --ranks 2 --to scale",
        description="Measure weak scaling: the same batch on each rank, on more and more ranks. Start it by the "
        "job's launcher on 1, 2, 4 ... nodes with the same --to; each start adds a row there and plots all of them.",
    )
    add_recipe_arguments(bench)
    add = bench.add_argument
    add("--batch", type=int, default=32, metavar="N", help="samples in a micro-batch of a rank (default: 32)")
    add("--steps", type=int, default=50, metavar="N", help="steps that are timed, for each part (default: 50)")
    add(
        "--to",
        type=Path,
        default=Path("scale"),
        metavar="DIR",
        help="folder of the rows and the figure (default: scale)",
    )
    add("--ranks", type=int, metavar="N", help="number of ranks to start on this machine (default: 1)")
    cpus = "CPUs of each rank, the same for any number of ranks (default: an equal share of the node's)"
    add("--cpus", type=int, metavar="N", help=cpus)
    add("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    bench.set_defaults(command=_scale)


def _scale(arguments: argparse.Namespace) -> int:
    started = export_torchrun_env(ranks=arguments.ranks)
    recipe = load_from_arguments(arguments)
    check_least(arguments, 1, "batch", "steps", "ranks", "cpus")
    if (arguments.ranks or 1) > 1 and not started:
        from widemix.launch.local import launch

        return launch(["-m", "widemix", *(word for word in sys.argv[1:])], arguments.ranks)
    from widemix.bench.report import report
    from widemix.bench.scale import PARTS, VERSIONS, measure_scale, read_rows, settings_of, write_row
    from widemix.plots.lines import plot_scaling
    from widemix.plots.style import save

    read_rows(arguments.to, settings_of(recipe, arguments.batch, arguments.cpus))
    row = measure_scale(recipe, arguments.batch, arguments.steps, arguments.cpus)
    if row is None:
        return Exit.DONE
    rows = write_row(arguments.to, row)
    save(plot_scaling(rows, PARTS), [arguments.to / "scale.png"])
    shown = ("images_per_s", "efficiency", "step", *PARTS)
    names = (f"{row['ranks']} rank{'s' * (row['ranks'] > 1)}" for row in rows)
    named = [{"name": name} | {key: row[key] for key in shown} for name, row in zip(names, rows, strict=True)]
    report(named, VERSIONS, arguments.json)
    print(arguments.to / "scale.png")
    return Exit.DONE


def add_gpu(benches) -> None:
    """Add `widemix bench gpu`."""
    bench = benches.add_parser(
        "gpu",
        help="all that is to be measured on a GPU, and one table of it",
        examples="widemix bench gpu --to runs/gpu\nwidemix bench gpu --to runs/gpu --only b16 wait",
        description="Run the tests and benchmarks that need a GPU, each within some minutes. Each part leaves a file "
        "in DIR and is repeated only if it failed; DIR/table.md has all of them.",
    )
    add = bench.add_argument
    add("--to", type=Path, default=Path("runs/gpu"), metavar="DIR", help="folder of results (default: runs/gpu)")
    origin = "folder of JPEGs such as ImageNet's (default: the sample in shared/)"
    add("--from", dest="origin", type=Path, default=SAMPLE, metavar="DIR", help=origin)
    add("--only", nargs="+", metavar="PART", help=f"parts to run, of {', '.join(GPU_PARTS)} (default: all)")
    add("--minutes", type=float, default=10, metavar="M", help="after which a part is stopped (default: 10)")
    add("--small", action="store_true", help="small networks, to try all parts without a GPU")
    bench.set_defaults(command=_gpu)


def _gpu(arguments: argparse.Namespace) -> Exit:
    check_least(arguments, 1, "minutes")
    if unknown := [name for name in arguments.only or () if name not in GPU_PARTS]:
        raise InputError(f"--only {unknown[0]}: no such part; there are {', '.join(GPU_PARTS)}")
    from widemix.bench.gpu import Where, run_parts

    where = Where(arguments.to, arguments.origin, arguments.small)
    return run_parts(arguments.only or GPU_PARTS, where, arguments.minutes)


def _bench(arguments: argparse.Namespace) -> Exit:
    check_least(arguments, 1, "rounds", "samples", "batch", "threads", "lines", "step_ms")
    check_least(arguments, 0, "launch_ms")
    if getattr(arguments, "launch_ms", 0) and arguments.step_ms is None:
        raise InputError(f"--launch-ms {arguments.launch_ms}: is part of --step-ms; give both")
    if arguments.overrides and not arguments.recipe:
        raise InputError(f"--{arguments.overrides[0][0]}: is a key of a recipe, and none is named")
    origin = getattr(arguments, "origin", None)
    if origin is not None and not origin.is_dir():
        raise InputError(f"--from {origin}: no such folder")
    from packaging.requirements import Requirement

    from widemix.bench.report import report
    from widemix.doctor.checks import unmet
    from widemix.doctor.finding import install

    bench = import_module(f"widemix.bench.{arguments.bench}")
    absent = [name for name in bench.VERSIONS if unmet(Requirement(name))]
    if absent:
        raise InputError(f"bench {arguments.bench}: needs {', '.join(absent)}; {install(*absent)}")
    report(bench.run(arguments), bench.VERSIONS, arguments.json)
    return Exit.DONE

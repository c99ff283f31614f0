"""widemix bench: our parts against named peers, in turns, in one run."""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from pipeline.cli.commands import Exit, add_recipe_arguments, load_from_arguments
from pipeline.distributed.launchers import adopt
from pipeline.errors import InputError

# Modules of pipeline.bench (prep: data_prep.bench), each with `run(arguments) -> rows` and `VERSIONS`, the packages
# that its figures depend on.
BENCHES = {
    "augment": "training pictures of the ImageNet recipe, against timm and torchvision",
    "checkpoint": "saving Mixer-B/16 on two ranks: how long it stops the training, by engine",
    "loader": "training pictures without a policy, against FFCV, timm, torchvision and DALI",
    "mixing": "mixup and CutMix as a share of a step of Mixer-B/16, beside timm's",
    "start": "the time to the first batch, against FFCV",
    "prep": "writing ImageNet's pictures to a .beton, against FFCV's DatasetWriter",
    "step": "the training loop on Mixer-S/16, against forty lines of plain PyTorch",
}
SIZED = ("loader", "prep")  # those that repeat the data
SAMPLE = Path(__file__).parents[2].parent / "shared" / "data" / "imagenet-sample"


def add_bench(commands) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure our parts against others'",
        description="Ours and its peers, timed in turns in one run, with the ratio to the first peer.",
    )
    benches = parser.add_subparsers(metavar="BENCH", required=True)
    for name, text in BENCHES.items():
        bench = benches.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        add = bench.add_argument
        if name not in ("mixing", "step"):
            add(
                "--from",
                dest="origin",
                type=Path,
                default=SAMPLE,
                metavar="DIR",
                help="real data, prepared by itself",
            )
        add("--rounds", type=int, default=7, metavar="N", help="paired rounds (default: 7)")
        add("--json", type=Path, metavar="FILE", help="also write the figures there")
        if name in SIZED:
            add(
                "--samples", type=int, default=5000, metavar="N", help="pictures, the data's repeated (default: 5000)"
            )
        if name == "step":
            add("--batch", type=int, metavar="N", help="pictures a step (default: 256 on a GPU, 1 on a CPU)")
        bench.set_defaults(command=_bench, bench=name)
    add_scale(benches)


def add_scale(benches) -> None:
    bench = benches.add_parser(
        "scale",
        help="weak scaling of a recipe, and where the time of a step goes",
        description="The same batch a rank on more and more ranks: start it by the launcher on 1, 2, 4 ... nodes "
        "with the same --to, which keeps a row of each and draws all of them.",
    )
    add_recipe_arguments(bench)
    add = bench.add_argument
    add("--batch", type=int, default=32, metavar="N", help="samples of a micro-batch and rank (default: 32)")
    add("--steps", type=int, default=50, metavar="N", help="steps that each part is timed over (default: 50)")
    add("--to", type=Path, default=Path("scale"), metavar="DIR", help="folder of rows and figure (default: scale)")
    add("--ranks", type=int, default=0, metavar="N", help="start so many ranks on this machine")
    cpus = "CPUs that each rank keeps to, so that one rank alone has no more (default: the node's, shared out)"
    add("--cpus", type=int, metavar="N", help=cpus)
    add("--json", type=Path, metavar="FILE", help="also write the figures there")
    bench.set_defaults(command=_scale)


def _scale(arguments: argparse.Namespace) -> int:
    started = adopt()
    recipe = load_from_arguments(arguments)
    for name in ("batch", "steps", "cpus"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise InputError(f"--{name} {value}: must be at least 1")
    if arguments.ranks < 0:
        raise InputError(f"--ranks {arguments.ranks}: must be at least 1")
    if arguments.ranks > 1 and not started:
        from launch.local import launch

        return launch(["-m", "pipeline.cli", *(word for word in sys.argv[1:])], arguments.ranks)
    from pipeline.bench.report import report
    from pipeline.bench.scale import PARTS, VERSIONS, measure_scale, read_rows, settings_of, write_row
    from pipeline.bench.scale_figure import draw_scale

    read_rows(arguments.to, settings_of(recipe, arguments.batch, arguments.cpus))
    row = measure_scale(recipe, arguments.batch, arguments.steps, arguments.cpus)
    if row is None:
        return Exit.DONE
    rows = write_row(arguments.to, row)
    draw_scale(rows, arguments.to / "scale.png")
    shown = ("images_per_s", "efficiency", "step", *PARTS)
    names = (f"{found['ranks']} rank{'s' * (found['ranks'] > 1)}" for found in rows)
    named = [{"name": name} | {key: row[key] for key in shown} for name, row in zip(names, rows, strict=True)]
    report(named, VERSIONS, arguments.json)
    print(arguments.to / "scale.png")
    return Exit.DONE


def _bench(arguments: argparse.Namespace) -> Exit:
    if arguments.rounds < 1:
        raise InputError(f"--rounds {arguments.rounds}: must be at least 1")
    for name in ("samples", "batch"):
        value = getattr(arguments, name, None)
        if value is not None and value < 1:
            raise InputError(f"--{name} {value}: must be at least 1")
    from pipeline.bench.report import report

    bench = import_module("data_prep.bench" if arguments.bench == "prep" else f"pipeline.bench.{arguments.bench}")
    report(bench.run(arguments), bench.VERSIONS, arguments.json)
    return Exit.DONE

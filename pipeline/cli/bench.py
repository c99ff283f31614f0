"""widemix bench: our parts against named peers, in turns, in one run."""

import argparse
from importlib import import_module
from pathlib import Path

from pipeline.commands import Exit
from pipeline.errors import InputError

# Modules of pipeline.bench, each with `run(arguments) -> rows` and `VERSIONS`, the packages that its figures hang on.
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
            add("--batch", type=int, metavar="N", help="pictures a step (default: 256 on a GPU, 4 on a CPU)")
            add("--steps", type=int, metavar="N", help="steps a turn (default: 50 on a GPU, 4 on a CPU)")
        bench.set_defaults(command=_bench, bench=name)


def _bench(arguments: argparse.Namespace) -> Exit:
    if arguments.rounds < 1:
        raise InputError(f"--rounds {arguments.rounds}: must be at least 1")
    for name in ("samples", "batch", "steps"):
        value = getattr(arguments, name, None)
        if value is not None and value < 1:
            raise InputError(f"--{name} {value}: must be at least 1")
    from pipeline.bench.report import report

    bench = import_module(f"pipeline.bench.{arguments.bench}")
    report(bench.run(arguments), bench.VERSIONS, arguments.json)
    return Exit.DONE

"""widemix train, eval, export."""

import argparse
import math
import os
import shlex
import sys
import time
from pathlib import Path

from widemix.cli.inputs import add_ema, add_evaluation, check_networks
from widemix.cli.outputs import add_outputs, write_outputs
from widemix.command_line.commands import Exit, check_least, load_from_arguments
from widemix.distributed.launchers import export_torchrun_env
from widemix.errors import InputError
from widemix.recipe import Recipe, check_world, dump_recipe, match_folder

EXAMPLES = """widemix train digits/rp_mixer --run-dir runs/a      the same command resumes
widemix train digits/rp_mixer --train.epochs 5 --optim.lr 1e-3
widemix train digits/rp_mixer --ranks 2 --engine.kind deepspeed"""


def add_train(commands) -> None:
    """Add `widemix train`."""
    from widemix.trainer import add_arguments

    parser = commands.add_parser(
        "train", help="train a recipe", description="Train a recipe, or continue a run.", examples=EXAMPLES
    )
    add_arguments(parser)
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="number of processes to start on this machine, one for each GPU if it has GPUs (default: the number of "
        "GPUs, or 1). On several nodes start `python -m widemix train` with torchrun instead",
    )
    dry = "print the resolved recipe, its cost and its first batch, and write nothing"
    parser.add_argument("--dry-run", action="store_true", help=dry)
    parser.set_defaults(command=_train)


def _train(arguments: argparse.Namespace) -> int:
    from widemix.trainer import train_from_arguments

    if export_torchrun_env():
        if arguments.dry_run:
            raise InputError("--dry-run: is for `widemix train` alone, without a launcher")
        return train_from_arguments(arguments)
    recipe = load_from_arguments(arguments)  # first: a wrong one is told before torch is imported
    check_least(arguments, 1, "ranks")
    ranks = arguments.ranks or _count_gpus()
    check_world(recipe, ranks)
    recipe = match_folder(recipe)  # last, since it needs prepared data
    if arguments.dry_run:
        return _dry_run(recipe, arguments.recipe, ranks)
    if ranks == 1:
        return train_from_arguments(arguments)
    from widemix.launch.local import launch

    os.environ["WIDEMIX_COMMAND"] = shlex.join(["widemix", *sys.argv[1:]])  # for environment.json
    command = ["-m", "widemix", "train", arguments.recipe, "--resume", arguments.resume]
    if arguments.run_dir:
        command += ["--run-dir", str(arguments.run_dir)]
    command += [] if not arguments.verbosity else ["-q" if arguments.verbosity < 0 else "-v"]
    return launch([*command, *(f"--{name}={value}" for name, value in arguments.overrides)], ranks)


def _dry_run(recipe: Recipe, title: str, ranks: int) -> Exit:
    """Print what a run would do: every key, the costs on as many A100s, and the first batch, read and augmented."""
    import torch

    from widemix.data.loader import TrainLoader
    from widemix.distributed.topology import Topology
    from widemix.estimate.hardware import Cluster
    from widemix.estimate.report import estimate, show

    print(dump_recipe(recipe))
    show(estimate(recipe, Cluster(ranks)), f"{title}, as if on {ranks} x A100")
    began = time.perf_counter()
    loader = TrainLoader(recipe.data, recipe.augment, recipe.train, Topology(0, ranks, 0, ranks, torch.device("cpu")))
    with loader.batches(epoch=0) as batches:
        batch = next(batches)
    seconds = time.perf_counter() - began
    shape = " x ".join(map(str, batch.inputs.shape))
    print(
        f"first batch of rank 0, in {seconds:.1f} s: {shape}, {batch.inputs.dtype}, values "
        f"{batch.inputs.min().item():.3g} to {batch.inputs.max().item():.3g}; {loader.steps} steps an epoch"
    )
    print("nothing was written")
    return Exit.DONE


def _count_gpus() -> int:
    """The number of GPUs, but at least 1."""
    import torch

    return max(1, torch.cuda.device_count())


def add_eval(commands) -> None:
    """Add `widemix eval`."""
    parser = commands.add_parser(
        "eval",
        help="evaluate a network",
        examples="widemix eval runs/a --details --to figures\n"
        "widemix eval runs/a/checkpoints/00000330 --data datasets/other --split test\n"
        "widemix eval timm:mixer_b16_224 --data datasets/imagenet --json figures.json",
        description="Print top-1, top-5 and loss of a network on a split: a run's newest checkpoint, a checkpoint, "
        "an export, timm:NAME or hf:OWNER/NAME. Classes of the data are matched with the network's by name.",
    )
    add = parser.add_argument
    add("network", metavar="NETWORK", help="run folder, checkpoints/<step>, export, timm:NAME or hf:OWNER/NAME")
    add_evaluation(parser)
    details = "also print the calibration error and the worst classes; --json gets all classes and confusions"
    add("--details", action="store_true", help=details)
    add_outputs(
        parser, "draw confusion.png and reliability.png there (with --details)", "also write the figures to this file"
    )
    real = (
        "also print the accuracy by ReaL labels, of real.json (Beyer et al. 2020); for ImageNet's validation images"
    )
    add("--real", type=Path, metavar="FILE", help=real)
    ranks = "processes to start on this machine (default: 1); on several nodes use a launcher instead"
    add("--ranks", type=int, default=1, metavar="N", help=ranks)
    parser.set_defaults(command=_eval)


def _eval(arguments: argparse.Namespace) -> int:
    for option in ("to", "tensorboard"):
        if getattr(arguments, option) and not arguments.details:
            raise InputError(f"--{option}: needs --details")
    check_least(arguments, 1, "ranks", "batch")
    check_networks(arguments.network)
    if not export_torchrun_env() and arguments.ranks > 1:
        from widemix.launch.local import launch

        return launch(["-m", "widemix", *sys.argv[1:]], arguments.ranks)
    from widemix.evaluation.assessment import assess

    result = assess(
        arguments.network,
        arguments.data,
        arguments.split,
        arguments.batch,
        arguments.ema,
        arguments.details,
        arguments.real,
    )
    if os.environ.get("RANK", "0") != "0":
        return Exit.DONE
    print(result.sentence())
    numbers = {key: value for key, value in vars(result).items() if key not in ("figures", "details")}
    figures = {}
    if result.details:
        from widemix.analysis.evaluation import draw_confusion, draw_reliability

        details = result.details
        known = zip(result.classes, details.per_class, strict=False)
        worst = sorted((share, name) for name, share in known if share is not None)[:3]
        print(f"expected calibration error {details.ece:.4f}")
        print("lowest top-1: " + ", ".join(f"{name} {share:.2f} %" for share, name in worst))
        numbers |= vars(details)
        figures = {
            "confusion.png": lambda: draw_confusion(result, details),
            "reliability.png": lambda: draw_reliability(result, details),
        }
    finite = {name: value if math.isfinite(value) else None for name, value in result.figures.items()}
    return write_outputs(arguments, finite | numbers, figures)


def add_export(commands) -> None:
    """Add `widemix export`."""
    parser = commands.add_parser(
        "export",
        help="write a checkpoint as safetensors, for timm",
        examples="widemix export runs/a --to exported",
        description="Write the network of a run's newest checkpoint, or of one checkpoint, as model.safetensors, "
        "config.json and README.md, the model card. It prints the Python line that loads them by timm.create_model.",
    )
    parser.add_argument("path", type=Path, metavar="RUN_OR_CHECKPOINT", help="run folder or checkpoints/<step>")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to create")
    add_ema(parser)
    parser.add_argument("--onnx", action="store_true", help="also write model.onnx, and check it by onnxruntime")
    parser.set_defaults(command=_export)


def _export(arguments: argparse.Namespace) -> Exit:
    from widemix.evaluation.trained import export_checkpoint

    labels, line = export_checkpoint(arguments.path, arguments.to, arguments.ema, arguments.onnx)
    print(f"{arguments.to}: {len(labels)} classes; {line}")
    return Exit.DONE


def add_push(commands) -> None:
    """Add `widemix push`."""
    parser = commands.add_parser(
        "push",
        help="upload an export to the Hugging Face Hub",
        examples="widemix push exported OWNER/NAME --private",
        description="Upload a folder of `widemix export`. The repository is created if there is none. Afterwards "
        "timm.create_model('hf-hub:OWNER/NAME') loads it, and hf:OWNER/NAME is its name for all commands.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="what `widemix export --to DIR` has written")
    parser.add_argument("repository", metavar="OWNER/NAME", help="the repository on the Hub")
    parser.add_argument("--private", action="store_true", help="if it is created, only for its owner")
    parser.set_defaults(command=_push)


def _push(arguments: argparse.Namespace) -> Exit:
    from widemix.models.hub import push

    print(push(arguments.folder, arguments.repository, arguments.private))
    return Exit.DONE

"""widemix train, eval, export."""

import argparse
import json
from pathlib import Path

from pipeline.cli.commands import Exit, load_from_arguments
from pipeline.distributed.launchers import adopt
from pipeline.errors import InputError
from pipeline.recipe import check_world


def add_train(commands) -> None:
    from pipeline.train import add_arguments

    parser = commands.add_parser("train", help="train a recipe", description="Train a recipe, or go on with a run.")
    add_arguments(parser)
    parser.add_argument(
        "--ranks",
        type=int,
        default=0,
        help="processes to start on this machine, each with a GPU of its own where there are GPUs "
        "(default: one per GPU, or 1); on several nodes start `python -m pipeline.train` with torchrun instead",
    )
    parser.set_defaults(command=_train)


def _train(arguments: argparse.Namespace) -> int:
    from pipeline.train import train_from_arguments

    if adopt():
        return train_from_arguments(arguments)
    recipe = load_from_arguments(arguments)
    ranks = count_ranks(arguments.ranks)
    check_world(recipe, ranks)
    if ranks == 1:
        return train_from_arguments(arguments)
    from launch.local import launch

    command = ["-m", "pipeline.train", arguments.recipe, "--resume", arguments.resume]
    if arguments.run_dir:
        command += ["--run-dir", str(arguments.run_dir)]
    return launch([*command, *(f"--{name}={value}" for name, value in arguments.overrides)], ranks)


def count_ranks(asked: int) -> int:
    """Processes to start on this machine: as asked, or one a GPU."""
    if asked < 0:
        raise InputError(f"--ranks {asked}: must be at least 1")
    if asked:
        return asked
    import torch

    return max(1, torch.cuda.device_count())


def add_eval(commands) -> None:
    parser = commands.add_parser(
        "eval",
        help="measure a checkpoint",
        description="Loss, top-1 and top-5 of a run's newest checkpoint, or of one checkpoint, over a whole split.",
    )
    parser.add_argument("path", type=Path, metavar="RUN_OR_CHECKPOINT", help="run folder or checkpoints/<step>")
    parser.add_argument("--data", type=Path, metavar="DIR", help="prepared folder (default: the recipe's data.path)")
    parser.add_argument("--split", help="split of it (default: the recipe's data.eval_split)")
    parser.add_argument("--batch", type=int, help="pictures a batch (default: the recipe's eval.batch_size)")
    parser.add_argument("--ema", action="store_true", help="the averaged weights (train.ema_decay)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.set_defaults(command=_eval)


def _eval(arguments: argparse.Namespace) -> Exit:
    from pipeline.training.trained import measure

    result = measure(arguments.path, arguments.data, arguments.split, arguments.batch, arguments.ema)
    print("  ".join(f"{name} {value:.4f}" for name, value in result.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return Exit.DONE


def add_export(commands) -> None:
    parser = commands.add_parser(
        "export",
        help="a checkpoint for timm",
        description="Write a checkpoint's network as model.safetensors and config.json. After "
        "`import pipeline.models`, timm.create_model('local-dir:DIR', pretrained=True) makes the same network.",
    )
    parser.add_argument("path", type=Path, metavar="RUN_OR_CHECKPOINT", help="run folder or checkpoints/<step>")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument("--ema", action="store_true", help="the averaged weights (train.ema_decay)")
    parser.set_defaults(command=_export)


def _export(arguments: argparse.Namespace) -> Exit:
    from pipeline.training.trained import export

    labels = export(arguments.path, arguments.to, arguments.ema)
    print(f"{arguments.to}: {len(labels)} classes; timm.create_model('local-dir:{arguments.to}', pretrained=True)")
    return Exit.DONE

"""The command `widemix`. What a command needs is imported when it runs, so that help and mistakes come at once."""

import argparse
import json
import os
import sys
from pathlib import Path

from pipeline.commands import Exit, Parser, add_recipe_arguments, load_from_arguments, run_command
from pipeline.errors import InputError
from pipeline.recipe import check_world


def main() -> None:
    parser = Parser(
        prog="widemix",
        description="Train MLP-Mixers and their wide, sparse relatives. `widemix COMMAND --help` explains each.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (_add_prep, _add_verify, _add_train, _add_eval, _add_export, _add_cost, _add_doctor):
        add(commands)
    sys.exit(run_command(parser))


def _add_prep(commands) -> None:
    from data_prep.prepare import SOURCES

    parser = commands.add_parser(
        "prep",
        help="prepare a dataset, once",
        description="Write one .beton per split and manifest.json. Files appear whole or not at all.",
        epilog="sources:\n" + "\n".join(f"  {name:<14}{source.description}" for name, source in SOURCES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", help="one of the sources below")
    parser.add_argument("--from", dest="origin", type=Path, metavar="DIR", help="where the source lies")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--max-size", type=int, default=512, help="longest side kept, pixels; 0 keeps all (default: 512)"
    )
    parser.add_argument(
        "--quality", type=int, default=90, help="JPEG quality of re-encoded pictures, 1-100 (default: 90)"
    )
    parser.add_argument("--raw", action="store_true", help="store pixels, not JPEGs: larger, faster to read")
    parser.add_argument(
        "--on-bad",
        choices=("error", "skip"),
        default="error",
        help="an undecodable picture ends the preparation, or is left out and listed (default: error)",
    )
    share = parser.add_argument_group("parts of the training split (seeded, by class, the smaller within the larger)")
    share.add_argument(
        "--fraction", metavar="SHARE", default="100%", help="share to keep, 0.1 or 10%% (default: all)"
    )
    share.add_argument("--per-class", type=int, default=0, metavar="N", help="samples a class to keep (default: all)")
    share.add_argument(
        "--holdout", metavar="SHARE", default="0%", help="share that becomes the split `holdout` (default: none)"
    )
    share.add_argument("--seed", type=int, default=0, help="of the choice (default: 0)")
    parser.add_argument("--processes", type=int, help="processes that encode (default: the allowed CPUs)")
    parser.add_argument("--force", action="store_true", help="replace what the folder holds already")
    parser.set_defaults(command=_prep)


def _prep(arguments: argparse.Namespace) -> Exit:
    from data_prep.prepare import prepare
    from data_prep.settings import PrepSettings, parse_share

    settings = PrepSettings(
        max_size=arguments.max_size,
        quality=arguments.quality,
        raw=arguments.raw,
        on_bad=arguments.on_bad,
        fraction=parse_share(arguments.fraction),
        per_class=arguments.per_class,
        holdout=parse_share(arguments.holdout),
        seed=arguments.seed,
    )
    if arguments.processes is not None and arguments.processes < 1:
        raise InputError(f"--processes {arguments.processes}: must be at least 1")
    manifest = prepare(
        *(arguments.source, arguments.origin, arguments.to, settings),
        processes=arguments.processes,
        force=arguments.force,
    )
    for name, split in manifest.splits.items():
        print(f"{arguments.to / split.file}: {split.samples} samples, {split.bytes / 2**20:.1f} MiB ({name})")
    if manifest.exceptions:
        print(f"{len(manifest.exceptions)} pictures took a rule; {arguments.to / 'manifest.json'} lists them")
    return Exit.DONE


def _add_verify(commands) -> None:
    parser = commands.add_parser(
        "verify",
        help="check a prepared folder",
        description="Every byte of a prepared folder against its manifest. Names damaged blocks and the samples in "
        "them, and exits with 1 if there are any.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder that `widemix prep` wrote")
    parser.set_defaults(command=_verify)


def _verify(arguments: argparse.Namespace) -> Exit:
    from data_prep.verify import verify

    damages = verify(arguments.folder)
    print("\n".join(damages) if damages else f"{arguments.folder}: every byte is as it was written")
    return Exit.FAILED if damages else Exit.DONE


def _add_train(commands) -> None:
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

    recipe = load_from_arguments(arguments)
    if "RANK" in os.environ:  # a launcher started this command itself
        return train_from_arguments(arguments)
    if arguments.ranks < 0:
        raise InputError(f"--ranks {arguments.ranks}: must be at least 1")
    ranks = arguments.ranks or _visible_gpus()
    check_world(recipe, ranks)
    if ranks == 1:
        return train_from_arguments(arguments)
    from launch.local import launch

    command = ["-m", "pipeline.train", arguments.recipe, "--resume", arguments.resume]
    if arguments.run_dir:
        command += ["--run-dir", str(arguments.run_dir)]
    return launch([*command, *(f"--{name}={value}" for name, value in arguments.overrides)], ranks)


def _visible_gpus() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def _add_eval(commands) -> None:
    parser = commands.add_parser(
        "eval",
        help="measure a checkpoint",
        description="Loss, top-1 and top-5 of a run's newest checkpoint, or of one checkpoint, over a whole split.",
    )
    parser.add_argument("path", type=Path, metavar="RUN_OR_CHECKPOINT", help="run folder or checkpoints/<step>")
    parser.add_argument("--data", type=Path, metavar="DIR", help="prepared folder (default: the recipe's data.path)")
    parser.add_argument("--split", help="split of it (default: the recipe's data.eval_split)")
    parser.add_argument("--batch", type=int, help="pictures a batch (default: the recipe's eval.batch)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.set_defaults(command=_eval)


def _eval(arguments: argparse.Namespace) -> Exit:
    from pipeline.measure import measure

    result = measure(arguments.path, arguments.data, arguments.split, arguments.batch)
    print("  ".join(f"{name} {value:.4f}" for name, value in result.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return Exit.DONE


def _add_export(commands) -> None:
    parser = commands.add_parser(
        "export",
        help="a checkpoint for timm",
        description="Write a checkpoint's network as model.safetensors and config.json. After "
        "`import pipeline.models`, timm.create_model('local-dir:DIR', pretrained=True) makes the same network.",
    )
    parser.add_argument("path", type=Path, metavar="RUN_OR_CHECKPOINT", help="run folder or checkpoints/<step>")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    parser.set_defaults(command=_export)


def _export(arguments: argparse.Namespace) -> Exit:
    from pipeline.measure import export

    labels = export(arguments.path, arguments.to)
    print(f"{arguments.to}: {len(labels)} classes; timm.create_model('local-dir:{arguments.to}', pretrained=True)")
    return Exit.DONE


def _add_cost(commands) -> None:
    from pipeline.estimate import GPUS

    parser = commands.add_parser(
        "cost",
        help="what a recipe takes",
        description="Parameters, connections, width, FLOPs, memory and hours of a recipe, computed without training.",
    )
    add_recipe_arguments(parser)
    parser.add_argument("--named", action="store_true", help="in place of a recipe: a table of all named networks")
    parser.add_argument("--gpus", type=int, default=1, help="how many GPUs (default: 1)")
    parser.add_argument("--gpu", choices=tuple(GPUS), default="a100", help="which GPU (default: a100)")
    parser.add_argument(
        "--samples",
        type=int,
        help="training pictures (default: the prepared folder's, or ImageNet-1k's at 1000 classes)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.set_defaults(command=_cost)


def _cost(arguments: argparse.Namespace) -> Exit:
    from pipeline.estimate import estimate, named_table, show

    if arguments.named:
        print(named_table())
        return Exit.DONE
    recipe = load_from_arguments(arguments)
    rows = estimate(recipe, arguments.gpus, arguments.gpu, arguments.samples)
    show(rows, arguments.recipe)
    if arguments.json:
        machine = f"{arguments.gpus} x {arguments.gpu}"
        arguments.json.write_text(json.dumps({"machine": machine, "rows": [row._asdict() for row in rows]}, indent=1))
    return Exit.DONE


def _add_doctor(commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what this machine has and lacks",
        description="A table of what is there, missing or mismatched, each with its cure. Exit code 1: cannot train.",
    )
    parser.set_defaults(command=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from pipeline.doctor import run_doctor

    return run_doctor()


if __name__ == "__main__":
    main()

"""widemix eval, export and push: what becomes of a trained network."""

import argparse
import math
import os
import sys
from pathlib import Path

from widemix.cli.commands import check_least
from widemix.cli.options import add_checkpoint, add_evaluation, add_outputs, choose_networks, write_outputs
from widemix.distributed.launchers import export_torchrun_env
from widemix.errors import Exit, InputError
from widemix.models.hub import HUB, TIMM
from widemix.processes import unwinding
from widemix.progress_line import announce_import
from widemix.run.choice import choose
from widemix.terminal import print


def add_eval(commands) -> None:
    """Add `widemix eval`."""
    parser = commands.add_parser(
        "eval",
        help="evaluate a network",
        examples="widemix eval runs/a --details --to figures\n"
        "widemix eval runs/a/checkpoints/00000330 --data datasets/other --split test\n"
        "widemix eval timm:mixer_b16_224 --data datasets/imagenet --json metrics.json",
        description="Print top-1, top-5 and loss of a network on a split, and balanced accuracy and macro F1 where "
        "classes are unequal: of a run's newest checkpoint, a checkpoint, an export, timm:NAME or hf:OWNER/NAME. "
        "Classes of the data are matched with the network's by name.",
    )
    add = parser.add_argument
    add("network", metavar="NETWORK", help="run folder, checkpoints/<step>, export, timm:NAME or hf:OWNER/NAME")
    add_evaluation(parser)
    details = "also print the calibration error and the worst classes; --json gets all classes and confusions"
    add("--details", action="store_true", help=details)
    add_outputs(
        parser, "plot confusion.png and reliability.png there (with --details)", "also write the metrics to this file"
    )
    real = (
        "also print the accuracy by ReaL labels, of real.json (Beyer et al. 2020); for ImageNet's validation images"
    )
    add("--real", type=Path, metavar="FILE", help=real)
    ranks = "processes to start on this machine (default: 1); on several nodes use a launcher instead"
    add("--ranks", type=int, metavar="N", help=ranks)
    parser.set_defaults(command=_eval)


def _eval(arguments: argparse.Namespace) -> int:
    for option in ("to", "tensorboard"):
        if getattr(arguments, option) and not arguments.details:
            raise InputError(f"--{option}: needs --details")
    check_least(arguments, 1, "ranks", "batch")
    [network] = choose_networks(arguments, arguments.network)
    if not export_torchrun_env(ranks=arguments.ranks) and (arguments.ranks or 1) > 1:
        from widemix.launch.local import launch

        return launch(["-m", "widemix", *sys.argv[1:]], arguments.ranks)
    with announce_import():
        from widemix.evaluation.assessment import assess

    result = assess(
        network,
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
    numbers = {key: value for key, value in vars(result).items() if key not in ("metrics", "details")}
    figures = {}
    if result.details:
        details = result.details
        known = zip(result.classes, details.per_class, strict=False)
        worst = sorted((accuracy, name) for name, accuracy in known if accuracy is not None)[:3]
        print(f"expected calibration error {details.ece:.4f}")
        print("lowest top-1: " + ", ".join(f"{name} {accuracy:.2f} %" for accuracy, name in worst))
        numbers |= vars(details)
        if arguments.to or arguments.tensorboard:
            from widemix.analysis.evaluation import plot_confusion, plot_reliability  # and matplotlib, a second

            figures = {
                "confusion.png": lambda: plot_confusion(result, details),
                "reliability.png": lambda: plot_reliability(result, details),
            }
    finite = {name: value if math.isfinite(value) else None for name, value in result.metrics.items()}
    return write_outputs(arguments, finite | numbers, figures)


def add_export(commands) -> None:
    """Add `widemix export`."""
    parser = commands.add_parser(
        "export",
        help="write a checkpoint for timm, or for torch alone",
        examples="widemix export runs/a --to exported",
        description="Write the network of a run's newest checkpoint, or of one checkpoint, as model.safetensors, "
        "config.json and README.md, the model card; where timm has no such architecture also as model.pt2, which "
        "torch alone runs. It prints the Python line that loads the network.",
    )
    parser.add_argument("path", type=Path, metavar="RUN_OR_CHECKPOINT", help="run folder or checkpoints/<step>")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to create")
    add_checkpoint(parser)
    parser.add_argument(
        "--license",
        default="apache-2.0",
        metavar="NAME",
        help="the weights' licence, for the card (default: apache-2.0)",
    )
    parser.add_argument("--onnx", action="store_true", help="also write model.onnx, and check it by onnxruntime")
    parser.set_defaults(command=_export)


def _export(arguments: argparse.Namespace) -> Exit:
    if str(arguments.path).startswith((TIMM, HUB)):
        raise InputError(f"{arguments.path}: is timm's to load; export takes the folder of a run or of a checkpoint")
    origin = choose(arguments.path, arguments.checkpoint)  # its error at once, before torch is imported
    with announce_import():
        from widemix.evaluation.export import export_checkpoint

    with unwinding():
        labels, line = export_checkpoint(origin, arguments.to, arguments.ema, arguments.onnx, arguments.license)
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

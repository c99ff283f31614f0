"""widemix prep, verify, stage."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cli.commands import Exit
from pipeline.errors import InputError

if TYPE_CHECKING:
    from pipeline.formats.manifest import Split


def add_prep(commands) -> None:
    from data_prep.prepare import SOURCES

    parser = commands.add_parser(
        "prep",
        help="prepare a dataset, once",
        description="Write one .beton per split and manifest.json. Files appear whole or not at all; a preparation "
        "that was interrupted goes on where it stopped.",
        epilog="sources:\n" + "\n".join(f"  {name:<14}{source.description}" for name, source in SOURCES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="one of the sources below")
    add("--from", dest="origin", type=Path, metavar="DIR", help="where the source lies")
    add("--to", type=Path, required=True, metavar="DIR", help="folder to write")
    add("--dry-run", action="store_true", help="say what would be written, how large and how long, and write nothing")
    add("--processes", type=int, metavar="N", help="processes that encode (default: the usable CPUs)")
    add("--force", action="store_true", help="replace what the folder holds already")
    _add_picture_options(parser)
    _add_share_options(parser)
    _add_text_options(parser)
    parser.set_defaults(command=_prep)


def _add_picture_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pictures")
    add, add_size = group.add_argument, group.add_mutually_exclusive_group().add_argument
    longest = "shrink to a longest side of N pixels; 0 keeps all (default: 512)"
    add_size("--max-size", type=int, default=512, metavar="N", help=longest)
    add_size("--short-side", type=int, metavar="N", help="shrink to a shortest side of N pixels instead")
    add("--quality", type=int, default=90, metavar="N", help="of re-encoded JPEGs, 1 to 100 (default: 90)")
    add("--raw", action="store_true", help="store pixels, not JPEGs: larger, faster to read")
    markers = "in JPEGs, pixels unchanged, so that a reader decodes only what a crop touches (default: yes)"
    add("--restart-markers", action=argparse.BooleanOptionalAction, default=True, help=markers)
    bad = "an undecodable picture ends the preparation, or is left out and listed (default: skip)"
    add("--on-bad", choices=("error", "skip"), default="skip", help=bad)


def _add_share_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("parts of the training split (seeded, by class, the smaller within the larger)")
    add = group.add_argument
    add("--fraction", metavar="SHARE", default="100%", help="share to keep, 0.1 or 10%% (default: all)")
    add("--per-class", type=int, default=0, metavar="N", help="samples a class to keep (default: all)")
    add("--holdout", metavar="SHARE", default="0%", help="share that becomes the split `holdout` (default: none)")
    add("--seed", type=int, default=0, metavar="N", help="of the choice (default: 0)")


def _add_text_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("text").add_argument
    add("--length", type=int, default=128, metavar="N", help="tokens a pair is cut or padded to (default: 128)")
    add("--vocab", default="", metavar="FILE", help="WordPiece words, one a line (default: DIR/vocab.txt, or learnt)")
    add("--vocab-size", type=int, default=30_522, metavar="N", help="words at most, where learnt (default: 30522)")


def _prep(arguments: argparse.Namespace) -> Exit:
    from data_prep.dry_run import dry_run
    from data_prep.prepare import prepare
    from data_prep.settings import PrepSettings, parse_share

    given = vars(arguments)
    longest = arguments.short_side is None
    bound: dict[str, Any] = {"max_size": given["max_size" if longest else "short_side"]}
    bound["side"] = "longest" if longest else "shortest"
    names = ("quality", "raw", "restart_markers", "on_bad", "per_class", "seed", "length", "vocab", "vocab_size")
    shares: dict[str, Any] = {name: parse_share(given[name]) for name in ("fraction", "holdout")}
    settings = PrepSettings(**bound, **{name: given[name] for name in names}, **shares)
    if arguments.processes is not None and arguments.processes < 1:
        raise InputError(f"--processes {arguments.processes}: must be at least 1")
    what = (arguments.source, arguments.origin, arguments.to, settings)
    how: dict[str, Any] = {"processes": arguments.processes, "force": arguments.force}
    if arguments.dry_run:
        estimates, free = dry_run(*what, **how)
        for split in estimates:
            size, seconds = f"{split.bytes / 2**20:,.1f} MiB", f"{split.seconds:,.0f} s"
            print(f"{split.split}: {split.samples} samples, about {size}, about {seconds}")
        print(f"{free / 2**30:,.1f} GiB are free there" if estimates else f"{arguments.to}: is there already")
        return Exit.DONE
    manifest = prepare(*what, **how)
    for written in manifest.splits.values():
        print(f"{arguments.to / written.file}: {_described(written)}")
    if manifest.exceptions:
        left_out = sum(exception["rule"].startswith("left out") for exception in manifest.exceptions)
        missing = f"{left_out} of them pictures left out, " if left_out else ""
        print(f"{len(manifest.exceptions)} exceptions, {missing}listed in {arguments.to / 'manifest.json'}")
    return Exit.DONE


def _described(split: "Split") -> str:
    few, many = min(split.per_class), max(split.per_class)
    balance = f"{few if few == many else f'{few} to {many}'} of each of {len(split.per_class)} classes"
    return f"{split.samples} samples, {split.bytes / 2**20:.1f} MiB, {balance}"


def add_verify(commands) -> None:
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


def add_stage(commands) -> None:
    parser = commands.add_parser(
        "stage",
        help="copy a prepared folder to this node's disk",
        description="Copy a prepared folder to a node's own disk, verified, once however many processes ask; prints "
        "the copy's path, for data.path. A copy that is there already is reused.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder that `widemix prep` wrote")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder on the node's own disk")
    parser.set_defaults(command=_stage)


def _stage(arguments: argparse.Namespace) -> Exit:
    from launch.stage import stage

    print(stage(arguments.folder, arguments.to))
    return Exit.DONE

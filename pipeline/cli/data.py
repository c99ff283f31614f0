"""The commands prep, join, adopt, verify and stage."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cli.arguments import Parser
from pipeline.cli.commands import Exit, check_least
from pipeline.errors import InputError, command

if TYPE_CHECKING:
    from data_prep.dry_run import Estimate
    from pipeline.formats.manifest import Manifest, Split


BAD = "largest share of a split's images that may be skipped; more of them, or all of a class, end the command "
BAD += "with exit code 1 and a list (default: 1%%)"


def _place(text: str) -> Path | str:
    """A path; a URL stays a str."""
    return text if "://" in text else Path(text)


def add_prep(commands) -> None:
    """Add the command `prep`."""
    from data_prep.sources import SOURCES

    parser = commands.add_parser(
        "prep",
        help="prepare a dataset, once",
        usage="%(prog)s SOURCE [--from DIR] [--to DIR] [options]",
        examples="widemix prep digits --to datasets/digits\n"
        "widemix prep image-folder --from my_pictures --to datasets/own\n"
        "widemix prep imagenet --from /data/ILSVRC2012 --to datasets/imagenet --dry-run",
        description="Read a dataset and write one .beton file per split, and manifest.json last. "
        "Each file appears whole or not at all. If the command is interrupted, the same command resumes it.",
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help=f"one of {', '.join(SOURCES)}")
    layouts = "\n".join(f"  {name:<14}{source.description}" for name, source in SOURCES.items())
    parser.add_section("sources", "the layout that each source reads", layouts)
    origin = (
        "folder to read the source from; or its URL (https://, s3://, gs://, hf://): it is then downloaded to the "
    )
    origin += "folder of --to with .source after its name"
    add("--from", dest="origin", type=_place, metavar="DIR", help=origin)
    add("--to", type=Path, metavar="DIR", help="folder to write to (default: datasets/SOURCE, as in the recipes)")
    add_many = parser.add_section("machines", "several machines or processes, sources of your own").add_argument
    plugins = "modules to import first, which register sources of their own, as `plugins` of a recipe"
    add_many("--plugins", nargs="+", default=(), metavar="MODULE", help=plugins)
    add("--dry-run", action="store_true", help="write nothing; print the estimated size and time of each split")
    add_many("--processes", type=int, metavar="N", help="processes that encode images (default: one per usable CPU)")
    splits = "splits of the source to prepare, such as train,val (default: all)"
    add("--splits", default="", metavar="NAMES", help=splits)
    targets = "csv: columns of numbers to predict, separated by commas; '*' for all but path and split"
    add("--targets", default="", metavar="NAMES", help=targets)
    part = "prepare only part K of N, on one of several machines; `widemix join` makes the whole"
    add_many("--part", default="", metavar="K/N", help=part)
    add("--force", action="store_true", help="replace what was prepared in the folder before")
    add(
        "--extend",
        action="store_true",
        help="take over what the source gained or changed; only new images are encoded",
    )
    _add_image_options(parser)
    _add_subset_options(parser)
    _add_text_options(parser)
    parser.set_defaults(command=_prep)


def _add_image_options(parser: Parser) -> None:
    group = parser.add_section("images", "how images are stored, and what is done with unreadable ones")
    add, add_size = group.add_argument, group.add_mutually_exclusive_group().add_argument
    longest = "shrink images whose longest side is over N pixels to N; 0 shrinks none (default: 512)"
    add_size("--max-size", type=int, default=512, metavar="N", help=longest)
    shortest = "shrink images whose shortest side is over N pixels to N, instead of --max-size"
    add_size("--short-side", type=int, metavar="N", help=shortest)
    add("--quality", type=int, default=90, metavar="N", help="quality of re-encoded JPEGs, 1 to 100 (default: 90)")
    add("--raw", action="store_true", help="store pixels instead of JPEGs: larger files that are read faster")
    markers = "add restart markers to JPEGs, so that a reader decodes only the part that a crop needs (default: on)"
    add("--restart-markers", action=argparse.BooleanOptionalAction, default=True, help=markers)
    corrupt = "at an image that cannot be decoded: stop with an error, or skip it and list it in the manifest "
    corrupt += "(default: skip)"
    add("--on-corrupt", choices=("error", "skip"), default="skip", help=corrupt)
    add("--max-bad", metavar="SHARE", default="1%", help=BAD)


def _add_subset_options(parser: Parser) -> None:
    description = "Chosen by --seed with the same share of every class. With one seed, a smaller subset is part of "
    description += "each larger one."
    add = parser.add_section("subsets", "subsets of the training split, and its order", description).add_argument
    add("--fraction", metavar="SHARE", default="100%", help="share to keep, such as 0.1 or 10%% (default: all)")
    add("--per-class", type=int, default=0, metavar="N", help="samples of each class to keep (default: all)")
    holdout = "share to move from train to a split named holdout (default: none)"
    add("--holdout", metavar="SHARE", default="0%", help=holdout)
    shuffle = "store train in a random order if the source lists it class by class, so that each part of the file "
    shuffle += "has all classes, as data.order paged needs (default: on)"
    add("--shuffle", action=argparse.BooleanOptionalAction, default=True, help=shuffle)
    add("--seed", type=int, default=0, metavar="N", help="seed of the choice and of the order (default: 0)")


def _add_text_options(parser: Parser) -> None:
    add = parser.add_section("text", "lengths and vocabulary of sentence pairs").add_argument
    length = "tokens to truncate or pad each pair to (default: 128)"
    add("--length", type=int, default=128, metavar="N", help=length)
    vocab = "WordPiece vocabulary, one word per line (default: vocab.txt in the folder of --from; if there is none, "
    add("--vocab", default="", metavar="FILE", help=vocab + "one is learnt from train)")
    size = "largest size of a learnt vocabulary (default: 30522)"
    add("--vocab-size", type=int, default=30_522, metavar="N", help=size)


def _prep(arguments: argparse.Namespace) -> Exit:
    from data_prep.dry_run import dry_run
    from data_prep.prepare import prepare
    from data_prep.remote import download
    from data_prep.settings import PrepSettings, parse_share
    from data_prep.sources import wanted_files
    from pipeline.recipe.plugins import import_modules

    import_modules(arguments.plugins, "--plugins")
    given = vars(arguments)
    longest = arguments.short_side is None
    size: dict[str, Any] = {"max_size": given["max_size" if longest else "short_side"]}
    size["side"] = "longest" if longest else "shortest"
    names = (
        "quality",
        "raw",
        "restart_markers",
        "on_corrupt",
        "splits",
        "targets",
        "part",
        "per_class",
        "shuffle",
        "seed",
        "length",
        "vocab",
        "vocab_size",
    )
    shares: dict[str, Any] = {name: parse_share(given[name]) for name in ("fraction", "holdout")}
    settings = PrepSettings(**size, **{name: given[name] for name in names}, **shares)
    check_least(arguments, 1, "processes")
    arguments.to = arguments.to or Path("datasets", arguments.source)
    origin = arguments.origin
    if isinstance(origin, str):
        copy = arguments.to.absolute().with_name(f"{arguments.to.absolute().name}.source")
        origin = download(origin, copy, wanted_files(arguments.source, settings.splits))
    job = (arguments.source, origin, arguments.to, settings)
    options: dict[str, Any] = {"processes": arguments.processes, "force": arguments.force}
    options["extend"] = arguments.extend
    max_bad = _max_bad(arguments)
    if arguments.dry_run:
        _print_estimates(arguments.to, *dry_run(*job, **options))
        return Exit.DONE
    manifest = prepare(*job, **options, max_bad=max_bad)
    _print_summary(manifest, arguments.to)
    return Exit.DONE


def _max_bad(arguments: argparse.Namespace) -> float:
    from data_prep.settings import parse_share

    share = parse_share(arguments.max_bad)
    if not 0 <= share <= 1:
        raise InputError(f"--max-bad {arguments.max_bad}: must be 0 to 1 (or 100%)")
    return share


def _print_summary(manifest: "Manifest", to: Path) -> None:
    for split in manifest.splits.values():
        print(f"{to / split.file}: {_summary(split)}")
    if manifest.exceptions:
        count = len(manifest.exceptions)
        left_out = sum(exception["rule"].startswith("left out") for exception in manifest.exceptions)
        print(f"{count} exceptions ({left_out} of them left out) are listed in {to / 'manifest.json'}")


def _print_estimates(to: Path, estimates: "list[Estimate]", free: int) -> None:
    if not estimates:
        print(f"{to}: is already prepared with these settings")
        return
    for split in estimates:
        size, seconds = f"{split.bytes / 2**20:,.1f} MiB", f"{split.seconds:,.0f} s"
        print(f"{split.split}: {split.samples} samples, about {size}, about {seconds}")
    print(f"{free / 2**30:,.1f} GiB are free on that disk")


def _summary(split: "Split") -> str:
    least, most = min(split.per_class), max(split.per_class)
    balance = f"{least if least == most else f'{least} to {most}'} of each of {len(split.per_class)} classes"
    if "targets" in split.fields and most == 0:
        balance = f"{len(split.per_class)} target{'s' if len(split.per_class) > 1 else ''} each"
    return f"{split.samples} samples, {split.bytes / 2**20:.1f} MiB, {balance}"


def add_join(commands) -> None:
    """Add the command `join`."""
    parser = commands.add_parser(
        "join",
        help="join the parts that several machines prepared",
        examples="widemix join parts/1 parts/2 --to datasets/imagenet",
        description="Join all parts that `widemix prep ... --part K/N` prepared: the folder has the bytes of a "
        "preparation by one machine. The source is listed, but not read again.",
    )
    parser.add_argument("parts", nargs="+", type=Path, metavar="PART", help="folder of each part, in any order")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--max-bad", metavar="SHARE", default="1%", help=BAD)
    parser.add_argument("--force", action="store_true", help="replace what was prepared in the folder before")
    parser.set_defaults(command=_join)


def _join(arguments: argparse.Namespace) -> Exit:
    from data_prep.join import join

    manifest = join(arguments.parts, arguments.to, max_bad=_max_bad(arguments), force=arguments.force)
    _print_summary(manifest, arguments.to)
    return Exit.DONE


def add_adopt(commands) -> None:
    """Add the command `adopt`."""
    parser = commands.add_parser(
        "adopt",
        help="use .beton files that FFCV wrote",
        examples="widemix adopt train=train_500_0.50_90.beton val=val_500_0.50_90.beton --to datasets/adopted",
        description="Make a prepared folder of .beton files that FFCV wrote: links to them, checksums, a manifest. "
        "They need one RGBImageField, and an IntField that is named label or is the only one. Every image is "
        "decoded once.",
    )
    files = "a file whose name tells its split (train, val, validation, valid, test), or SPLIT=FILE"
    parser.add_argument("files", nargs="+", metavar="FILE.beton", help=files)
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="new or empty folder")
    classes = "class names in label order, one per line (default: the numbers of the labels)"
    parser.add_argument("--classes", type=Path, metavar="FILE", help=classes)
    parser.set_defaults(command=_adopt)


def _adopt(arguments: argparse.Namespace) -> Exit:
    from data_prep.adopt import adopt
    from data_prep.shards import read_names, split_of

    betons: dict[str, Path] = {}
    for word in arguments.files:
        stated, _, path = word.rpartition("=")
        split = stated or split_of(Path(path).name)
        if split is None or not split.isidentifier():
            raise InputError(f"{word}: tells no split; name it, such as train={path}")
        if split in betons:
            raise InputError(f"{word}: is of the same split as {betons[split]}; name them, such as train={path}")
        betons[split] = Path(path)
    manifest = adopt(betons, arguments.to, read_names(arguments.classes) if arguments.classes else ())
    _print_summary(manifest, arguments.to)
    return Exit.DONE


def add_verify(commands) -> None:
    """Add the command `verify`."""
    parser = commands.add_parser(
        "verify",
        help="check a prepared folder",
        examples="widemix verify datasets/own",
        description="Check every byte of a prepared folder against the hashes in its manifest, and every sample "
        "against its checksum. Prints each damaged sample and block, and exits with 1 if there is any.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder that `widemix prep` wrote")
    add = "if there is no damage, add checksums to a folder that an older version prepared without"
    parser.add_argument("--add-checksums", action="store_true", help=add)
    parser.set_defaults(command=_verify)


def _verify(arguments: argparse.Namespace) -> Exit:
    from data_prep.add_checksums import add_checksums
    from data_prep.verify import repair_command, verify
    from pipeline.formats.manifest import UNCHECKED, read_manifest

    folder = arguments.folder
    damages = add_checksums(folder) if arguments.add_checksums else verify(folder)
    if damages:
        print("\n".join(damages))
        print(f"to prepare it again: {repair_command(folder)}")
        return Exit.FAILED
    if read_manifest(folder).format == UNCHECKED:
        print(f"{folder}: no damage, but an older version prepared it without checksums of samples and manifest;")
        adding = command("verify", folder, "--add-checksums")
        print(f"{adding} adds them, and `widemix prep ... --force` prepares it again")
    else:
        print(f"{folder}: no damage")
    return Exit.DONE


def add_stage(commands) -> None:
    """Add the command `stage`."""
    parser = commands.add_parser(
        "stage",
        help="copy a prepared folder to this node's disk",
        examples="widemix stage /shared/datasets/imagenet --to /local/$USER\n"
        "widemix stage --environment --to /shared/environments",
        description="Copy a prepared folder to this node's own disk, check it, and print its path for data.path. "
        "Any number of processes may run this at once: one copies, the others wait. An existing copy is reused.",
    )
    folder = "folder that `widemix prep` wrote, or its URL (https://, s3://, gs://, hf://)"
    parser.add_argument("folder", type=_place, nargs="?", metavar="DIR", help=folder)
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder on the node's own disk")
    old = "first remove the copies there that have not been staged for so many days and that no process has open"
    packed = "pack this Python's environment into an archive there instead, for `widemix submit --environment`"
    parser.add_argument("--environment", action="store_true", help=packed)
    parser.add_argument("--clean", type=float, metavar="DAYS", help=old)
    parser.set_defaults(command=_stage)


def _stage(arguments: argparse.Namespace) -> Exit:
    from data_prep.progress import print_status
    from launch.stage import remove_old, stage

    if arguments.environment:
        from launch.environment import pack

        if arguments.folder is not None or arguments.clean is not None:
            raise InputError("--environment: packs the environment alone; give no folder and no --clean")
        print(pack(arguments.to))
        return Exit.DONE
    if arguments.folder is None and arguments.clean is None:
        raise InputError("widemix stage: name the folder to copy, or --clean DAYS")
    if arguments.clean is not None:
        if not arguments.clean >= 0:
            raise InputError(f"--clean {arguments.clean:g}: must be a number of days, 0 or more")
        if arguments.folder is None and not arguments.to.is_dir():  # a node's first copy makes the folder
            raise InputError(f"--to {arguments.to}: no such folder, so there are no copies to remove")
        for place in remove_old(arguments.to, arguments.clean):
            print_status(f"{place}: removed")
    if arguments.folder is not None:
        print(stage(arguments.folder, arguments.to))
    return Exit.DONE

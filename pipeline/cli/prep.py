"""The commands prep and join, which prepare a dataset."""

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from widemix.cli.arguments import Parser
from widemix.cli.commands import check_least
from widemix.errors import Exit, InputError, command
from widemix.recipe.class_balance import UNEQUAL, describe_counts, imbalance
from widemix.terminal import print

if TYPE_CHECKING:
    from widemix.data_prep.prepare import Estimate
    from widemix.formats.manifest import Manifest, Split


_NAMED = 3  # left-out files
BAD = "largest fraction of a split's images that may be skipped; more of them, or all of a class, end the command "
BAD += "with exit code 1 and a list (default: 1%%)"


def parse_place(text: str) -> Path | str:
    """A path; a URL stays a str."""
    return text if "://" in text else Path(text)


def add_prep(commands) -> None:
    """Add the command `prep`."""
    from widemix.data_prep.sources import SOURCES

    parser = commands.add_parser(
        "prep",
        help="prepare a dataset, once",
        usage="%(prog)s SOURCE [--from DIR] [--to DIR] [options]",
        examples="widemix prep digits --to datasets/digits\n"
        "widemix prep image-folder --from my_images --to datasets/own\n"
        "widemix prep imagenet --from /data/ILSVRC2012 --to datasets/imagenet --dry-run",
        description="Read a dataset and write one .beton file per split, and manifest.json last. "
        "Each file appears whole or not at all. If the command is interrupted, the same command resumes it.",
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", nargs="?", help=f"one of {', '.join(SOURCES)}")
    layouts = "\n".join(f"  {name:<14}{source.description}" for name, source in SOURCES.items())
    parser.add_section("sources", "the layout that each source reads", layouts)
    origin = (
        "folder to read the source from; or its URL (https://, s3://, gs://, hf://): it is then downloaded to the "
    )
    origin += "folder of --to with .source after its name"
    add("--from", dest="origin", type=parse_place, metavar="DIR", help=origin)
    add("--to", type=Path, metavar="DIR", help="folder to write to (default: datasets/SOURCE, as in the recipes)")
    add("--dry-run", action="store_true", help="write nothing; print the estimated size and time of each split")
    splits = "splits of the source to prepare, such as train,val (default: all)"
    add("--splits", default="", metavar="NAMES", help=splits)
    targets = "csv: columns of numbers to predict, separated by commas; '*' for all but path and split"
    add("--targets", default="", metavar="NAMES", help=targets)
    restore = "instead of SOURCE: write the image files of a prepared folder or .beton again, those of "
    restore += "`--encoding coefficients` byte for byte"
    add("--restore", type=Path, metavar="DIR", help=restore)
    add("--force", action="store_true", help="replace what was prepared in the folder before")
    add(
        "--extend",
        action="store_true",
        help="take over the source's new images, labels, splits and classes; only new images are encoded",
    )
    _add_machine_options(parser)
    _add_image_options(parser)
    _add_subset_options(parser)
    _add_text_options(parser)
    parser.set_defaults(command=_prep)
    parser.set_defaults(defaults=vars(parser.parse_args([])))


def _add_machine_options(parser: Parser) -> None:
    add = parser.add_section("machines", "several machines or processes, sources of your own").add_argument
    plugins = "modules to import first, which register sources of their own, as `plugins` of a recipe"
    add("--plugins", nargs="+", default=(), metavar="MODULE", help=plugins)
    add("--processes", type=int, metavar="N", help="processes that encode images (default: one per usable CPU)")
    part = "prepare only part K of N, on one of several machines; `widemix join` makes the whole"
    add("--part", default="", metavar="K/N", help=part)


def _add_image_options(parser: Parser) -> None:
    group = parser.add_section("images", "how images are stored, and what is done with unreadable ones")
    add, add_size = group.add_argument, group.add_mutually_exclusive_group().add_argument
    longest = "shrink images whose longest side is over N pixels to N; 0 shrinks none (default: 512)"
    add_size("--max-size", type=int, default=512, metavar="N", help=longest)
    shortest = "shrink images whose shortest side is over N pixels to N, instead of --max-size"
    add_size("--short-side", type=int, metavar="N", help=shortest)
    add("--quality", type=int, default=90, metavar="N", help="quality of re-encoded JPEGs, 1 to 100 (default: 90)")
    add("--raw", action="store_true", help="store pixels instead of JPEGs: larger files that are read faster")
    encoding = "store JPEGs, or their coefficients in a form that is decoded faster, takes about 1.2 times the bytes "
    encoding += "and restores each file byte for byte; FFCV cannot read it (default: jpeg)"
    add("--encoding", choices=("jpeg", "coefficients"), default="jpeg", help=encoding)
    markers = "add restart markers to JPEGs, so that a reader decodes only the part that a crop needs (default: on)"
    add("--restart-markers", action=argparse.BooleanOptionalAction, default=True, help=markers)
    pixels = "an image with more pixels counts as corrupt; a JPEG that is to be shrunk is scaled down while it is "
    pixels += "decoded, and counts as what remains (default: 178956970, Pillow's limit)"
    add("--max-pixels", type=int, default=178_956_970, metavar="N", help=pixels)
    deep = "keep the highest 8 bits of deeper levels (16-bit PNG, TIFF, ...) and the first channels of a TIFF "
    deep += "with more than colours and alpha; by default such an image counts as corrupt, with a line that names it"
    add("--to-8-bit-rgb", action="store_true", help=deep)
    corrupt = "at an image that cannot be decoded: stop with an error, or skip it and list it in the manifest "
    corrupt += "(default: skip)"
    add("--on-corrupt", choices=("error", "skip"), default="skip", help=corrupt)
    add("--max-bad", metavar="FRACTION", default="1%", help=BAD)


def _add_subset_options(parser: Parser) -> None:
    description = "Chosen by --seed with the same fraction of every class. With one seed, a smaller subset is part "
    description += "of each larger one."
    add = parser.add_section("subsets", "subsets of the training split, and its order", description).add_argument
    add("--fraction", metavar="FRACTION", default="100%", help="fraction to keep, such as 0.1 or 10%% (default: all)")
    add("--per-class", type=int, default=0, metavar="N", help="samples of each class to keep (default: all)")
    holdout = "fraction to move from train to a split named holdout (default: none)"
    add("--holdout", metavar="FRACTION", default="0%", help=holdout)
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


def _restore(arguments: argparse.Namespace) -> Exit:
    from widemix.data_prep.original_jpeg import restore

    defaults = arguments.defaults | {"restore": arguments.restore, "to": arguments.to}
    if arguments.to is None or any(getattr(arguments, name) != value for name, value in defaults.items()):
        raise InputError(f"--restore {arguments.restore}: takes --to DIR for the files, and nothing else")
    for name, (count, others) in restore(arguments.restore, arguments.to).items():
        same = f"{others:,} are JPEGs that prep changed, not their sources" if others else "byte for byte the sources"
        print(f"{arguments.to}: {count:,} files of {name}; {same}")
    return Exit.DONE


def _prep(arguments: argparse.Namespace) -> Exit:
    if arguments.restore:
        return _restore(arguments)
    if arguments.source is None:
        raise InputError("the following arguments are required: SOURCE; see `widemix prep --help`")
    from widemix.data_prep.prepare import dry_run, prepare
    from widemix.data_prep.remote import download, download_beside
    from widemix.data_prep.settings import PrepSettings, parse_fraction
    from widemix.data_prep.sources import wanted_files
    from widemix.data_prep.sources.csv_list import relative_paths
    from widemix.recipe.plugins import import_modules

    import_modules(arguments.plugins, "--plugins")
    given = vars(arguments)
    longest = arguments.short_side is None
    size: dict[str, Any] = {"max_size": given["max_size" if longest else "short_side"]}
    size["side"] = "longest" if longest else "shortest"
    names = (
        "quality",
        "raw",
        "encoding",
        "restart_markers",
        "max_pixels",
        "to_8_bit_rgb",
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
    fractions: dict[str, Any] = {name: parse_fraction(given[name]) for name in ("fraction", "holdout")}
    settings = PrepSettings(**size, **{name: given[name] for name in names}, **fractions)
    check_least(arguments, 1, "processes")
    arguments.to = arguments.to or Path("datasets", arguments.source)
    origin = arguments.origin
    if isinstance(origin, str):
        copy = arguments.to.absolute().with_name(f"{arguments.to.absolute().name}.source")
        url, origin = origin, download(origin, copy, wanted_files(arguments.source, settings.splits))
        if arguments.source == "csv" and origin.is_file():
            download_beside(url, relative_paths(origin), copy)
    job = (arguments.source, origin, arguments.to, settings)
    options: dict[str, Any] = {"processes": arguments.processes, "force": arguments.force}
    options["extend"] = arguments.extend
    max_bad = _max_bad(arguments)
    if arguments.dry_run:
        _print_estimates(arguments.to, *dry_run(*job, **options))
        return Exit.DONE
    manifest = prepare(*job, **options, max_bad=max_bad)
    print_summary(manifest, arguments.to)
    return Exit.DONE


def _max_bad(arguments: argparse.Namespace) -> float:
    from widemix.data_prep.settings import parse_fraction

    fraction = parse_fraction(arguments.max_bad)
    if not 0 <= fraction <= 1:
        raise InputError(f"--max-bad {arguments.max_bad}: must be 0 to 1 (or 100%)")
    return fraction


HOLD_OUT = "the same with --holdout 10% --force makes one of these samples"


def print_summary(manifest: "Manifest", to: Path, cure: str = HOLD_OUT) -> None:
    """Print a line for each split, how many files were unusual in which way, and the first that were left out."""
    for split in manifest.splits.values():
        print(f"{to / split.file}: {_summary(split, manifest)}")
    if manifest.settings.get("encoding", "jpeg") == "coefficients":
        print(f"coefficients: {_price(manifest, to)}")
    rules = Counter(exception["rule"].partition(":")[0] for exception in manifest.exceptions)
    if rules:
        first = sorted(rules.most_common(), key=lambda each: each[0] != "left out")[:4]
        counts = [f"{count:,} {rule}" for rule, count in first]
        others = [f"{rules.total():,} in all"] if len(rules) > 4 else []
        print(f"unusual files: {', '.join(counts + others)}; listed in {to / 'manifest.json'}")
    for exception in [each for each in manifest.exceptions if each["rule"].startswith("left out")][:_NAMED]:
        print(f"{exception['file']}: {exception['rule']}")
    if [*manifest.splits] == ["train"] and not (manifest.settings.get("splits") or manifest.settings.get("part")):
        print(f"{to}: has no split to evaluate on; {cure}")


def _price(manifest: "Manifest", to: Path) -> str:
    """Return the bytes that coefficients cost, as text."""
    from widemix.data_prep.original_jpeg import count_bytes

    counts = [count_bytes(to / split.file) for split in manifest.splits.values() if "image" in split.fields]
    coefficients, jpegs, size, before = (sum(column) for column in zip(*counts, strict=True)) if counts else [0] * 4
    if not coefficients:
        return "of no image"
    kept = f"{jpegs:,} images are stored as JPEGs; " if jpegs else ""
    again = command("prep", "--restore", to, "--to", "DIR")
    return f"about {size / before:.2f} times the bytes of their JPEGs; {kept}{again} writes the JPEGs again"


def _print_estimates(to: Path, estimates: "list[Estimate]", free: int) -> None:
    if not estimates:
        print(f"{to}: is already prepared with these settings")
        return
    for split in estimates:
        size, seconds = f"{split.bytes / 2**20:,.1f} MiB", f"{split.seconds:,.0f} s"
        print(f"{split.split}: {split.samples} samples, about {size}, about {seconds}")
    print(f"{free / 2**30:,.1f} GiB are free on that disk")


def _summary(split: "Split", manifest: "Manifest") -> str:
    least, most = min(split.per_class), max(split.per_class)
    balance = f"{least if least == most else f'{least} to {most}'} of each of {len(split.per_class)} classes"
    if imbalance(split.per_class) > UNEQUAL or least == 0 < most:
        balance += f", {describe_counts(split.per_class, manifest.classes)}"
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
    parser.add_argument("--max-bad", metavar="FRACTION", default="1%", help=BAD)
    parser.add_argument("--force", action="store_true", help="replace what was prepared in the folder before")
    parser.set_defaults(command=_join)


def _join(arguments: argparse.Namespace) -> Exit:
    from widemix.data_prep.join import join

    manifest = join(arguments.parts, arguments.to, max_bad=_max_bad(arguments), force=arguments.force)
    print_summary(manifest, arguments.to, "parts that are prepared with --holdout 10% have one")
    return Exit.DONE

"""The commands adopt, verify and stage, for prepared folders."""

import argparse
from pathlib import Path

from widemix.cli.prep import parse_place, print_summary
from widemix.errors import Exit, InputError
from widemix.terminal import print


def add_adopt(commands) -> None:
    """Add the command `adopt`."""
    parser = commands.add_parser(
        "adopt",
        help="use .beton files that FFCV wrote",
        examples="widemix adopt train=a_500.beton val=b_500.beton --to datasets/adopted",
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
    from widemix.data_prep.adopt import adopt
    from widemix.data_prep.sources.shards import read_names, split_of

    betons: dict[str, Path] = {}
    for word in arguments.files:
        stated, _, path = word.partition("=")
        if not (path and stated.isidentifier()):  # the path of a file may have a = too
            stated, path = "", word
        split = stated or split_of(Path(path).name)
        if split is None:
            raise InputError(f"{word}: tells no split; name it, such as train={path}")
        if split in betons:
            raise InputError(f"{word}: is of the same split as {betons[split]}; name them, such as train={path}")
        betons[split] = Path(path)
    manifest = adopt(betons, arguments.to, read_names(arguments.classes) if arguments.classes else ())
    print_summary(manifest, arguments.to, "name a file of one too, such as val=FILE")
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
    parser.set_defaults(command=_verify)


def _verify(arguments: argparse.Namespace) -> Exit:
    from widemix.data_prep.verify import repair_command, verify

    folder = arguments.folder
    if damages := verify(folder):
        print("\n".join(damages))
        print(f"to prepare it again: {repair_command(folder)}")
        return Exit.FAILED
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
    parser.add_argument("folder", type=parse_place, nargs="?", metavar="DIR", help=folder)
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder on the node's own disk")
    old = "first remove the copies there that have not been staged for so many days and that no process has open"
    packed = "pack this Python's environment into an archive there instead, for `widemix submit --environment`"
    parser.add_argument("--environment", action="store_true", help=packed)
    parser.add_argument("--clean", type=float, metavar="DAYS", help=old)
    parser.set_defaults(command=_stage)


def _stage(arguments: argparse.Namespace) -> Exit:
    from widemix.launch.stage import remove_old, stage
    from widemix.progress_line import print_status

    if arguments.environment:
        from widemix.launch.environment import pack

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

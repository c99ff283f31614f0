"""widemix predict."""

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from widemix.cgroups import usable_cpus
from widemix.cli.commands import check_least
from widemix.cli.options import NETWORK, add_checkpoint, choose_networks
from widemix.errors import Exit, InputError
from widemix.files import csv_text, write_output
from widemix.terminal import print

if TYPE_CHECKING:
    from widemix.data_prep.sources.listing import Images


def add_predict(commands) -> None:
    """Add `widemix predict`."""
    parser = commands.add_parser(
        "predict",
        help="class and probability of each image in a folder",
        examples="widemix predict runs/a my_images/val --to predictions.csv\n"
        "widemix predict exported image.jpg --top 3",
        description="Write the likeliest class of each image in a folder, and its probability, or the numbers that "
        "a network of data.targets regression predicts, with the transforms "
        f"of an evaluation. Images that cannot be read are left out, named and counted. {NETWORK}",
    )
    add = parser.add_argument
    add("network", metavar="NETWORK", help="run folder, checkpoints/<step>, export, timm:NAME or hf:OWNER/NAME")
    add("folder", type=Path, metavar="FOLDER", help="folder of images, searched with all below it, or one image")
    add("--to", dest="to_file", type=Path, metavar="FILE", help="file to write, .csv or .jsonl (default: print CSV)")
    add("--top", type=int, default=1, metavar="K", help="classes of each image, likeliest first (default: 1)")
    add("--batch", type=int, default=64, metavar="N", help="images of a batch (default: 64)")
    add_checkpoint(parser)
    parser.set_defaults(command=_predict)


def _predict(arguments: argparse.Namespace) -> Exit:
    check_least(arguments, 1, "top", "batch")
    [network] = choose_networks(arguments, arguments.network)
    suffix = ".csv" if arguments.to_file is None else arguments.to_file.suffix
    if suffix not in (".csv", ".jsonl"):
        raise InputError(f"--to {arguments.to_file}: must end in .csv or .jsonl")
    names, others = _images(arguments.folder)
    from widemix.progress_line import announce_import

    with announce_import():
        from widemix.evaluation.networks import load_network
        from widemix.evaluation.predict import Predictor

    predictor = Predictor(load_network(network, arguments.ema))
    numbers = predictor.section.targets == "regression"
    if numbers and arguments.top != 1:
        raise InputError(f"--top {arguments.top}: is for classes; {arguments.network} predicts numbers")
    others.print_others(arguments.folder)
    rows, bad = [], 0
    for name, found in _predictions(predictor, arguments.folder, names, arguments.top, arguments.batch):
        if isinstance(found, InputError):
            if len(names) == 1:
                raise found
            bad += 1
            print(f"warning: {found}; left out", file=sys.stderr)
        else:
            rows.append((name, found))
    if not rows:
        raise InputError(f"{arguments.folder}: none of its {bad} images can be read")
    if numbers:
        text = _csv_of_numbers(rows) if suffix == ".csv" else _json_lines_of_numbers(rows)
    else:
        text = _csv(rows, arguments.top) if suffix == ".csv" else _json_lines(rows)
    if arguments.to_file is None:
        print(text, end="")
    else:
        write_output(arguments.to_file, text)
    left_out = f", {bad} could not be read" if bad else ""
    where = f"{arguments.to_file}: " if arguments.to_file else ""
    print(f"{where}{len(rows)} images predicted{left_out}", file=sys.stderr)
    return Exit.DONE


def _images(folder: Path) -> "tuple[list[str], Images]":
    """The images to predict, relative to `folder`, which may be one itself (""), and what else it holds."""
    from widemix.data_prep.sources.listing import SUFFIXES, Images

    images = Images()
    if folder.is_file():
        return [""], images
    names = images.find(str(folder))
    if not names:
        held = "".join(f"; left out {phrase}" for phrase in images.describe_others())
        raise InputError(f"{folder}: holds no images ({', '.join(SUFFIXES)}){held}")
    return names, images


def _predictions(
    predictor: Any, folder: Path, names: Sequence[str], top: int, size: int
) -> Iterator[tuple[str, list[tuple[str, float]] | InputError]]:
    """Of each image its name, and its likeliest classes with their probabilities, or why it cannot be read.

    Of a network that predicts numbers all of them, with their names.
    """
    from widemix.data_prep.image import decode_file
    from widemix.data_prep.settings import PrepSettings

    settings = PrepSettings(raw=True, **predictor.network.prepared.model_dump(exclude={"classes"}))

    def decode(name: str) -> Any:
        try:
            return decode_file(str(folder / name), settings)
        except InputError as error:
            return error

    from widemix.progress_line import ProgressLine

    progress = ProgressLine("images predicted", len(names), "images")
    with warnings.catch_warnings(), ThreadPoolExecutor(usable_cpus()) as threads, progress:
        warnings.simplefilter("ignore")  # Pillow's, about unusual files
        for start in range(0, len(names), size):
            batch = names[start : start + size]
            decoded = list(threads.map(decode, batch))
            good = [image for image in decoded if not isinstance(image, InputError)]
            probabilities = iter(predictor.probabilities(good) if good else ())
            for name, image in zip(batch, decoded, strict=True):
                shown = name or folder.name
                if isinstance(image, InputError):
                    yield shown, image
                    continue
                probability = next(probabilities)
                likeliest = (-probability).argsort(kind="stable")[:top]
                if predictor.section.targets == "regression":
                    likeliest = range(len(probability))
                yield shown, [(predictor.class_name(int(label)), float(probability[label])) for label in likeliest]
            progress.add(len(batch))


def _csv(rows: Sequence[tuple[str, list[tuple[str, float]]]], top: int) -> str:
    """image,class,probability; with more than one class class_1,probability_1,class_2, ..."""
    most = max((len(classes) for _, classes in rows), default=top)
    numbers = [""] if most == 1 else [f"_{number}" for number in range(1, most + 1)]
    head = ["image", *(f"{column}{number}" for number in numbers for column in ("class", "probability"))]
    cells = ([value for label, probability in found for value in (label, f"{probability:.6f}")] for _, found in rows)
    return csv_text([head, *([name, *own] for (name, _), own in zip(rows, cells, strict=True))])


def _csv_of_numbers(rows: Sequence[tuple[str, list[tuple[str, float]]]]) -> str:
    """image, and a column for each target."""
    heads = [["image", *(target for target, _ in found)] for _, found in rows[:1]]
    return csv_text([*heads, *([name, *(f"{value:.6g}" for _, value in found)] for name, found in rows)])


def _json_lines_of_numbers(rows: Sequence[tuple[str, list[tuple[str, float]]]]) -> str:
    return "".join(json.dumps({"image": name, "targets": dict(found)}) + "\n" for name, found in rows)


def _json_lines(rows: Sequence[tuple[str, list[tuple[str, float]]]]) -> str:
    """A line for each image."""
    lines = (
        {"image": name, "classes": [{"class": label, "probability": probability} for label, probability in classes]}
        for name, classes in rows
    )
    return "".join(json.dumps(line) + "\n" for line in lines)

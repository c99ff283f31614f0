"""Labels and class names of the sources: which are refused, and how labels that are texts are numbered."""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from widemix import files
from widemix.errors import InputError, shown
from widemix.progress_line import print_status

MAX_NAME = 100  # bytes of a split's name; a file's has 255 at most
MAX_CLASSES = 1_000_000  # the manifest names a class for each number up to the greatest label
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
# Numbers as other programs write them: 0x1F, 1_000, 1,000, 2,0, 4L, 5%.
NOTATION = re.compile(
    r"[+-]?(0[xob][\da-f_]+|\d+([_,'\u2019 ]\d+)+([.,]\d*)?|\d[\d.,]*(e[+-]?\d+)?[l%])", re.IGNORECASE
)
SIGNS = str.maketrans("\u2212\uff0d\uff0b\uff0e", "--+.")  # a minus sign, and the wide forms of ASCII's
# How tables write that there is no value, in lower case; not-a-number is never the name of a class.
NAN = ("nan", "+nan", "-nan", "1.#ind", "-1.#ind", "1.#qnan", "-1.#qnan")
INFINITE = ("inf", "+inf", "-inf", "infinity", "+infinity", "-infinity")
MISSING = (*NAN, *INFINITE, "na", "n/a", "#n/a", "#na", "<na>", "nat", "null", "nil", "none", "?", "-", "--", ".")


def check_label(place: str, label: float, written: str = "") -> int:
    """The label, from 0 on. Raises `InputError` with its place for one that cannot be the number of a class.

    written: its text in the source, by default that of the number.
    """
    text = written[:40] or shown(label, 40)
    if label < 0:
        raise InputError(f"{place}: label {text} is negative; labels begin at 0: remove what has no label")
    if label >= MAX_CLASSES:
        raise InputError(
            f"{place}: label {text} is above {MAX_CLASSES - 1}, the largest; number the classes from 0, or name them"
        )
    if label != label or label != int(label):
        raise InputError(f"{place}: label {text} is not a whole number, as labels are")
    return int(label)


def check_split(place: str, split: Any, others: Iterable[str]) -> None:
    """Raise `InputError` for what is no name of a split, or differs from one of `others` in case alone.

    place: where it is named, as an error's text begins. The name is that of files.
    """
    if not isinstance(split, str) or not split.isidentifier() or len(split.encode()) > MAX_NAME:
        raise InputError(f"{place}split {shown(split, 40)} is no name such as train")
    alike = next((other for other in others if other != split and other.casefold() == split.casefold()), None)
    if alike is not None:
        raise InputError(f"{place}split {split!r} differs from {alike!r} in case alone; give both one name")


def check_names(where: object, names: Sequence[str]) -> None:
    """Raise `InputError` for a class name that comes twice; print a line for names that only look different.

    Names of which one has a letter and its accent as two characters, and the other as one, are the same.
    """
    _check_count(where, len(names))
    found: dict[str, int] = {}
    for number, name in enumerate(names):
        first = found.setdefault(unicodedata.normalize("NFC", name), number)
        if first != number:
            how = "twice" if names[first] == name else "twice, in two Unicode forms"
            raise InputError(f"{where}: names the class {name!r} {how} (classes {first} and {number}); rename one")
    alike: dict[str, str] = {}
    for name in names:
        folded = _visible(unicodedata.normalize("NFKC", name)).casefold()
        first_name = alike.setdefault(" ".join(folded.split()), name)
        if first_name != name:
            print_status(
                f"warning: {where}: the classes {first_name!r} and {name!r} differ only in case, blanks or forms of "
                "characters"
            )


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError also for a key that comes twice, of which json keeps the last."""
    return files.parse_json(text, object_pairs_hook=_object)


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"has the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return found


def _visible(text: str) -> str:
    """The text without characters that nobody sees, such as byte order marks and joiners."""
    return "".join(character for character in text if unicodedata.category(character) != "Cf")


def ascii_digits(text: str) -> str:
    """The text with the digits and signs of ASCII in place of those of other scripts."""
    return "".join(str(unicodedata.decimal(character, character)) for character in _visible(text).translate(SIGNS))


def _check_count(where: object, classes: int) -> None:
    if classes > MAX_CLASSES:
        raise InputError(f"{where}: has {classes} classes, more than {MAX_CLASSES}; are its labels ids of samples?")


def number_classes(
    where: object, first: Mapping[str, str], *, gaps: bool = False
) -> tuple[tuple[str, ...], dict[str, int]]:
    """The class names in label order, and the label of each text.

    first: the texts of the labels, without blanks around, each with the place that has it first.

    Whole numbers, also such as 2.0, are the labels, with a class for each number up to the greatest; with `gaps` only
    the numbers themselves are classes. Numbers of one width with leading zeros (007) are names, as all other texts,
    and names are numbered in sorted order. Raises `InputError` for numbers that are not whole, negative or large, and
    for missing values.
    """
    _check_count(where, len(first))
    digits = {text: ascii_digits(text) for text in first}
    numbers = [text for text in first if NUMBER.fullmatch(digits[text])]
    names = [text for text in first if not NUMBER.fullmatch(digits[text])]
    plain = all(digits[text].isdecimal() for text in numbers)
    for text in names:
        if text.lower() in NAN or (numbers and (not plain or text.lower() in MISSING)):
            what = f"no number, as {numbers[0]} is" if numbers else "no class name"
            raise InputError(f"{first[text]}: label {text!r} is {what}; remove what has no label")
    _check_notation(first, names, digits)
    for text in names:
        if text.lower() in MISSING:
            print_status(f"warning: {where}: the class {text!r} is named as tables write a missing value")
    if names and numbers:
        print_status(
            f"warning: {where}: the labels are both names such as {names[0]!r} and numbers such as {numbers[0]!r}; "
            "all are taken as names, and sorted as text"
        )
    width = {len(digits[text]) for text in numbers}
    if names or (plain and len(width) == 1 and width != {1} and any(digits[text][0] == "0" for text in numbers)):
        order = sorted(first)
        return tuple(order), {text: label for label, text in enumerate(order)}
    label = {text: check_label(first[text], float(digits[text]), text) for text in numbers}
    changed = next((text for text in numbers if text != str(label[text])), None)
    if changed is not None:
        print_status(f"{where}: labels such as {changed} are read as the number {label[changed]}")
    present = sorted(set(label.values())) if gaps else range(1 + max(label.values()))
    place = {number: index for index, number in enumerate(present)}
    return tuple(map(str, present)), {text: place[number] for text, number in label.items()}


def _check_notation(first: Mapping[str, str], names: Sequence[str], digits: Mapping[str, str]) -> None:
    """`InputError` where all texts are numbers, and some in another notation, whose order by text would be wrong."""
    bare = {text: digits[text].strip("'\"()") for text in names}  # quotes that a table has twice
    strange = [text for text in names if NOTATION.fullmatch(bare[text]) or NUMBER.fullmatch(bare[text])]
    if strange and strange == names:
        raise InputError(
            f"{first[strange[0]]}: label {strange[0]!r:.40} is a number in a notation that is not read; write digits "
            "alone, such as 31, or put a letter before what is a name"
        )

"""The sources of the samples, in a text file next to each .beton: `train.sources` for `train.beton`.

One line per sample, in their order: the CRC-32C of the source's bytes in hex, a space, and the sample's name. In
names, a backslash is written as `\\\\` and a line break as `\\n`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from widemix.errors import InputError, command
from widemix.files import open_regular, read_regular

SUFFIX = ".sources"
CUT_SHORT = "the file ends before it; it was cut short"


def sources_text(checksums: Sequence[int], names: Sequence[str]) -> bytes:
    """The content of the file."""
    lines = (f"{checksum:08x} {_escape(name)}\n" for checksum, name in zip(checksums, names, strict=True))
    return "".join(lines).encode("utf-8", "surrogateescape")


def read_sources(beton: Path) -> dict[str, tuple[int, int]]:
    """Number and source's CRC-32C of each sample, by name. Raises `InputError` for a file in another form."""
    return {name: (number, checksum) for number, (name, checksum) in enumerate(_read(beton))}


def read_names(beton: Path) -> list[str]:
    """The name of each sample, which may come twice. Raises `InputError` for a file in another form."""
    return [name for name, _ in _read(beton)]


def _read(beton: Path) -> Iterator[tuple[str, int]]:
    path = beton.with_suffix(SUFFIX)
    try:
        for line in read_regular(path).decode("utf-8", "surrogateescape").split("\n")[:-1]:
            yield _unescape(line[9:]), int(line[:8], 16)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); prepare the folder again") from None
    except ValueError:
        raise InputError(f"{path}: is damaged; prepare the folder again") from None


def describe_sample(beton: Path, sample: int) -> str:
    """`sample 17 (train/ant/17.jpg)`; without the name if the file of sources does not tell it."""
    try:
        with open_regular(beton.with_suffix(SUFFIX)) as file:
            line = next((line for number, line in enumerate(file) if number == sample), b"")
    except (OSError, InputError):
        line = b""
    name = line[9:].rstrip(b"\n").decode("utf-8", "replace")
    return f"sample {sample} ({name})" if name else f"sample {sample}"


def damaged_sample(beton: Path, sample: int, reason: str) -> str:
    """The message about a sample that cannot be read: which one, why, and the cure."""
    which = f"{beton}: {describe_sample(beton, sample)} cannot be read: {reason}"
    return f"{which}; {command('verify', beton.parent)} lists all damage and the command that repairs it"


def _escape(name: str) -> str:
    return name.replace("\\", "\\\\").replace("\n", "\\n")


def _unescape(name: str) -> str:
    return "\\".join(part.replace("\\n", "\n") for part in name.split("\\\\"))

"""The files below a folder, and which of them are images: by their suffix, or else by their first bytes."""

import os
import re
import stat
from collections import Counter
from collections.abc import Iterator

from widemix.errors import InputError
from widemix.progress_line import print_status

SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".jfif",
    ".jpe",
    ".png",
    ".bmp",
    ".gif",
    ".webp",
    ".avif",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
)
HEAD = 32  # bytes, by which formats are recognised
FORMATS = re.compile(
    rb"\xff\xd8\xff"  # JPEG
    rb"|\x89PNG\r\n\x1a\n"
    rb"|GIF8[79]a"
    rb"|RIFF....WEBP"
    rb"|....ftypavi[fs]"  # AVIF
    rb"|II[*+]\0|MM\0[*+]"  # TIFF
    rb"|BM.{8}..\0\0[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0"  # BMP, with the size of one of its headers
    rb"|P[1-6]\s+[\d#]"  # PBM, PGM, PPM
    rb"|\0\0\0\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51",  # JPEG 2000
    re.DOTALL,
)
RAW_PHOTOS = (".dng", ".nef", ".nrw", ".arw", ".cr2", ".pef", ".srw")  # TIFFs whose image is a thumbnail
STRANGERS = ("__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found")


def is_hidden(name: str) -> bool:
    """Whether a file or folder belongs to a system or a tool, such as .ipynb_checkpoints or ._a.jpg: by its name."""
    return name.startswith(".") or name in STRANGERS


def is_hidden_path(path: str) -> bool:
    """Whether a file, or a folder of its relative path, is hidden."""
    return any(is_hidden(part) for part in path.split("/") if part not in (".", ".."))


def begins_as_image(head: bytes) -> bool:
    """Whether the first bytes of a file, of which `HEAD` are enough, are those of an image that can be read."""
    return FORMATS.match(head) is not None


def walk(folder: str, prefix: str = "", above: tuple[tuple[int, int], ...] = ()) -> Iterator[str]:
    """The files in a folder and those below it that are not hidden, as `prefix` and the path relative to it.

    above: device and inode of each folder around it. Links to folders are followed. Raises `InputError` for a folder
    that cannot be read, and for a link to a folder that it is in.
    """
    try:
        status = os.stat(folder)
        with os.scandir(folder) as scanned:
            entries = [(entry, entry.is_dir()) for entry in scanned]
    except OSError as error:
        raise InputError(f"{error.filename or folder}: cannot be read ({error.strerror})") from None
    place = status.st_dev, status.st_ino
    if place in above:
        raise InputError(f"{folder}: is a link to a folder that it is in; remove it")
    for entry, is_folder in entries:
        if is_hidden(entry.name):
            continue
        if is_folder:
            yield from walk(entry.path, f"{prefix}{entry.name}/", (*above, place))
        else:
            yield prefix + entry.name


class Images:
    """Lists the images of folders, and counts the other files."""

    def __init__(self) -> None:
        self.others: Counter[str] = Counter()  # files that are no images, by suffix

    def find(self, folder: str, prefix: str = "") -> list[str]:
        """The images in a folder and those below it, sorted, as `prefix` and the path relative to it."""
        return sorted(name for name in walk(folder, prefix) if self.is_image(f"{folder}/{name[len(prefix) :]}"))

    def is_image(self, path: str) -> bool:
        """Whether a file is an image; otherwise it is counted."""
        suffix = os.path.splitext(path)[1].lower()
        if suffix in SUFFIXES or (suffix not in RAW_PHOTOS and begins_as_image(_head(path))):
            return True
        self.others[suffix] += 1
        return False

    def describe_others(self) -> list[str]:
        """A phrase for each suffix of the files that are no images: `3 files *.txt`."""
        counts = sorted(self.others.items(), key=lambda item: (-item[1], item[0]))
        return [
            f"{count:,} file{'s' * (count > 1)} {f'*{name}' if name else 'without suffix'}" for name, count in counts
        ]

    def print_others(self, where: object) -> None:
        """Print a line for each suffix of the files that are no images."""
        for phrase in self.describe_others():
            print_status(f"{where}: left out {phrase}: no images by name or content")


def _head(path: str) -> bytes:
    """The first bytes of a file; none of what is no regular file, or cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for a FIFO's writer
    except OSError:
        return b""
    try:
        return os.pread(file, HEAD, 0) if stat.S_ISREG(os.fstat(file).st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(file)

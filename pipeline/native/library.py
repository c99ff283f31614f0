"""Loads the compiled library."""

import ctypes
import functools
import io
import sys
from pathlib import Path

from widemix.native.build import SOURCES, BuildError, compiled, planned
from widemix.terminal import print
from widemix.versions import older_pillow

MESSAGE = 200  # bytes of an error message of the C library, at most


@ctypes.CFUNCTYPE(
    ctypes.c_bool, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p
)
def _decode_whole(jpeg: int, size: int, height: int, width: int, rows: int, message: int) -> bool:
    """Decode a JPEG by Pillow, see crop.h; called from C, from any thread."""
    try:
        from PIL import Image

        image = Image.open(io.BytesIO(ctypes.string_at(jpeg, size)), formats=["JPEG"])
        pixels = image.convert("RGB").tobytes("raw", "RGBX")
        assert len(pixels) == 4 * height * width  # C has compared the header
        ctypes.memmove(rows, pixels, len(pixels))
        return True
    except Exception as error:  # Pillow raises whatever its parsers meet in damaged bytes
        reason = (str(error) or type(error).__name__).encode()[: MESSAGE - 1] + b"\0"
        ctypes.memmove(message, reason, len(reason))
        return False


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, or None with a printed note if it cannot be built. Its functions run without the GIL."""
    try:
        return open_library()
    except BuildError as error:
        older = older_pillow()
        pixels = f"the pixels of Pillow {older}, which are not those of Pillow 13" if older else "the same pixels"
        print(f"note: without compiled code images load 4 times slower, with {pixels}: {error}", file=sys.stderr)
        return None


@functools.cache
def open_library(sources: Path = SOURCES) -> ctypes.CDLL:
    """The library, which is compiled if it is missing. Raises `BuildError` if it cannot be compiled or loaded."""
    path = compiled(sources)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path.name} does not load ({error})") from None
    library.jpeg_library.restype = ctypes.c_char_p
    library.set_whole_decoder(_decode_whole)
    return library


def description(sources: Path = SOURCES) -> str:
    """Which compiled code is in use, in a few words. Does not compile it."""
    try:
        path = planned(sources)
        if not path.exists():
            return "compiled code is made at its first use"
        source = f"{path.stem} of the package" if path.parent == sources else "made on this machine"
        return f"compiled code: {source}, {open_library(sources).jpeg_library().decode()}"
    except BuildError as error:
        return f"no compiled code: {error}"

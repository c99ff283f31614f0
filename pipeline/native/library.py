"""The compiled library in this process."""

import ctypes
import functools
import sys

from pipeline.native.build import BuildError, compiled


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, or None where it cannot be had, which is said once. Its functions run without the GIL."""
    try:
        return open_library()
    except BuildError as error:
        print(
            f"note: pictures are decoded by Pillow and turned by plain code, the same but slower: {error}",
            file=sys.stderr,
        )
        return None


def open_library() -> ctypes.CDLL:
    """The library, compiled where it is missing. `BuildError` where it cannot be compiled or loaded."""
    path = compiled()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path.name} does not load ({error})") from None
    library.jpeg_library.restype = ctypes.c_char_p
    return library

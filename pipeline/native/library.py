"""Loads the compiled library."""

import ctypes
import functools
import sys

from pipeline.native.build import BuildError, compiled


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, or None with a printed note if it cannot be built. Its functions run without the GIL."""
    try:
        return open_library()
    except BuildError as error:
        print(
            f"note: images are decoded and transformed by slower Python code, with the same results: {error}",
            file=sys.stderr,
        )
        return None


def open_library() -> ctypes.CDLL:
    """The library, which is compiled if it is missing. Raises `BuildError` if it cannot be compiled or loaded."""
    path = compiled()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path.name} does not load ({error})") from None
    library.jpeg_library.restype = ctypes.c_char_p
    return library

"""How this project compiles with numba: no GIL, no fast-math, kept on disk.

numba's own cache does not see a change in a function that a cached one calls from another file, so the folder
is named after the sources and versions that the code was made from, and after whether it calls the C part.
"""

import ctypes
import functools
import hashlib
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding
from numba import types
from numba.core.cpu import CPUTargetOptions
from numba.core.options import TargetOptions

from pipeline import native
from pipeline.native.build import cache_folder


def _cache_folder() -> Path:
    digest = hashlib.sha256(version("ffcv").encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    digest.update(b"C" if native.load() else b"")
    name = f"numba-{numba.__version__}-{digest.hexdigest()[:16]}"
    folder = cache_folder() / name
    folder.mkdir(exist_ok=True)
    return folder


if not os.environ.get("NUMBA_CACHE_DIR"):
    numba.config.CACHE_DIR = str(_cache_folder())  # type: ignore[attr-defined]

jit: Any = functools.partial(numba.njit, nogil=True, cache=True, error_model="numpy")

# numba knows LLVM's `noalias` but offers no option for it. Without it loops that gather or write several arrays
# are not vectorised: four times slower for shear and rotate.
CPUTargetOptions.noalias = TargetOptions.Mapping("noalias")

pixels: Any = functools.partial(jit, noalias=True)
"""`jit` for functions of pictures. Its promise: no two arguments share memory."""

inlined: Any = functools.partial(pixels, inline="always")
"""`pixels` that becomes part of its caller before that is compiled: the arithmetic of one value, so that LLVM sees
a single loop to vectorise; and what mostly calls others, since LLVM optimises a function anew in each of its callers,
up to the topmost."""


def native_symbol(name: str, signature: Any) -> Any:
    """A function of the C part for compiled code, None where that part cannot be built.

    Called by its name: what calls a ctypes function, an address, numba cannot keep on disk.
    """
    library = native.load()
    if library is None:
        return None
    binding.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    return types.ExternalFunction(name, signature)


def quick_symbol(name: str, signature: Any) -> Any:
    """A function of the C part that says whether it has done its work: false where there is none."""
    return native_symbol(name, signature) or _undone


@jit
def _undone(*arguments):
    return False

"""C code that runs without the GIL: decodes JPEGs with libjpeg-turbo, resizes and transforms images as Pillow does.

All `*.c` files of this folder are compiled into one library, which `load` opens with ctypes. It is built by the
set-up step, or at its first use on another kind of machine. If it cannot be built, slower Python code gives the same
results.
"""

from widemix.native.build import BuildError, compiled
from widemix.native.library import load

__all__ = ["BuildError", "compiled", "load"]

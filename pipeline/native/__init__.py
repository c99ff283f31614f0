"""What is compiled from C: decoding JPEGs by Debian's libjpeg-turbo, resizing and turning as Pillow does, without the GIL.

Every `*.c` of this folder goes into one library, `load()`ed by ctypes: built by the set-up step, or at first use on
another kind of machine. Where it cannot be built there is a plain way in Python with the same results, slower.
"""

from pipeline.native.build import BuildError, compiled
from pipeline.native.library import load

__all__ = ["BuildError", "compiled", "load"]

"""Builds the library; the set-up step runs this."""

import sys

from widemix.native.build import BuildError
from widemix.native.library import open_library
from widemix.terminal import print

try:
    print(f"built on {open_library().jpeg_library().decode()}")
except BuildError as error:
    sys.exit(str(error))

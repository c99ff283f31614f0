"""Build the library: what the set-up step calls."""

import sys

from pipeline.native.build import BuildError
from pipeline.native.library import open_library

try:
    print(f"built on {open_library().jpeg_library().decode()}")
except BuildError as error:
    sys.exit(str(error))

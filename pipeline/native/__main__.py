"""Builds the library; the set-up step runs this."""

import sys

from pipeline.native.build import BuildError
from pipeline.native.library import open_library

try:
    print(f"built on {open_library().jpeg_library().decode()}")
except BuildError as error:
    sys.exit(str(error))

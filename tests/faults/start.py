"""`python -m tests.faults.start RANKS MODULE ARGUMENTS...`: so many ranks of a module, as `widemix train` does it."""

import sys

from launch.local import launch

if __name__ == "__main__":
    sys.exit(launch(["-m", *sys.argv[2:]], int(sys.argv[1])))

"""`python -m pipeline.cli` is the command `widemix`."""

from pipeline.cli import main

main()

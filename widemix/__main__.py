"""`python -m widemix` is the command `widemix`."""

from pipeline.cli import main

if __name__ == "__main__":
    main()

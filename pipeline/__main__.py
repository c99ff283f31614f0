"""`python -m widemix` is the command `widemix`."""

from widemix.cli import main

if __name__ == "__main__":
    main()

"""`python -m widemix` is the command `widemix`."""

from widemix import cli


def main() -> None:
    """Run the command line of this process, and end the process."""
    try:
        cli.main()
    except SystemExit as end:
        from widemix.cli.commands import exit_process

        exit_process(end.code)


if __name__ == "__main__":
    main()

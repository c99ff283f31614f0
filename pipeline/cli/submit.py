"""widemix submit."""


def add_submit(commands) -> None:
    """Add `widemix submit`."""
    from launch.slurm.submit import add_arguments, submit

    parser = commands.add_parser(
        "submit",
        help="submit a recipe or a study to Slurm",
        description="Submit a recipe to Slurm by one sbatch command; a study, or a recipe with --vary, as an array "
        "job. Cells of a study that are done, queued or running are skipped: the same command again submits "
        "those that have failed.",
    )
    add_arguments(parser)
    parser.set_defaults(command=submit)

"""widemix submit."""


def add_submit(commands) -> None:
    from launch.slurm.submit import add_arguments, submit

    parser = commands.add_parser(
        "submit",
        help="hand a recipe or a study to Slurm",
        description="One sbatch command for a recipe, or with --vary for a study of its variations: cells that are "
        "done or queued are left out, so the same command again submits what is missing.",
    )
    add_arguments(parser)
    parser.set_defaults(command=submit)

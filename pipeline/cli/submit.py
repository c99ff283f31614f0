"""widemix submit."""


def add_submit(commands) -> None:
    """Add `widemix submit`."""
    from widemix.launch.slurm.options import add_arguments
    from widemix.launch.slurm.submit import submit

    parser = commands.add_parser(
        "submit",
        help="submit a recipe or a study to Slurm",
        examples="widemix submit imagenet/mixer_b16 --run-dir /nfs/a --nodes 8 --time 24:00:00\n"
        "widemix submit figure7 --run-dir /nfs/b --at-once 8\n"
        "widemix submit digits/mixer --run-dir /nfs/c --vary train.seed=0,1,2",
        usage="%(prog)s FILE.yaml --run-dir DIR [options] [--section.key VALUE]",
        description="Submit a recipe to Slurm by one sbatch command; a study, or a recipe with --vary, as an array "
        "job. Runs of a study that are done, queued or running are skipped: the same command again submits "
        "those that have failed.",
    )
    add_arguments(parser)
    parser.set_defaults(command=submit)

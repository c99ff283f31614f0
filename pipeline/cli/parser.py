"""The command line of `widemix`.

A command imports what it needs when it runs, so that help and errors are printed without delay.
"""

from importlib.metadata import version

from widemix.cli import analyse, bench, listing, machine, predict, prep, prepared, report, runs, study, submit, train
from widemix.command_line.arguments import Parser, accept_local_rank

COMMANDS = (
    prep.add_prep,
    prep.add_join,
    prepared.add_adopt,
    prepared.add_verify,
    prepared.add_stage,
    train.add_train,
    runs.add_eval,
    predict.add_predict,
    runs.add_export,
    runs.add_push,
    listing.add_runs,
    report.add_report,
    submit.add_submit,
    study.add_study,
    analyse.add_analyse,
    bench.add_bench,
    machine.add_cost,
    machine.add_doctor,
)


EXAMPLES = """widemix prep digits --to datasets/digits        prepare a dataset, once
widemix train digits/rp_mixer --run-dir runs/a  train a recipe; the same command resumes
widemix eval runs/a                             evaluate its newest checkpoint"""


def make_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="widemix",
        description="Train MLP-Mixers and other wide, sparse networks. `widemix COMMAND --help` describes a command.",
        examples=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"widemix {version('widemix')}")
    accept_local_rank(parser)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in COMMANDS:
        add(commands)
    return parser

"""The command line of `widemix`.

A command imports what it needs when it runs, so that help and errors are printed without delay.
"""

import argparse
from importlib import import_module
from importlib.metadata import version

from widemix.cli.arguments import Parser, accept_local_rank
from widemix.terminal import print

# The commands in the order of the help; in which module of `widemix.cli` which function adds them to a parser.
COMMANDS = {
    "prep": "prep.add_prep",
    "join": "prep.add_join",
    "adopt": "prepared.add_adopt",
    "verify": "prepared.add_verify",
    "stage": "prepared.add_stage",
    "train": "train.add_train",
    "eval": "evaluate.add_eval",
    "predict": "predict.add_predict",
    "export": "evaluate.add_export",
    "push": "evaluate.add_push",
    "runs": "runs.add_runs",
    "report": "runs.add_report",
    "submit": "submit.add_submit",
    "study": "study.add_study",
    "analyse": "analyse.add_analyse",
    "bench": "bench.add_bench",
    "cost": "cost.add_cost",
    "doctor": "doctor.add_doctor",
}

EXAMPLES = """widemix prep digits --to datasets/digits        prepare a dataset, once
widemix train digits/rp_mixer --run-dir runs/a  train a recipe; the same command resumes
widemix eval runs/a                             evaluate its newest checkpoint"""


class _Version(argparse.Action):
    """Prints the version, and ends: only then is the compiled code looked for."""

    def __call__(self, parser, *_) -> None:
        from widemix.native.library import description

        print(f"widemix {version('widemix')} ({description()})")
        parser.exit()


def make_parser(only: str | None = None) -> Parser:
    """Return the parser of all commands; of one alone, without importing the others, where `only` is its name."""
    parser = Parser(
        prog="widemix",
        description="Train image classifiers: networks of timm, MLP-Mixers and their wide, sparse relatives. "
        "`widemix COMMAND --help` describes a command.",
        examples=EXAMPLES,
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show the version and which compiled code is in use"
    )
    accept_local_rank(parser)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in [only] if only in COMMANDS else COMMANDS:
        module, _, function = COMMANDS[name].partition(".")
        getattr(import_module(f"widemix.cli.{module}"), function)(commands)
    return parser

"""`widemix doctor`: what this machine has, what is missing or does not fit together, and the cure of each.

A check looks at one thing and returns a `Finding`; what a broken installation raises becomes a finding too. What the
checks need is imported inside them.
"""

import logging
import warnings
from collections.abc import Mapping

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from pipeline.doctor import machine, software
from pipeline.doctor.finding import Check, Finding, first_line, install, repair

CHECKS: Mapping[str, Check] = software.CHECKS | machine.CHECKS


def run_doctor() -> int:
    """Print the table; 1 when the main job (prepare, train, evaluate) could not run here, else 0."""
    findings = {what: examine(check) for what, check in CHECKS.items()}
    console = Console()
    console.print(table(findings))
    missing = [what for what, finding in findings.items() if finding.state == "missing"]
    verdict = (
        f"Training cannot run here until this is mended: {', '.join(missing)}."
        if missing
        else "Training can run here."
    )
    console.print(Text(f"\n{verdict}", style="bold"))
    return int(bool(missing))


def examine(check: Check) -> Finding:
    """The check's finding, or what it raised as one. Warnings and log lines of what it imports are kept quiet."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return check.look()
    except ModuleNotFoundError as error:
        return Finding(first_line(error), "missing", install(check.package))
    except Exception as error:  # a broken extension raises anything: OSError, RuntimeError, AttributeError, ...
        cure = repair(check.package) if check.package else ""
        return Finding(f"{type(error).__name__}: {first_line(error)}", "missing", cure)
    finally:
        logging.disable(before)


def table(findings: Mapping[str, Finding]) -> Table:
    """A row per check; the cure stands on a line of its own, to be copied."""
    colours = {"ok": "green", "note": "yellow", "missing": "bold red"}
    rows = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    rows.add_column("state", no_wrap=True)
    rows.add_column("what", no_wrap=True)
    rows.add_column("found, and its cure", overflow="fold")
    for what, finding in findings.items():
        cure = [Text(finding.cure, style="bold cyan")] if finding.cure else []
        rows.add_row(Text(finding.state, style=colours[finding.state]), what, Group(Text(finding.found), *cure))
    return rows

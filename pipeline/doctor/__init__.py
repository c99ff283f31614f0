"""`widemix doctor`: what is installed on this machine, what is missing or does not fit together, and how to fix it.

A check looks at one thing and returns a `Finding`; what a broken installation raises becomes a finding too. Checks
import what they need themselves.
"""

import logging
import warnings
from collections.abc import Mapping

from rich.console import Group
from rich.table import Table
from rich.text import Text

from widemix.doctor.checks import CHECKS
from widemix.doctor.finding import Check, Finding, first_line, install, repair
from widemix.progress_line import Console, announce


def run_doctor(checks: Mapping[str, Check] = CHECKS) -> int:
    """Run all checks and print a table; returns 1 if preparing, training or evaluating could not run here, else 0."""
    with announce("importing what is installed, and timing the CPU: about half a minute"):
        findings = {name: run_check(check) for name, check in checks.items()}
    console = Console()
    console.print(table(findings))
    missing = [name for name, finding in findings.items() if finding.state == "missing"]
    verdict = (
        f"Training cannot run here before these are fixed: {', '.join(missing)}."
        if missing
        else "Training can run here."
    )
    console.print(Text(f"\n{verdict}", style="bold"))
    return int(bool(missing))


def run_check(check: Check) -> Finding:
    """Run a check; what is missing, but only few need, becomes a note."""
    finding = _find(check)
    if finding.state == "missing" and check.only_for:
        return Finding(f"{finding.text}; {check.only_for}", "note", finding.fix)
    return finding


def _find(check: Check) -> Finding:
    """Run a check; an exception becomes a finding. Warnings and log lines of what it imports are suppressed."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return check.run()
    except ModuleNotFoundError as error:
        return Finding(first_line(error), "missing", install(check.package))
    except Exception as error:  # a broken extension raises anything: OSError, RuntimeError, AttributeError, ...
        fix = repair(check.package) if check.package else ""
        return Finding(f"{type(error).__name__}: {first_line(error)}", "missing", fix)
    finally:
        logging.disable(before)


def table(findings: Mapping[str, Finding]) -> Table:
    """Return the table, one row a check, with the fix on a line of its own so that it can be copied."""
    colours = {"ok": "green", "note": "yellow", "missing": "bold red"}
    rows = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    rows.add_column("state", no_wrap=True)
    rows.add_column("what", no_wrap=True)
    rows.add_column("found, and how to fix it", overflow="fold")
    for name, finding in findings.items():
        fix = [Text(finding.fix, style="bold cyan")] if finding.fix else []
        rows.add_row(Text(finding.state, style=colours[finding.state]), name, Group(Text(finding.text), *fix))
    return rows

"""What is done of a study."""

from pathlib import Path

from widemix.run.lease import Leases
from widemix.studies.cell import Cell
from widemix.studies.rows import Table, finished_row


def state(cell: Cell, folder: Path, leases: Leases, table: Table) -> str:
    """Return `done`, `diverged`, `running on HOST`, `begun` (stopped or failed, with a run folder) or `open`."""
    row = table.row(cell) or finished_row(cell, folder)
    if row is not None:
        return row.state
    holder = leases.holder(cell.name)
    if holder is not None and holder.alive:
        return f"running on {holder.host}"
    return "begun" if (folder / cell.name / "recipe.yaml").exists() else "open"

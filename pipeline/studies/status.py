"""What is done of a study."""

from pathlib import Path

from widemix.run.lease import Leases
from widemix.studies.rows import Table, finished_row
from widemix.studies.study_run import StudyRun


def state(study_run: StudyRun, folder: Path, leases: Leases, table: Table) -> str:
    """Return `done`, `diverged`, `running on HOST`, `begun` (stopped or failed, with a run folder) or `open`."""
    row = table.row(study_run) or finished_row(study_run, folder)
    if row is not None:
        return row.state
    holder = leases.holder(study_run.name)
    if holder is not None and holder.alive:
        return f"running on {holder.host}"
    return "begun" if (folder / study_run.name / "recipe.yaml").exists() else "open"

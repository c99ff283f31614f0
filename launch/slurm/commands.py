"""What `widemix submit` asks of Slurm's commands on this machine."""

import getpass
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from widemix.errors import InputError

_REASON_S, _POLL_S = 5.0, 0.2
# Reasons why Slurm leaves a job in the queue that do not pass by themselves; those of an administrator may.
_NEVER = re.compile(
    r"Partition(Config|TimeLimit|NodeLimit)|BadConstraints|Invalid(Account|QOS)|\w+NotAllowed|\w+PerJobLimit"
)
_OF_A_JOB = re.compile(r"SRUN_|SLURM_(?!CONF|CLUSTERS$|JWT$)")


def run(command: list[str]) -> str:
    """Run a command of Slurm and return its output; raises `InputError` with Slurm's message if it fails."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, env=_environ()).stdout
    except FileNotFoundError:
        raise InputError(f"{command[0]}: not found; submit on a machine that has Slurm's commands") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        message = re.sub(rf"^{command[0]}: (error: )?", "", lines[-1])
        raise InputError(f"{command[0]} failed: {message}") from None


def _environ() -> dict[str, str]:
    """The environment without what describes the job or salloc in which this runs: sbatch would hand it on."""
    return {name: value for name, value in os.environ.items() if not _OF_A_JOB.match(name)}


def queued(folder: Path) -> list[str]:
    """Return the jobs submitted for this folder that are queued or running: `12_3` (array, index) or `12_N/A`."""
    record = folder / "slurm" / "jobs.jsonl"
    if not record.exists():
        return []
    jobs = {json.loads(line)["job"] for line in record.read_text().splitlines()}
    command = ["squeue", "--noheader", "--array", "--user", getpass.getuser(), "--format", "%F_%K"]
    return [job for job in run(command).split() if job.partition("_")[0] in jobs]


def waits_for(job: str) -> str:
    """Return Slurm's reason why a job is in the queue; raises `InputError`, and cancels it, if it could never start.

    `sbatch --test-only` does not look at the limits of partitions and accounts.
    """
    reason = "PartitionConfig"  # Slurm's first word for any limit, until its scheduler has looked
    deadline = time.monotonic() + _REASON_S
    while reason == "PartitionConfig" and time.monotonic() < deadline:
        reason = next(iter(run(["squeue", "--noheader", "--job", job, "--format", "%r"]).split()), "")
        time.sleep(_POLL_S)
    if _NEVER.fullmatch(reason):
        run(["scancel", job])
        raise InputError(
            f"sbatch: job {job} could never start ({reason}) and is cancelled: see `scontrol show partition` and ask "
            "for less"
        )
    return reason


def check_array(last: int) -> None:
    """Raise `InputError` if Slurm's arrays end before this index; a machine that can't ask Slurm does not know."""
    try:
        size = re.search(r"MaxArraySize\s*= (\d+)", run(["scontrol", "show", "config"]))
    except InputError:
        return
    if size and last >= int(size[1]):
        raise InputError(
            f"{last} runs: an array of Slurm's has at most {int(size[1]) - 1} here (MaxArraySize {size[1]}); divide "
            "them among several --run-dir, each with some of the values"
        )


def check_pyxis() -> None:
    """Raise `InputError` if srun starts no containers; a machine that has only sbatch does not know."""
    if shutil.which("srun") and "--container-image" not in run(["srun", "--help"]):
        raise InputError(
            "--container-image: srun has no such option here, it is Pyxis's; an Apptainer image is run by --container"
        )

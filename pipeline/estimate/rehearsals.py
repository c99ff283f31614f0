"""Every recipe of a folder rehearsed, each by the command in a process of its own: the table of launch/README.md."""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import InputError
from pipeline.estimate.hardware import Cluster

_FIGURES = ("weights", "sent a step", "memory a GPU", "step", "hours", "GPU hours", "rehearsed in", "on CPUs for")
HEAD = f"| recipe | {' | '.join(_FIGURES)} |\n|---|{'---:|' * len(_FIGURES)}"


def rehearsal_rows(folder: Path, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """A row a recipe, as soon as there is one: its figures by name, or what it said when it failed.

    The seconds and CPU seconds are the command's, the start of Python and torch included.
    """
    cluster.check()
    recipes = sorted(folder.glob("*.yaml"))
    if not recipes:
        raise InputError(f"--table {folder}: has no recipes (*.yaml)")
    options = ["--gpus", str(cluster.gpus), "--gpu", cluster.gpu, "--nodes", str(cluster.hosts)]
    options += ["--network", cluster.network, "--rehearse"]
    with tempfile.TemporaryDirectory() as place:
        for recipe in recipes:
            file = Path(place) / f"{recipe.stem}.json"
            command = [sys.executable, "-m", "pipeline.cli", "cost", str(recipe), *options, "--json", str(file)]
            began, cpu = time.perf_counter(), _cpu_seconds()
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            row: dict[str, Any] = {"name": recipe.stem, "seconds": round(time.perf_counter() - began, 1)}
            row["CPU seconds"] = round(_cpu_seconds() - cpu, 1)
            if run.returncode:
                row["error"] = (run.stderr.strip().splitlines() or ["failed"])[-1]
            else:
                row |= {line["name"]: line["value"] for line in json.loads(file.read_text())["rows"]}
            yield row


def rehearsal_line(row: dict[str, Any]) -> str:
    """A row as one of a Markdown table, whose first two lines are `HEAD`."""
    if "error" in row:
        cells = [row["error"].replace("|", "\\|"), *[""] * 5]
    else:
        sent = sum(row.get(f"rehearsed {kind}", 0) for kind in ("all-reduce", "all-gather", "reduce-scatter"))
        cells = [
            f"{row['parameters'] / 1e6:.1f} M",
            f"{sent / 1e6:,.0f} MB",
            f"{row['rehearsed memory'] / 1e9:.2f} GB",
        ]
        cells += [f"{1e3 * row['step']:.0f} ms"]  # hours are not known where the number of samples is not
        cells += [f"{row['hours']:.1f}", f"{row['GPU hours']:,.0f}"] if "hours" in row else ["", ""]
    times = (f"{row['seconds']:.0f} s", f"{row['CPU seconds']:.0f} s")
    return " | ".join([f"| `{row['name']}`", *cells, *times]) + " |"


def _cpu_seconds() -> float:
    """Of all processes that this one has started and seen end."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

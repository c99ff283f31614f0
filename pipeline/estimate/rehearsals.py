"""`widemix cost --table`: rehearse every recipe of a folder, each in a process of its own."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from widemix.errors import InputError
from widemix.estimate.hardware import Cluster
from widemix.processes import children_cpu_seconds, end_with_parent

_COLUMNS = ("weights", "sent a step", "memory a GPU", "step", "hours", "GPU hours", "rehearsed in", "on CPUs for")
HEAD = f"| recipe | {' | '.join(_COLUMNS)} |\n|---|{'---:|' * len(_COLUMNS)}"


def rehearsal_rows(
    folder: Path, cluster: Cluster, overrides: Sequence[tuple[str, str]] = ()
) -> Iterator[dict[str, Any]]:
    """Yield one row a recipe, with these keys, as soon as it is complete: its numbers by name, or "error".

    "seconds" and "CPU seconds" are those of the whole command, with the start of Python and torch.
    """
    cluster.check()
    recipes = sorted(folder.glob("*.yaml"))
    if not recipes:
        raise InputError(f"--table {folder}: has no recipes (*.yaml)")
    options = ["--gpus", str(cluster.gpus), "--gpu", cluster.gpu, "--network", cluster.network]
    options += [] if cluster.nodes is None else ["--nodes", str(cluster.nodes)]
    options += ["--rehearse", *(f"--{name}={value}" for name, value in overrides)]
    with tempfile.TemporaryDirectory() as temporary:
        for recipe in recipes:
            file = Path(temporary) / f"{recipe.stem}.json"
            command = [sys.executable, "-m", "widemix", "cost", str(recipe), *options, "--json", str(file)]
            began, cpu = time.perf_counter(), children_cpu_seconds()
            run = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=end_with_parent())
            row: dict[str, Any] = {"name": recipe.stem, "seconds": round(time.perf_counter() - began, 1)}
            row["CPU seconds"] = round(children_cpu_seconds() - cpu, 1)
            if run.returncode:
                row["error"] = (run.stderr.strip().splitlines() or ["failed"])[-1]
            else:
                row |= {line["name"]: line["value"] for line in json.loads(file.read_text())["rows"]}
            yield row


def rehearsal_line(row: dict[str, Any]) -> str:
    """Return a row of the Markdown table whose first two lines are `HEAD`."""
    if "error" in row:
        cells = [row["error"].replace("|", "\\|"), *[""] * 5]
    else:
        sent = sum(row.get(f"rehearsed {kind}", 0) for kind in ("all-reduce", "all-gather", "reduce-scatter"))
        cells = [
            f"{row['parameters'] / 1e6:.1f} M",
            f"{sent / 1e6:,.0f} MB",
            f"{row['rehearsed memory'] / 1e9:.2f} GB",
        ]
        cells += [f"{1e3 * row['step']:.0f} ms"]  # without a number of samples there are no hours
        cells += [f"{row['hours']:.1f}", f"{row['GPU hours']:,.0f}"] if "hours" in row else ["", ""]
    times = (f"{row['seconds']:.0f} s", f"{row['CPU seconds']:.0f} s")
    return " | ".join([f"| `{row['name']}`", *cells, *times]) + " |"

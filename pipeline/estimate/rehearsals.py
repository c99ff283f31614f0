"""Every recipe of a folder rehearsed, each by the command in a process of its own: the table of launch/README.md."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pipeline.errors import InputError
from pipeline.estimate.report import Cluster


def rehearsal_rows(folder: Path, cluster: Cluster) -> list[dict[str, Any]]:
    """A row a recipe: its figures by name, the seconds that the command took, and what it said if it failed."""
    recipes = sorted(folder.glob("*.yaml"))
    if not recipes:
        raise InputError(f"--table {folder}: has no recipes (*.yaml)")
    options = ["--gpus", str(cluster.gpus), "--gpu", cluster.gpu, "--nodes", str(cluster.hosts)]
    options += ["--network", cluster.network, "--rehearse"]
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for recipe in recipes:
            file = Path(place) / f"{recipe.stem}.json"
            command = [sys.executable, "-m", "pipeline.cli", "cost", str(recipe), *options, "--json", str(file)]
            began = time.perf_counter()
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            row: dict[str, Any] = {"name": recipe.stem, "seconds": round(time.perf_counter() - began, 1)}
            if run.returncode:
                row["error"] = (run.stderr.strip().splitlines() or ["failed"])[-1]
            else:
                row |= {line["name"]: line["value"] for line in json.loads(file.read_text())["rows"]}
            rows.append(row)
    return rows


def rehearsal_table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| recipe | weights | sent a step | memory a GPU | step | hours | GPU hours | rehearsed in |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| `{row['name']}` | {row['error']} | | | | | | {row['seconds']:.0f} s |")
            continue
        sent = sum(row.get(f"rehearsed {kind}", 0) for kind in ("all-reduce", "all-gather", "reduce-scatter"))
        cells = (
            *(f"`{row['name']}`", f"{row['parameters'] / 1e6:.1f} M", f"{sent / 1e6:,.0f} MB"),
            *(f"{row['rehearsed memory'] / 1e9:.2f} GB", f"{1e3 * row['step']:.0f} ms", f"{row['hours']:.1f}"),
            *(f"{row['GPU hours']:,.0f}", f"{row['seconds']:.0f} s"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)

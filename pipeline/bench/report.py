"""The output of every benchmark: the machine, then a row for each contestant."""

import json
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from widemix.cgroups import usable_cpus
from widemix.files import write_output
from widemix.terminal import print


def report(rows: list[dict[str, Any]], versions: Sequence[str], file: Path | None) -> None:
    """Print the rows, each a name and its numbers; write `{"machine", "rows"}` to `file` unless it is None.

    A number that has parts is printed below the table, with the fraction of each. A list, the single values of a
    number, is in the file alone.
    """
    description = machine(*versions)
    print(description)
    parts = [name for name, value in rows[0].items() if isinstance(value, dict)]
    columns = _columns(rows)
    print("  ".join(f"{name:>18}" for name in columns))
    for row in rows:
        shown = [_shown(row[name]) for name in columns]
        print("  ".join(f"{value:>18}" for value in shown) + f"  {row['name']}")
    for name in parts:
        for row in rows:
            total = sum(row[name].values()) or 1
            print(f"{name} of {row['name']}:")
            for part, value in row[name].items():
                print(f"{_shown(value):>18}  {value / total:4.0%}  {part}")
    if file:
        write_output(file, json.dumps({"machine": description, "rows": rows}, indent=1) + "\n")


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table in Markdown, without parts and lists."""
    columns = ["name", *_columns(rows)]
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)]]
    lines += [[row["name"].replace("|", "\\|"), *(_shown(row[name]) for name in columns[1:])] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    return [name for name, value in rows[0].items() if name != "name" and not isinstance(value, dict | list)]


def _shown(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:,.6g}"


def machine(*packages: str) -> str:
    """Return the processors, the GPU if there is one, and the versions of Python and packages as one line."""
    known = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":")[1].strip() for line in known if line.startswith("model name")]
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    torch = sys.modules.get("torch")
    gpu = f", {torch.cuda.get_device_name()}" if torch and torch.cuda.is_available() else ""
    processor = f"{usable_cpus()} x {models[0] if models else platform.processor()}{gpu}"
    return f"{processor}, Python {platform.python_version()}, {versions}"

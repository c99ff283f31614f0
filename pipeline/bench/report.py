"""The output of every benchmark: the machine, then a row for each contestant."""

import json
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from widemix.files import write_output


def report(rows: list[dict[str, Any]], versions: Sequence[str], file: Path | None) -> None:
    """Print the rows, each a name and its numbers; write `{"machine", "rows"}` to `file` unless it is None.

    A number that has parts is printed below the table, with the fraction of each.
    """
    description = machine(*versions)
    print(description)
    parts = [name for name, value in rows[0].items() if isinstance(value, dict)]
    columns = [name for name in rows[0] if name != "name" and name not in parts]
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


def _shown(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:,.6g}"


def machine(*packages: str) -> str:
    """Return the processor and the versions of Python and packages as one line."""
    models = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return f"{models[0] if models else platform.processor()}, Python {platform.python_version()}, {versions}"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []

"""The README.md of an export: where the weights come from, and how good they are."""

import json
from pathlib import Path

from blake3 import blake3

from widemix.errors import InputError
from widemix.formats.manifest import NAME, read_manifest
from widemix.metrics import MEASURED, METRICS
from widemix.recipe import Recipe, dump_recipe
from widemix.run.checkpoint import Checkpoint

_HEADER = """---
library_name: timm
tags: [image-classification, widemix]
---
"""


def model_card(origin: Checkpoint, recipe: Recipe, load: str, ema: bool = False) -> str:
    """Return the card as Markdown: evaluations until the checkpoint, the data's hashes, and the whole recipe.

    load: the Python line that loads the export.
    """
    weights, prefix = ("averaged weights", "ema_") if ema else ("weights", "")
    parts = [
        f"{_HEADER}\n# {recipe.model.summary()}\n",
        f"The {weights} after {origin.position.step} steps of the recipe below, trained by widemix.\n",
        f"```python\n{load}\n```\n",
        f"## Evaluations on {recipe.data.eval_split}\n\n{_curve(origin, recipe, prefix)}\n",
        f"## Data\n\n{_data(Path(recipe.data.path))}\n",
        f"## Recipe\n\n```yaml\n{dump_recipe(recipe)}```\n",
    ]
    return "\n".join(parts)


def _curve(origin: Checkpoint, recipe: Recipe, prefix: str) -> str:
    """Every evaluation of the run that is not later than the checkpoint, as a table."""
    names = ["loss", *MEASURED[recipe.data.targets]]
    path = origin.path.parent.parent / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [line for line in lines if line["split"] == "eval" and line["step"] <= origin.position.step]
    if not rows:
        return "None."
    head = f"| step | {' | '.join(METRICS[name].title for name in names)} |\n|---:|{'---:|' * len(names)}"
    return "\n".join([head, *(_row(line, names, prefix) for line in rows)])


def _row(line: dict[str, float], names: list[str], prefix: str) -> str:
    values = (METRICS[name].form.format(line.get(f"{prefix}{name}", float("nan"))) for name in names)
    return f"| {line['step']} | {' | '.join(values)} |"


def _data(folder: Path) -> str:
    """The splits of the prepared folder, each with a BLAKE3 of its blocks' hashes."""
    try:
        manifest = read_manifest(folder)
    except InputError:
        return f"`{folder}`, which was not there when this was exported."
    lines = [f"`{manifest.source}`, prepared by `widemix prep`; {NAME} has the hashes of all blocks.\n"]
    lines.append("| split | samples | BLAKE3 of the hashes of its blocks |\n|---|---:|---|")
    for name, split in manifest.splits.items():
        lines.append(f"| {name} | {split.samples} | `{blake3(' '.join(split.blocks).encode()).hexdigest(16)}` |")
    return "\n".join(lines)

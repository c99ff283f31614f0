"""The main job in small: digits, a normal and a random-permuted Mixer, two ranks, DDP and DeepSpeed."""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

DATA = Path("datasets/digits")
MODELS = ("mixer", "rp_mixer")
ENGINES = {"ddp": [], "deepspeed": ["--engine.kind", "deepspeed"]}
EXPECTED = 95.0  # percent top-1; the recipes reach more than 97


def main() -> int:
    folder = Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    _widemix("prep", "digits", "--to", str(DATA))
    table = Table(title="Handwritten digits, two ranks on this machine, 360 test pictures")
    for name in ("model", "engine"):
        table.add_column(name)
    for name in ("test top-1", "seconds", "last loss against DDP"):
        table.add_column(name, justify="right")
    worst = 100.0
    for model in MODELS:
        losses = {}
        for engine, options in ENGINES.items():
            run = folder / f"{model}-{engine}"
            recipe = f"recipes/digits/{model}.yaml"
            _widemix("train", recipe, "--ranks", "2", "--run-dir", str(run), *options)
            done = json.loads((run / "done.json").read_text())
            losses[engine] = _last_loss(run)
            drift = f"{losses[engine] / losses['ddp'] - 1:+.1e}" if engine != "ddp" else ""
            table.add_row(model, engine, f"{done['top1']:.2f} %", f"{done['seconds']:.1f}", drift)
            worst = min(worst, done["top1"])
    console = Console()
    console.print(table)
    console.print(f"Curves, pictures and settings: .venv/bin/tensorboard --logdir {folder}", highlight=False)
    if worst < EXPECTED:
        console.print(f"{worst:.2f} % is below the {EXPECTED:g} % that this run must reach", style="red")
        return 1
    return 0


def _widemix(*words: str) -> None:
    print(f"\n$ widemix {shlex.join(words)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "pipeline.cli", *words], check=False).returncode
    if code:
        sys.exit(code)


def _last_loss(run: Path) -> float:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["split"] == "train"][-1]


if __name__ == "__main__":
    sys.exit(main())

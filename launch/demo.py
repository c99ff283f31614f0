"""`make demo`: train a Mixer and a random-permuted Mixer on digits, with two ranks, by DDP and by DeepSpeed."""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich.table import Table

from widemix.plots.style import COLORS, new_figure, save, styled
from widemix.processes import end_with_parent, keep_current_folder_off_path
from widemix.progress_line import Console
from widemix.terminal import print

DATA = Path("datasets/digits")
MODELS = ("mixer", "rp_mixer")
ENGINES: dict[str, list[str]] = {"ddp": [], "deepspeed": ["--engine.kind", "deepspeed"]}
EPOCHS = 16  # of the recipes' 30, so that all four end within two minutes
EXPECTED = 95.0  # top-1 in percent; all reach more than 97


def main() -> int:
    """Prepare the data, train four runs, and print their table; returns 1 if an accuracy is too low."""
    keep_current_folder_off_path()
    folder = Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    _widemix("prep", "digits", "--to", str(DATA))
    table = Table(title="Handwritten digits, two ranks on this machine, 360 test images")
    for name in ("model", "engine"):
        table.add_column(name)
    for name in ("test top-1", "seconds", "last loss relative to DDP"):
        table.add_column(name, justify="right")
    worst = 100.0
    for model in MODELS:
        losses = {}
        for engine, options in ENGINES.items():
            run = folder / f"{model}-{engine}"
            recipe = f"recipes/digits/{model}.yaml"
            _widemix("train", recipe, "--ranks", "2", "--run-dir", str(run), "--train.epochs", str(EPOCHS), *options)
            done = json.loads((run / "done.json").read_text())
            losses[engine] = _lines(run, "train")[-1]["loss"]
            drift = f"{losses[engine] / losses['ddp'] - 1:+.1e}" if engine != "ddp" else ""
            table.add_row(model, engine, f"{done['top1']:.2f} %", f"{done['seconds']:.1f}", drift)
            worst = min(worst, done["top1"])
    _plot(folder)
    console = Console()
    console.print(table)
    console.print(f"Figure: {folder}/curves.png", highlight=False, soft_wrap=True)
    console.print(f"In TensorBoard: .venv/bin/tensorboard --logdir {folder}", highlight=False, soft_wrap=True)
    if worst < EXPECTED:
        console.print(f"{worst:.2f} % is below {EXPECTED:g} %, which every run should reach", style="red")
        return 1
    return 0


def _widemix(*words: str) -> None:
    print(f"\n$ widemix {shlex.join(words)}", flush=True)
    command = [sys.executable, "-m", "widemix", *words]
    code = subprocess.run(command, check=False, preexec_fn=end_with_parent()).returncode
    if code:
        sys.exit(code)


def _lines(run: Path, split: str) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


@styled
def _plot(folder: Path) -> None:
    """Plot training loss and test accuracy of the four runs; DeepSpeed's dashed lines should cover DDP's."""
    figure, panels = new_figure(9, 3.2, columns=2)
    colors = dict(zip(MODELS, COLORS, strict=False))
    styles: dict[str, dict] = {"ddp": {"lw": 2.2, "alpha": 0.45}, "deepspeed": {"lw": 1, "ls": (0, (4, 3))}}
    for model in MODELS:
        for engine in ENGINES:
            for panel, split, value in zip(panels, ("train", "eval"), ("loss", "top1"), strict=True):
                lines = _lines(folder / f"{model}-{engine}", split)
                points = [line["epoch"] for line in lines], [line[value] for line in lines]
                panel.plot(*points, color=colors[model], label=f"{model}, {engine}", **styles[engine])
    panels[0].set(xlabel="epoch", ylabel="training loss (mixup, smoothing)")
    panels[1].set(xlabel="epoch", ylabel="test top-1, %", ylim=(85, 100))
    panels[1].legend(loc="lower right")
    for panel in panels:
        panel.set_xlim(left=0)
        panel.margins(x=0)
    save(figure, [folder / "curves.png"])


if __name__ == "__main__":
    sys.exit(main())

"""Studies on the digits with results that no training has made, and what is drawn of them."""

import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from tests.conftest import System
from widemix.errors import Exit
from widemix.recipe import Recipe, dump_recipe, load_recipe, recipe_hash
from widemix.studies.plan import Plan, make_plan
from widemix.studies.rows import Row, Table
from widemix.studies.study import read_study, study_runs_of
from widemix.studies.study_run import StudyRun

TWO = """
title: t
source: s
runs:
- label: Normal
  recipes: {Digits: digits/s_mixer}
  axes: {model.channels: [8, 16]}
figure: {x: width}
"""
WIDTHS = """
title: Widths
source: a paper, figure 1
claim: Wider is better.
seeds: [0, 1, 2]
runs:
- label: Normal
  recipes: {Digits: digits/s_mixer}
  axes: {model.channels: [8, 16]}
- label: RP
  recipes: {Digits: digits/rp_s_mixer}
  axes: {model.channels: [8, 16]}
  seeded: [model.permutation_seed]
figure: {x: width}
published:
- {source: figure 1, line: Normal, points: [[128, 30, 1.5]], digitised: true}
"""
CLAIMS = """
title: t
source: s
seeds: [0, 1, 2, 3]
runs:
- label: Normal
  recipes: {Digits: digits/s_mixer}
  axes: {model.depth: [2, 4]}
- label: RP
  recipes: {Digits: digits/rp_s_mixer}
  axes: {model.depth: [2, 4]}
figure: {x: model.depth}
claims:
- text: RP has a higher error at depth 2
  left: {line: RP, at: {model.depth: 2}}
  right: {line: Normal, at: {model.depth: 2}}
  expect: greater
  margin: 0.5
- {text: as good on average, left: {line: RP}, right: {line: Normal}, expect: equal, margin: 1.5}
- {text: deeper is better, slope: {line: Normal}, expect: less}
"""
UNSEARCHED = """
title: t
source: s
seeds: [0, 1, 2]
set: {eval.every_epochs: 1000}
runs:
- label: Normal
  recipes: {Digits: digits/s_mixer}
  axes: {model.channels: [8, 16]}
- label: RP
  recipes: {Digits: digits/rp_s_mixer}
  seeded: [model.permutation_seed]
figure: {x: width}
"""
SEARCH = "search: {keys: {optim.lr: {low: 0.001, high: 0.256}}, trials: 3, widen: 3, set: {train.epochs: 3}}\n"
RATES = UNSEARCHED.replace("runs:", f"{SEARCH}runs:")


def plan_of(folder: Path, text: str, table: str = "study.jsonl", name: str = "study.yaml") -> Plan:
    """The plan of a study that is written there."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return make_plan(folder / name, read_study(folder / name), Table(folder / table))


def runs_of(folder: Path, text: str, overrides: Sequence[tuple[str, str]] = (), only: str = "*") -> list[StudyRun]:
    path = folder / "study.yaml"
    path.write_text(text)
    return study_runs_of(path, read_study(path), overrides, only)


def row_of(study_run: StudyRun, top1: float | None, **values) -> Row:
    """The row of a run that has ended; without a top-1 it has diverged."""
    state, seed = "diverged" if top1 is None else "done", study_run.recipe.train.seed
    given = {"run": study_run.name, "recipe": "", "state": state, "seed": seed, "split": "test", "epochs": 3}
    given |= {"metrics": {"top1": top1, "loss": 1.0}, "seconds": 1.0, "core_seconds": None, "images_per_s": None}
    return Row(**given | {"commit": "c", "machine": "m", "host": "h", "date": "d"} | values)


def leave_run(run: Path, recipe: Recipe, top1: float | None = 50.0, done: bool = True) -> Path:
    """Write a run's folder as its training leaves it."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "recipe.yaml").write_text(dump_recipe(recipe))
    (run / "environment.json").write_text(json.dumps({"host": "n1", "device": "cpu", "commit": 40 * "c"}))
    (run / "metrics.jsonl").write_text('{"split": "eval", "step": 1, "epoch": 1.0, "loss": 1.0, "top1": 50.0}\n')
    if done:
        ended = {"top1": top1, "loss": 1.0, "step": 1, "seconds": 2.0, "recipe": recipe_hash(recipe)}
        (run / "done.json").write_text(json.dumps(ended))
    return run


def train(study_run: StudyRun, folder: Path, top1: float | None = 50.0, done: bool = True) -> Path:
    return leave_run(folder / study_run.name, study_run.recipe, top1, done)


class Trained:
    """In place of a process that trains a run: it has ended with the top-1 that a function of the recipe says."""

    pid, top1_of = 1 << 30, staticmethod(lambda recipe: 50.0)
    names: ClassVar[list[str]] = []  # of all runs so far
    stop_at: ClassVar[int | None] = None  # how many are trained before one stops its runner

    def __init__(self, command: Sequence[str], **_):
        at = command.index("--run-dir")
        self.code: int = Exit.DONE
        if len(self.names) == self.stop_at:
            self.code = Exit.REQUEUE
            os.kill(os.getpid(), signal.SIGTERM)
            return
        keys = [tuple(word[2:].split("=", 1)) for word in command[at:] if "=" in word]
        recipe = load_recipe(Path(command[at - 1]), keys)
        self.names.append(leave_run(Path(command[at + 1]), recipe, self.top1_of(recipe)).name)

    def poll(self) -> int:
        return self.code

    def send_signal(self, number: int) -> None:
        """It has ended."""


@pytest.fixture
def trained(system: System) -> type[Trained]:
    """All that is trained ends at once."""

    class Own(Trained):
        names: ClassVar[list[str]] = []

    system({"subprocess.Popen": Own, "time.sleep": lambda seconds: None})
    return Own


@pytest.fixture
def figures(system: System) -> list[Figure]:
    """All that is saved of matplotlib; its files are empty."""
    found: list[Figure] = []
    system({"matplotlib.figure.Figure.savefig": lambda figure, *_, **__: found.append(figure)})
    return found


def drawn(figure: Figure) -> str:
    """What a figure shows, as text: a paragraph for each panel, a line for what is plotted there."""

    def at(points) -> str:
        return " ".join(f"({x:.5g}, {y:.5g})" for x, y in np.asarray(points, float))

    lines = []
    for ax in figure.axes:
        place = ax.get_subplotspec()
        lines += ["", f"{ax.get_title().strip()} at {place.rowspan.start}, {place.colspan.start}"]
        lines.append(f"x: {ax.get_xlabel()}, {ax.get_xscale()}; y: {ax.get_ylabel()}, {ax.get_yscale()}")
        ticks = [tick.get_text() or f"{at:g}" for tick, at in zip(ax.get_xticklabels(), ax.get_xticks(), strict=True)]
        lines += [f"ticks: {', '.join(ticks)}"] if len(ticks) <= 2 else []
        lines += ["begins at 0"] if ax.get_ylim()[0] == 0 else []
        for line in ax.lines:
            style = f"{line.get_color()} {line.get_linestyle()} {line.get_marker()}"
            lines.append(f"{line.get_label().strip()}: {style}: {at(line.get_xydata())}")
        for one in ax.collections:
            kind = "bar" if isinstance(one, LineCollection) else "band"
            lines += [f"{kind}: {at(path.vertices)}" for path in one.get_paths()]
        lines += [f"{text.get_text()!r} {text.get_position()}, {text.xy}" for text in ax.texts]
    for legend in figure.legends:
        lines += ["", f"legend: {'; '.join(text.get_text().strip() for text in legend.get_texts())}"]
    return re.sub(r"_child\d+", "_", "\n".join(lines[1:])) + "\n"

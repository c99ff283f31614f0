"""Weights & Biases and MLflow, fed with the lines of metrics.jsonl. Their own variables say where the lines go.

A run that continues goes on under the id in RUN/trackers.json. Lines after a checkpoint that a start repeats are
there twice: neither takes lines back.
"""

import json
import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import InputError
from pipeline.files import atomic_write
from pipeline.recipe import Recipe, flat_recipe
from pipeline.recipe.train import LogSection

NOT_FIGURES = ("step", "epoch", "split", "time")
_FILE = "trackers.json"


class Tracker(Protocol):
    """Where the figures of a run are sent, besides its folder. `id` is the run's there."""

    id: str

    def __init__(self, run_dir: Path, name: str, recipe: Recipe, known: str | None):
        """Open the run, anew or, where its id is `known`, again."""

    def add_line(self, line: dict[str, Any]) -> None:
        """Send the figures of a line."""

    def close(self, failed: bool) -> None:
        """Send what is left, and end the run."""


def figures_of(line: dict[str, Any]) -> dict[str, float]:
    """The figures of a line of metrics.jsonl, such as train/loss; none of an event."""
    known = line.items() if line["split"] != "event" else ()
    return {
        f"{line['split']}/{name}": value
        for name, value in known
        if name not in NOT_FIGURES and isinstance(value, (int, float))
    }


class _WandB:
    def __init__(self, run_dir: Path, name: str, recipe: Recipe, known: str | None):
        import wandb

        os.environ.setdefault("WANDB_PROJECT", "widemix")
        quiet = wandb.Settings(console="off")  # neither read nor wrap the terminal
        self._run = wandb.init(
            dir=run_dir, name=name, id=known, resume="allow", config=flat_recipe(recipe), settings=quiet
        )
        self._run.define_metric("*", step_metric="step")
        self.id = self._run.id

    def add_line(self, line: dict[str, Any]) -> None:
        if figures := figures_of(line):
            self._run.log({**figures, "step": line["step"], "epoch": line.get("epoch")})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _MLflow:
    def __init__(self, run_dir: Path, name: str, recipe: Recipe, known: str | None):
        import mlflow
        from mlflow.entities import Param

        os.environ.setdefault("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
        self._client = mlflow.MlflowClient()
        if known is None:
            title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "widemix")
            experiment = self._client.get_experiment_by_name(title)
            number = experiment.experiment_id if experiment else self._client.create_experiment(title)
            self.id = self._client.create_run(number, run_name=name).info.run_id
            params = [Param(key, str(value)) for key, value in flat_recipe(recipe).items()]
            self._client.log_batch(self.id, params=params)
        else:
            self.id = known
            self._client.update_run(known, "RUNNING")

    def add_line(self, line: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        at = round(1000 * line.get("time", time.time()))
        metrics = [Metric(name, value, at, line["step"]) for name, value in figures_of(line).items()]
        self._client.log_batch(self.id, metrics=metrics, synchronous=False)  # training does not wait for a server

    def close(self, failed: bool) -> None:
        import mlflow

        mlflow.flush_async_logging()
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


_TRACKERS: dict[str, type[Tracker]] = {"wandb": _WandB, "mlflow": _MLflow}


def check_trackers(section: LogSection) -> None:
    """`InputError` where log.wandb or log.mlflow is on and its package is not installed."""
    for name in _TRACKERS:
        if getattr(section, name) and find_spec(name) is None:
            raise InputError(f"log.{name} true: {name} is not installed; pip install 'widemix[{name}]'")


def open_trackers(section: LogSection, run_dir: Path, recipe: Recipe) -> list[Tracker]:
    """Open those that a recipe asks for; `InputError` with the first line of why one cannot be."""
    path = run_dir / _FILE
    known = json.loads(path.read_text()) if path.exists() else {}
    opened = []
    for name, tracker in _TRACKERS.items():
        if getattr(section, name):
            try:
                opened.append(tracker(run_dir, run_dir.name, recipe, known.get(name)))
            except Exception as error:  # of any kind: no server, no key, no right
                reason = str(error).strip().partition("\n")[0]
                raise InputError(f"log.{name} true: it cannot be opened ({reason}); set it to false") from None
            known[name] = opened[-1].id
    if opened:
        atomic_write(path, json.dumps(known) + "\n")
    return opened

"""Weights & Biases and MLflow, fed with the lines of metrics.jsonl. Their own variables say where the lines go.

A run that continues goes on under the id in RUN/trackers.json, and sends first what a start before it could not send
before it was killed; what is there is not sent again. Neither takes lines back: those of steps that were rolled back
stay there.
"""

import json
import os
import re
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol

from widemix.errors import InputError, install_extra
from widemix.files import atomic_write, parse_json, read_regular
from widemix.recipe import Recipe, flat_recipe
from widemix.recipe.sections import LogSection

if TYPE_CHECKING:
    from widemix.run.run_dir import Run

NOT_METRICS = ("step", "epoch", "split", "time")
_FILE = "trackers.json"
_OPEN_S, _CLOSE_S = 30.0, 20.0  # how long a run waits for a server: Slurm kills a job 30 s after its time limit
_RETRY_S = 5.0
_OF_A_FOLDER = ("entity", "project", "mode", "disabled")  # settings of W&B that the current folder may have
_AT_ONCE = 1000  # metrics that MLflow takes in a request


class Tracker(Protocol):
    """Where the metrics of a run are sent, besides its folder. `id` is the run's there."""

    id: str

    def __init__(self, run_dir: Path, name: str, recipe: Recipe, known: str | None):
        """Open the run, anew or, where its id is `known`, again."""

    def add_line(self, line: dict[str, Any]) -> None:
        """Send the metrics of a line."""

    def close(self, failed: bool) -> str | None:
        """Send what is left, and end the run. Returns what could not be sent, if anything."""


def metrics_of(line: dict[str, Any]) -> dict[str, float]:
    """The metrics of a line of metrics.jsonl, such as train/loss; none of an event."""
    known = line.items() if line["split"] != "event" else ()
    return {
        f"{line['split']}/{name}": value
        for name, value in known
        if name not in NOT_METRICS and isinstance(value, (int, float))
    }


class _Once:
    """Sends each step of a split once, and again after a rollback."""

    _has: dict[str, float]  # the last step that is there or on its way, by split

    def _send(self, line: dict[str, Any]) -> None:
        raise NotImplementedError

    def _send_missing(self, path: Path) -> None:
        """Send the lines that a start before this one wrote, and could not send before it was killed."""
        for text in read_regular(path).splitlines() if path.exists() else ():
            with suppress(ValueError):  # the last line of a run that was killed while writing
                self._send_new(parse_json(text))

    def add_line(self, line: dict[str, Any]) -> None:
        if line.get("event") == "rollback":
            self._has.clear()  # the steps after it have other values
        self._send_new(line)

    def _send_new(self, line: dict[str, Any]) -> None:
        if line["step"] > self._has.get(line["split"], -1):
            self._has[line["split"]] = line["step"]
            self._send(line)


class _WandB(_Once):
    def __init__(self, run_dir: Path, name: str, recipe: Recipe, known: str | None):
        import wandb

        os.environ.setdefault("WANDB_PROJECT", "widemix")
        quiet = wandb.Settings(
            console="off",  # neither read nor wrap the terminal
            init_timeout=_OPEN_S,
            finish_timeout=_CLOSE_S,
            max_end_of_run_history_metrics=0,
            max_end_of_run_summary_metrics=0,
            x_transaction_log_flush_interval=1.0,  # a killed run loses what is not yet in the file
        )
        self._run = wandb.init(
            dir=run_dir, name=name, id=known, resume="allow", config=flat_recipe(recipe), settings=quiet
        )
        self._run.define_metric("*", step_metric="step")
        self.id = self._run.id
        self._has = _steps_at_wandb(run_dir / "wandb", known, self._run.starting_step) if known else {}
        if self._has:
            self._send_missing(run_dir / "metrics.jsonl")

    def _send(self, line: dict[str, Any]) -> None:
        if metrics := metrics_of(line):
            self._run.log({**metrics, "step": line["step"], "epoch": line.get("epoch")})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))  # prints itself what it could not send


def _steps_at_wandb(folder: Path, number: str, online: int) -> dict[str, float]:
    """Return each split's last step in W&B's files of a run, of which the server has the first `online` rows.

    Returns nothing where there are no files.
    """
    files = [path for path in folder.glob(f"*run-*/run-{number}.wandb") if path.parent.name != "latest-run"]
    files.sort(key=lambda path: path.parent.name.removeprefix("offline-"))  # run-DATE_TIME-ID
    rows = [
        row
        for path in files
        for row in _wandb_rows(path.read_bytes())
        if row["_step"] < online or path.parent.name.startswith("offline-")
    ]
    # What came before the first row is in files that were sent and deleted since.
    before = (rows[0]["step"] if rows else 0) - 1
    return dict.fromkeys(("train", "eval") if files else (), before) | {
        name.partition("/")[0]: row["step"] for row in rows for name in row if "/" in name
    }


def _wandb_rows(data: bytes) -> Iterator[dict[str, Any]]:
    """The rows of a .wandb file: a header of 7 bytes, then LevelDB's log format, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined,unused-ignore]

    place, record = 7, b""
    while place + 7 <= len(data):
        if (left := -place % 32768) < 7:
            place += left
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)  # after the checksum
        place += 7 + size
        record += data[place - size : place]
        if kind in (1, 4) and place <= len(data):  # whole, or the last part
            items = Record.FromString(record).history.item
            if row := {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}:
                yield row
            record = b""


class _MLflow(_Once):
    """Sends lines in a thread of its own, again and again until the server takes them: training does not wait for it.

    MLflow's own queue gives each line up after four minutes, and the end of a run waits for all of them.
    """

    def __init__(self, run_dir: Path, name: str, recipe: Recipe, known: str | None):
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # some 10 s
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(round(_OPEN_S)))
        import mlflow
        from mlflow.entities import Param

        os.environ.setdefault("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
        self._client = mlflow.MlflowClient()
        self._has = {}
        self._lines: SimpleQueue[Any] = SimpleQueue()  # lines, then the run's status
        self._reason = "the server is slow"
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
            for split in ("train", "eval"):
                history = self._client.get_metric_history(self.id, f"{split}/loss")
                self._has[split] = max(((metric.timestamp, metric.step) for metric in history), default=(0, -1))[1]
            self._send_missing(run_dir / "metrics.jsonl")
        self._thread = Thread(target=self._send_lines, name="MLflow", daemon=True)
        self._thread.start()

    def _send(self, line: dict[str, Any]) -> None:
        self._lines.put(line)

    def _send_lines(self) -> None:
        status = None
        while status is None:
            lines = [self._lines.get()]
            while not self._lines.empty():
                lines.append(self._lines.get())
            status = lines.pop() if isinstance(lines[-1], str) else None
            metrics = [metric for line in lines for metric in _mlflow_metrics(line)]
            for place in range(0, len(metrics), _AT_ONCE):
                self._insist(partial(self._client.log_batch, self.id, metrics[place : place + _AT_ONCE]))
        self._insist(partial(self._client.set_terminated, self.id, status))

    def _insist(self, request: Callable[[], Any]) -> None:
        while True:
            try:
                request()
            except Exception as error:
                self._reason = _reason(error)
                time.sleep(_RETRY_S)
            else:
                return

    def close(self, failed: bool) -> str | None:
        self._lines.put("FAILED" if failed else "FINISHED")
        self._thread.join(_CLOSE_S)
        return f"log.mlflow: the last lines were not sent ({self._reason})" if self._thread.is_alive() else None


def _mlflow_metrics(line: dict[str, Any]) -> list[Any]:
    from mlflow.entities import Metric

    at = round(1000 * line.get("time", time.time()))
    return [Metric(name, value, at, line["step"]) for name, value in metrics_of(line).items()]


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


_TRACKERS: dict[str, type[Tracker]] = {"wandb": _WandB, "mlflow": _MLflow}


def check_trackers(section: LogSection) -> None:
    """`InputError` where log.tensorboard, log.wandb or log.mlflow is on and its package is not installed; also
    where the current folder has settings of Weights & Biases that are not for a folder to say."""
    for name in ("tensorboard", *_TRACKERS):
        if getattr(section, name) and find_spec(name) is None:
            install = install_extra(name) if name in _TRACKERS else f"pip install {name}"
            raise InputError(f"log.{name} true: {name} is not installed; {install}, or set it to false")
    if section.wandb:
        _check_wandb_settings()


def _check_wandb_settings() -> None:
    """`InputError` where the current folder, a stranger's perhaps, says to which server the user's key is sent."""
    for path in (Path("wandb/settings"), Path(".wandb/settings")):
        for line in read_regular(path).decode(errors="replace").splitlines() if path.exists() else ():
            key = re.split("[=:]", line)[0].strip()
            if key and key[0] not in "[#;" and key not in _OF_A_FOLDER:
                cure = "set WANDB_BASE_URL and the like, or ~/.config/wandb/settings, and remove the line"
                raise InputError(f"{path}: sets {key}, and the current folder may be a stranger's; {cure}")


def open_trackers(run: "Run") -> list[Tracker]:
    """Open those that a recipe asks for. Where one cannot be opened, a run is trained without it, with a warning."""
    path = run.folder / _FILE
    known = parse_json(read_regular(path)) if path.exists() else {}
    opened = []
    for name, tracker in _TRACKERS.items():
        if getattr(run.recipe.log, name):
            try:
                opened.append(tracker(run.folder, run.folder.name, run.recipe, known.get(name)))
            except Exception as error:  # of any kind: no server, no key, no right
                run.warn(f"log.{name} true: it cannot be opened ({_reason(error)}); training without it")
            else:
                known[name] = opened[-1].id
    if opened:
        atomic_write(path, json.dumps(known) + "\n")
    return opened

"""Weights & Biases and MLflow, both without a network: what they hold is what metrics.jsonl has."""

import io
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT
from tests.run.saved import run_of
from widemix.errors import InputError
from widemix.recipe import flat_recipe, load_recipe
from widemix.run.metrics import MetricsWriter
from widemix.run.trackers import check_trackers, metrics_of, open_trackers

LINES = [
    {"step": 10, "epoch": 0.5, "split": "train", "loss": 2.5, "lr": 0.1, "time": 100.0},
    {"step": 10, "split": "event", "event": "step_skipped", "loss": "nan", "grad_norm": 1.0, "time": 100.5},
    {"step": 20, "epoch": 1.0, "split": "train", "loss": 1.25, "lr": 0.05, "data_wait": 0.0, "time": 101.0},
    {"step": 20, "epoch": 1.0, "split": "eval", "loss": 1.5, "top1": 60.0, "time": 102.0},
]


REFUSED = "log.wandb true: it cannot be opened (no server); training without it"


def recipe_with(name: str):
    return load_recipe(ROOT / "recipes/digits/mixer.yaml", [(f"log.{name}", "true")])


def write(folder: Path, name: str, lines: list[dict], step: int = 0) -> str:
    """Write lines as a run does; returns the id that the run has there."""
    writer = MetricsWriter(folder, step, tensorboard=False, trackers=opened(folder, name))
    for line in lines:
        assert writer.write(line) is None
    assert writer.close() == []
    return json.loads((folder / "trackers.json").read_text())[name]


def records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    place, whole = 7, b""
    while place + 7 <= len(data):
        if (left := -place % 32768) and left < 7:
            place += left
        size, kind = struct.unpack_from("<HB", data, place + 4)  # after the checksum
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4) and place <= len(data):  # whole, or the last part
            yield whole
            whole = b""


def test_the_metrics_of_a_line():
    assert metrics_of(LINES[3]) == {"eval/loss": 1.5, "eval/top1": 60.0}
    assert metrics_of(LINES[1]) == {}
    assert metrics_of({"split": "train", "replaced": 3, "loss": None}) == {"train/replaced": 3}


@pytest.mark.parametrize(
    ("name", "package"),
    [("wandb", f"'{ROOT}[wandb]'"), ("mlflow", f"'{ROOT}[mlflow]'"), ("tensorboard", "tensorboard")],
)
def test_a_package_that_is_not_installed_is_named(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError) as raised:
        check_trackers(recipe_with(name).log)
    assert str(raised.value).startswith(f"log.{name} true: {name} is not installed; pip install {package}, or set it")
    check_trackers(load_recipe(ROOT / "recipes/digits/mixer.yaml", [("log.tensorboard", "false")]).log)


@pytest.mark.parametrize("folder", ["wandb", ".wandb"])
def test_no_key_is_sent_to_a_server_of_strangers(folder, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="Weights & Biases is not installed: pip install 'widemix[wandb]'")
    monkeypatch.chdir(tmp_path)
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "settings").write_text("[default]\n# ours\nproject = own\nentity: us\n")
    check_trackers(recipe_with("wandb").log)
    (tmp_path / folder / "settings").write_text("[default]\nproject = own\n base_url = http://theirs\n")
    with pytest.raises(InputError, match=rf"^{folder}/settings: sets base_url, and the current folder may be"):
        check_trackers(recipe_with("wandb").log)


class Server:
    """Both packages with one server: the calls that it had; of a metric its name and step."""

    def __init__(self, monkeypatch):
        self.calls, self.down, self.refuses, self.experiment, self.history = [], 0, [], None, {}
        self.ends = Event()
        self.ends.set()
        metric = lambda name, value, at, step: (name, step)  # noqa: E731
        entities = SimpleNamespace(Param=lambda key, value: (key, value), Metric=metric)
        monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda: self))
        monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
        wandb = SimpleNamespace(Settings=lambda **_: None, init=self.init)
        monkeypatch.setitem(sys.modules, "wandb", wandb)

    def get_experiment_by_name(self, title):
        self.calls.append(("experiment", title))
        return self.experiment and SimpleNamespace(experiment_id=self.experiment)

    def create_experiment(self, title):
        return f"new {title}"

    def create_run(self, experiment, run_name):
        if "mlflow" in self.refuses:
            raise ConnectionError("\nno server\nand a long story")
        self.calls.append(("run", experiment, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="mlflow 1"))

    def get_metric_history(self, number, name):
        return [SimpleNamespace(timestamp=at, step=step) for at, step in self.history.get(name, ())]

    def update_run(self, number, status):
        self.calls.append((number, status))

    def log_batch(self, number, metrics=(), params=()):
        if self.down:
            self.down -= 1
            raise ConnectionError("no server\nand a long story")
        self.calls.append((number, *metrics, *(["recipe"] if len(params) > 50 else [])))

    def set_terminated(self, number, status):
        assert self.ends.wait(60)
        self.calls.append((number, status))

    def init(self, **options):
        if "wandb" in self.refuses:
            raise self.refuses[-1]("\nno server\nand a long story")
        self.calls.append({name: options[name] for name in ("id", "name", "dir", "resume")})
        return SimpleNamespace(
            id="wandb 1", starting_step=0, define_metric=lambda *_, **__: None, log=self.calls.append,
            finish=lambda exit_code: self.calls.append(exit_code),
        )  # fmt: skip


@pytest.fixture
def server(monkeypatch, system):
    system({"os.environ": dict(os.environ), "time.sleep": lambda seconds: None})
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT"):
        os.environ.pop(name, None)
    return Server(monkeypatch)


def opened(folder: Path, *names: str, warnings: Sequence[str] = ()):
    with redirect_stderr(io.StringIO()) as said:
        trackers = open_trackers(run_of(folder, **{f"log__{name}": "true" for name in names}))
    assert [line.removeprefix("warning: ") for line in said.getvalue().splitlines()] == [*warnings]
    return trackers


def test_each_tracker_is_opened_again_by_its_own_id(tmp_path, server):
    """Whatever became of the other."""
    for kinds, refuses, known in (
        (["mlflow"], ["wandb", ConnectionError], {"mlflow": "mlflow 1"}),
        (["wandb", "mlflow"], [], {"mlflow": "mlflow 1", "wandb": "wandb 1"}),
        (["wandb", "mlflow"], [], {"mlflow": "mlflow 1", "wandb": "wandb 1"}),
    ):
        server.refuses = refuses
        trackers = opened(tmp_path, "wandb", "mlflow", warnings=[REFUSED] * bool(refuses))
        assert [tracker.close(failed=False) for tracker in trackers] == [None] * len(kinds)
        assert [tracker.id for tracker in trackers] == [f"{kind} 1" for kind in kinds]
        assert json.loads((tmp_path / "trackers.json").read_text()) == known
    inits = [call for call in server.calls if isinstance(call, dict)]
    own = {"name": tmp_path.name, "dir": tmp_path, "resume": "allow"}
    assert inits == [{"id": None, **own}, {"id": "wandb 1", **own}]
    assert server.calls.count(("mlflow 1", "RUNNING")) == 2
    assert server.calls[0] == ("experiment", "widemix")
    assert opened(tmp_path) == []


@pytest.mark.parametrize(("there", "number"), [("7", "7"), (None, "new mine")])
def test_a_new_run_of_mlflow_is_one_of_its_experiment(server, tmp_path, there, number):
    os.environ |= {"MLFLOW_EXPERIMENT_NAME": "mine", "MLFLOW_TRACKING_URI": "http://server"}
    server.experiment = there
    (tracker,) = opened(tmp_path, "mlflow")
    tracker.close(failed=True)
    created = ("run", number, tmp_path.name)
    assert server.calls == [("experiment", "mine"), created, ("mlflow 1", "recipe"), ("mlflow 1", "FAILED")]
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://server"


@pytest.mark.parametrize("down", [True, False])
def test_the_end_of_a_run_waits_for_no_server(server, tmp_path, system, down):
    """One that is gone, or slow; it gets the rest when it is back."""
    join, began = threading.Thread.join, time.monotonic()
    system({"threading.Thread.join": lambda thread, seconds=None: join(thread, seconds and seconds / 100)})
    (tracker,) = opened(tmp_path, "mlflow")
    server.ends.clear()
    server.down = 10**9 if down else 0
    tracker.add_line(LINES[0])
    while down and server.down == 10**9:
        pass
    why = "no server" if down else "the server is slow"
    assert tracker.close(failed=False) == f"log.mlflow: the last lines were not sent ({why})"
    assert time.monotonic() - began < 15
    server.down = 0
    server.ends.set()
    for thread in threading.enumerate():
        if thread.name == "MLflow":
            join(thread, 60)
    assert server.calls[-2:] == [("mlflow 1", ("train/loss", 10), ("train/lr", 10)), ("mlflow 1", "FINISHED")]


def test_mlflow_is_sent_each_step_again_after_a_rollback(server, tmp_path):
    (tmp_path / "trackers.json").write_text('{"mlflow": "mlflow 1"}')
    server.history = {"train/loss": [(1, 10)]}
    (tracker,) = opened(tmp_path, "mlflow")
    rollback = {"step": 5, "split": "event", "event": "rollback"}
    for line in [*LINES, LINES[2], rollback, LINES[0], LINES[3]]:
        tracker.add_line(line)
    assert tracker.close(failed=False) is None
    sent = [each for _, *batch in server.calls[1:-1] for each in batch if each[0].endswith("loss")]
    assert sent == [("train/loss", 20), ("eval/loss", 20), ("train/loss", 10), ("eval/loss", 20)]


def test_mlflow_is_sent_what_an_earlier_start_could_not(server, tmp_path):
    """In parts, until the server takes it; of each split from the step that was sent last."""
    places = [("train", 4), ("eval", 4), ("eval", 8), *(("train", step) for step in range(8, 3000))]
    lines = [json.dumps({"split": split, "step": step, "loss": 1.0}) for split, step in places]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 25, "spl']))
    (tmp_path / "trackers.json").write_text('{"mlflow": "run 3"}')
    server.history, server.down = {"train/loss": [(1, 4)], "eval/loss": [(1, 8), (2, 4)]}, 3
    (tracker,) = opened(tmp_path, "mlflow")
    assert tracker.close(failed=False) is None
    assert (server.calls[0], server.calls[-1]) == (("run 3", "RUNNING"), ("run 3", "FINISHED"))
    sent = [batch for _, *batch in server.calls[1:-1]]
    assert [each for batch in sent for each in batch] == [(f"{split}/loss", step) for split, step in places[2:]]
    assert all(len(batch) <= 1000 for batch in sent)
    assert os.environ["MLFLOW_TRACKING_URI"] == "sqlite:///mlflow.db"


@pytest.mark.parametrize("project", ["mine", None])
def test_wandb_gets_both_splits_and_how_the_run_ended(tmp_path, server, project):
    os.environ |= {"WANDB_PROJECT": project} if project else {}
    for failed in (False, True):
        (tracker,) = opened(tmp_path, "wandb")
        for line in LINES:
            tracker.add_line(line)
        tracker.close(failed=failed)
        assert server.calls[1:] == [*wandb_rows(LINES), int(failed)]
        server.calls.clear()
    assert os.environ["WANDB_PROJECT"] == (project or "widemix")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")  # MLflow 3.17's, on SQLAlchemy 2.1
def test_mlflow_has_every_figure_and_the_recipe(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'widemix[mlflow]'")
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    run_dir = tmp_path / "first"
    run_dir.mkdir()
    number = write(run_dir, "mlflow", LINES[:2])
    assert write(run_dir, "mlflow", LINES[2:], step=10) == number
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run = client.get_run(number)
    assert run.info.run_name == "first"
    assert run.info.status == "FINISHED"
    loss = client.get_metric_history(number, "train/loss")
    assert [(each.step, each.value, each.timestamp) for each in loss] == [(10, 2.5, 100_000), (20, 1.25, 101_000)]
    assert run.data.metrics == {
        "train/loss": 1.25, "train/lr": 0.05, "train/data_wait": 0.0, "eval/loss": 1.5, "eval/top1": 60.0
    }  # fmt: skip
    assert run.data.params == {name: str(value) for name, value in flat_recipe(recipe_with("mlflow")).items()}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
def test_mlflow_gets_what_a_killed_start_could_not_send(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'widemix[mlflow]'")
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    number = write(tmp_path, "mlflow", LINES[:2])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in LINES[2:])
        file.write('{"step": 25, "spl')
    rollback = {"step": 20, "split": "event", "event": "rollback", "time": 103.0}
    again = {**LINES[2], "time": 102.5}  # MLflow drops what has the same time too
    write(tmp_path, "mlflow", [again, rollback, {**LINES[2], "loss": 3.5, "time": 104.0}], step=10)
    history = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_metric_history
    assert [(each.step, each.value) for each in history(number, "train/loss")] == [(10, 2.5), (20, 1.25), (20, 3.5)]
    assert [(each.step, each.value) for each in history(number, "eval/loss")] == [(20, 1.5)]


def wandb_has(folder: Path, number: str) -> tuple[list[dict], dict[str, object]]:
    """The rows of all starts of a run, and its config, by W&B's own format of records."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # a run's end does not wait for its file
    rows, config = [], {}
    for path in sorted(folder.glob(f"wandb/offline-run-*/run-{number}.wandb")):
        for record in map(Record.FromString, records(path.read_bytes())):
            if record.HasField("history"):
                row = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
                rows.append({name: value for name, value in row.items() if name[0] != "_"})
            for item in [*record.run.config.update, *record.config.update]:
                config[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    return rows, config


def wandb_rows(lines: list[dict]) -> list[dict]:
    wanted = [line for line in lines if line["split"] != "event"]
    return [{**metrics_of(line), "step": line["step"], "epoch": line["epoch"]} for line in wanted]


@pytest.mark.long
def test_wandb_has_every_figure_and_the_recipe(tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb", reason="Weights & Biases is not installed: pip install 'widemix[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    number = write(tmp_path, "wandb", LINES)
    assert write(tmp_path, "wandb", []) == number
    printed = "".join(capfd.readouterr())
    assert "history" not in printed
    assert "summary" not in printed
    rows, config = wandb_has(tmp_path, number)
    assert rows == wandb_rows(LINES)
    assert config["optim.lr"] == 0.004


KILLED = """
import os, signal, sys, time
from pathlib import Path
from tests.run.test_trackers import LINES, MetricsWriter, opened

folder, sent, lost, step = Path(sys.argv[1]), *map(int, sys.argv[2:])
writer = MetricsWriter(folder, step, False, opened(folder, "wandb"))
for number, line in enumerate(LINES[:lost]):
    if number == sent:
        time.sleep(1.5)
    if line["step"] > step:
        writer.write(line)
os.killpg(0, signal.SIGKILL)  # and W&B's own process, which may write for some time after
"""


@pytest.mark.long
@pytest.mark.parametrize(("sent", "lost"), [(0, 1), (1, 3)])
def test_wandb_has_each_line_of_a_killed_run_once(tmp_path, monkeypatch, sent, lost):
    """Killed right after a line, whose checkpoint is complete; and again before it has sent anything."""
    pytest.importorskip("wandb", reason="Weights & Biases is not installed: pip install 'widemix[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    reached = LINES[lost - 1]["step"]
    for numbers in ((sent, lost, 0), (0, 0, reached)):
        arguments = [str(tmp_path), *map(str, numbers)]
        environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
        command = [sys.executable, "-c", KILLED, *arguments]
        process = subprocess.run(command, cwd=ROOT, env=environment, check=False, start_new_session=True)
        assert process.returncode == -signal.SIGKILL
    number = write(tmp_path, "wandb", LINES[lost:], reached)
    assert wandb_has(tmp_path, number)[0] == wandb_rows(LINES)

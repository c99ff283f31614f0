"""Weights & Biases and MLflow, both without a network: what they hold is what metrics.jsonl has."""

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT
from widemix.errors import InputError
from widemix.recipe import flat_recipe, load_recipe
from widemix.recipe.log import LogSection
from widemix.run import trackers
from widemix.run.metrics import MetricsWriter
from widemix.run.trackers import check_trackers, metrics_of, open_trackers

LINES = [
    {"step": 10, "epoch": 0.5, "split": "train", "loss": 2.5, "lr": 0.1, "time": 100.0},
    {"step": 10, "split": "event", "event": "step_skipped", "loss": "nan", "grad_norm": 1.0, "time": 100.5},
    {"step": 20, "epoch": 1.0, "split": "train", "loss": 1.25, "lr": 0.05, "data_wait": 0.0, "time": 101.0},
    {"step": 20, "epoch": 1.0, "split": "eval", "loss": 1.5, "top1": 60.0, "time": 102.0},
]


def recipe_with(name: str):
    return load_recipe(ROOT / "recipes/digits/mixer.yaml", [(f"log.{name}", "true")])


def write(folder: Path, name: str, lines: list[dict], step: int = 0) -> str:
    """Write lines as a run does; returns the id that the run has there."""
    recipe = recipe_with(name)
    opened = open_trackers(recipe.log, folder, recipe, pytest.fail)
    writer = MetricsWriter(folder, step, tensorboard=False, trackers=opened)
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


def test_the_figures_of_a_line():
    assert metrics_of(LINES[3]) == {"eval/loss": 1.5, "eval/top1": 60.0}
    assert metrics_of(LINES[1]) == {}
    assert metrics_of({"split": "train", "replaced": 3, "loss": None}) == {"train/replaced": 3}


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_package_that_is_not_installed(name, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda each: None if each == name else each)
    with pytest.raises(InputError, match=rf"log\.{name} true: .*pip install 'widemix\[{name}\]'"):
        check_trackers(recipe_with(name).log)
    check_trackers(load_recipe(ROOT / "recipes/digits/mixer.yaml").log)


@pytest.mark.parametrize("folder", ["wandb", ".wandb"])
def test_no_key_is_sent_to_a_server_that_the_current_folder_names(folder, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="Weights & Biases is not installed: pip install 'widemix[wandb]'")
    monkeypatch.chdir(tmp_path)
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "settings").write_text("[default]\n# ours\nproject = own\nentity: us\n")
    check_trackers(recipe_with("wandb").log)
    (tmp_path / folder / "settings").write_text("[default]\nproject = own\n base_url = http://theirs\n")
    with pytest.raises(InputError, match=rf"^{folder}/settings: sets base_url, and the current folder may be"):
        check_trackers(recipe_with("wandb").log)


def test_without_tensorboard_a_run_has_to_do_without_its_curves(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda each: None if each == "tensorboard" else each)
    with pytest.raises(InputError, match=r"log\.tensorboard true: .*; pip install tensorboard, or set it to false"):
        check_trackers(LogSection())
    check_trackers(LogSection(tensorboard=False, mlflow=True))


def test_each_tracker_is_opened_again_by_its_own_id_whatever_became_of_the_others(tmp_path, monkeypatch):
    opened, refused = [], set()

    def tracker(kind):
        def open_one(run_dir, name, recipe, known):
            if kind in refused:
                raise ConnectionError("no server")
            opened.append((kind, run_dir, name, known))
            return SimpleNamespace(id=known or f"the {len(opened)}th")

        return open_one

    monkeypatch.setattr(trackers, "_TRACKERS", {kind: tracker(kind) for kind in ("wandb", "mlflow")})
    section, warnings = LogSection(wandb=True, mlflow=True), []
    refused.add("wandb")
    (one,) = open_trackers(section, tmp_path, None, warnings.append)
    assert one.id == "the 1th"
    assert [warning.partition(" true")[0] for warning in warnings] == ["log.wandb"]
    refused.clear()
    assert [each.id for each in open_trackers(section, tmp_path, None, warnings.append)] == ["the 2th", "the 1th"]
    refused.add("mlflow")
    open_trackers(section, tmp_path, None, warnings.append)
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"wandb": "the 2th", "mlflow": "the 1th"}
    assert opened == [
        ("mlflow", tmp_path, tmp_path.name, None),
        ("wandb", tmp_path, tmp_path.name, None),
        ("mlflow", tmp_path, tmp_path.name, "the 1th"),
        ("wandb", tmp_path, tmp_path.name, "the 2th"),
    ]
    assert open_trackers(LogSection(), tmp_path, None, pytest.fail) == []


def test_mlflow_is_sent_each_step_of_a_split_once_and_again_after_a_rollback():
    tracker = trackers._MLflow.__new__(trackers._MLflow)
    tracker._has, tracker._lines = {"train": 10}, SimpleQueue()
    rollback = {"step": 5, "split": "event", "event": "rollback"}
    lines = [*LINES, LINES[2], rollback, LINES[0], LINES[3]]
    for number, line in enumerate(lines):
        tracker.add_line(line | {"number": number})
    sent = [tracker._lines.get()["number"] for _ in range(tracker._lines.qsize())]
    assert sent == [1, 2, 3, 5, 6, 7]


@pytest.mark.parametrize("kind", [ConnectionError, ImportError, ValueError])
def test_one_that_cannot_be_opened(tmp_path, monkeypatch, kind):
    def refuse(*_):
        raise kind("\nno server\nand a long story")

    monkeypatch.setitem(trackers._TRACKERS, "wandb", refuse)
    recipe, warnings = recipe_with("wandb"), []
    assert open_trackers(recipe.log, tmp_path, recipe, warnings.append) == []
    assert warnings == ["log.wandb true: it cannot be opened (no server); training without it"]
    assert not (tmp_path / "trackers.json").exists()


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
def test_mlflow_gets_what_a_killed_start_could_not_send_and_nothing_twice(tmp_path, monkeypatch):
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


@pytest.mark.long
def test_the_end_of_a_run_does_not_wait_for_a_server_that_is_gone(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'widemix[mlflow]'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr(trackers, "_CLOSE_S", 0.5)
    monkeypatch.setattr(trackers, "_RETRY_S", 0.1)
    recipe = recipe_with("mlflow")
    (tracker,) = open_trackers(recipe.log, tmp_path, recipe, pytest.fail)

    log_batch, server = tracker._client.log_batch, "gone"

    def try_batch(*batch):
        if server == "gone":
            raise ConnectionError("no server\nand a long story")
        log_batch(*batch)

    monkeypatch.setattr(tracker._client, "log_batch", try_batch)
    for line in LINES:
        tracker.add_line(line)
    assert tracker.close(failed=False) == "log.mlflow: the last lines were not sent (no server)"
    server = "back"
    tracker._thread.join(10)
    assert tracker._client.get_run(tracker.id).data.metrics["train/loss"] == 1.25
    assert tracker._client.get_run(tracker.id).info.status == "FINISHED"


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
import os, signal, sys, time, pytest
from pathlib import Path
from tests.run.test_trackers import LINES, MetricsWriter, open_trackers, recipe_with

folder, sent, lost, step = Path(sys.argv[1]), *map(int, sys.argv[2:])
recipe = recipe_with("wandb")
writer = MetricsWriter(folder, step, False, open_trackers(recipe.log, folder, recipe, pytest.fail))
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


class Server:
    """MLflow's, with the calls that it had."""

    def __init__(self, experiment: str | None = None, history=()):
        self.calls, self.failing, self._experiment, self._history = [], 0, experiment, dict(history)

    def get_experiment_by_name(self, title):
        self.calls.append(("experiment", title))
        return self._experiment and SimpleNamespace(experiment_id=self._experiment)

    def create_experiment(self, title):
        return f"new {title}"

    def create_run(self, experiment, run_name):
        self.calls.append(("run", experiment, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="run 1"))

    def get_metric_history(self, number, name):
        return [SimpleNamespace(timestamp=at, step=step) for at, step in self._history.get(name, ())]

    def update_run(self, number, status):
        self.calls.append((number, status))

    def log_batch(self, number, metrics=(), params=()):
        if self.failing:
            self.failing -= 1
            raise ConnectionError("no server")
        self.calls.append((number, *metrics, len(params)))

    def set_terminated(self, number, status):
        self.calls.append((number, status))


@pytest.fixture
def mlflow_at(monkeypatch):
    """Let MLflow have this server; what it is sent of a line is its split and its step."""

    def have(server: Server) -> Server:
        entities = SimpleNamespace(Param=lambda key, value: (key, value))
        monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda: server))
        monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
        return server

    monkeypatch.setattr(trackers, "_mlflow_metrics", lambda line: [(line["split"], line["step"])])
    monkeypatch.setattr(trackers, "_RETRY_S", 0.0)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return have


@pytest.mark.parametrize(("there", "number"), [("7", "7"), (None, "new mine")])
def test_a_new_run_of_mlflow_is_one_of_the_experiment_that_its_variable_names(mlflow_at, tmp_path, there, number):
    os.environ |= {"MLFLOW_EXPERIMENT_NAME": "mine", "MLFLOW_TRACKING_URI": "http://server"}
    server, recipe = mlflow_at(Server(there)), recipe_with("mlflow")
    trackers._MLflow(tmp_path, "name", recipe, None).close(failed=True)
    params = ("run 1", len(flat_recipe(recipe)))
    assert server.calls == [("experiment", "mine"), ("run", number, "name"), params, ("run 1", "FAILED")]
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://server"


def test_a_server_that_does_not_answer_is_told_to_be_slow(mlflow_at, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "_CLOSE_S", 0.0)
    answers = Event()
    server = mlflow_at(Server("7"))
    server.set_terminated = lambda *_: answers.wait(60)
    tracker = trackers._MLflow(tmp_path, "name", recipe_with("mlflow"), None)
    assert tracker.close(failed=False) == "log.mlflow: the last lines were not sent (the server is slow)"
    answers.set()
    tracker._thread.join(60)


def test_mlflow_is_sent_what_a_start_before_could_not_send_in_parts_and_until_the_server_takes_it(
    mlflow_at, tmp_path, monkeypatch
):
    """The server has of each split up to the step that it was sent last: that of the evaluations was taken back."""
    monkeypatch.setattr(trackers, "_AT_ONCE", 2)
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    places = [("train", 4), ("eval", 4), ("eval", 8), ("train", 8), ("train", 12)]
    lines = [json.dumps({"split": split, "step": step}) for split, step in places]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 25, "spl']))
    server = mlflow_at(Server(history={"train/loss": [(1, 4)], "eval/loss": [(1, 8), (2, 4)]}))
    server.failing = 3
    tracker = trackers._MLflow(tmp_path, "name", recipe_with("mlflow"), "run 3")
    assert tracker.close(failed=False) is None
    assert (server.calls[0], server.calls[-1]) == (("run 3", "RUNNING"), ("run 3", "FINISHED"))
    sent = server.calls[1:-1]
    assert [each for number, *batch, _ in sent for each in batch] == [("eval", 8), ("train", 8), ("train", 12)]
    assert all(len(batch) <= 4 for batch in sent)
    assert os.environ["MLFLOW_TRACKING_URI"] == "sqlite:///mlflow.db"


@pytest.mark.parametrize("project", ["mine", None])
def test_wandb_gets_the_figures_of_both_splits_and_how_the_run_ended(tmp_path, monkeypatch, project):
    logged, made = [], []
    run = SimpleNamespace(
        id="run 1",
        starting_step=0,
        define_metric=lambda *_, **__: None,
        log=logged.append,
        finish=lambda exit_code: logged.append(exit_code),
    )
    module = SimpleNamespace(Settings=lambda **_: None, init=lambda **options: made.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(os, "environ", {"WANDB_PROJECT": project} if project else {})
    for known in (None, "run 1"):
        tracker = trackers._WandB(tmp_path, "name", recipe_with("wandb"), known)
        for line in LINES:
            tracker.add_line(line)
        tracker.close(failed=known is not None)
        assert logged == [
            *({**metrics_of(LINES[n]), "step": LINES[n]["step"], "epoch": LINES[n]["epoch"]} for n in (0, 2, 3)),
            int(known is not None),
        ]
        logged.clear()
    assert [(each["id"], each["name"], each["dir"], each["resume"]) for each in made] == [
        (known, "name", tmp_path, "allow") for known in (None, "run 1")
    ]
    assert os.environ["WANDB_PROJECT"] == (project or "widemix")

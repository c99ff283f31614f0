"""The table of a study's runs: what a run folder says, appended once, and read from half a file."""

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.conftest import System
from tests.studies.conftest import TWO, leave_run, row_of, runs_of
from widemix.errors import InputError
from widemix.studies.rows import Table, add_core_seconds, finished_row
from widemix.studies.study_run import StudyRun

STUDY = TWO.replace("runs:", "seeds: [0, 1, 2]\nruns:").replace("  axes: {model.channels: [8, 16]}\n", "")
LINES = [
    {"split": "train", "step": 1, "epoch": 0.5, "loss": 9.0, "images_per_s": 100.0},  # before a restart
    {"split": "train", "step": 1, "epoch": 0.5, "loss": 3.0, "images_per_s": 100.0},
    {"split": "train", "step": 2, "epoch": 1.0, "loss": 1.0, "images_per_s": 300.0},
    {"split": "eval", "step": 1, "epoch": 0.5, "loss": 8.0, "top1": 9.0, "top5": 80.0},  # not the epoch's last
    {"split": "eval", "step": 2, "epoch": 1.0, "loss": 7.0, "top1": 8.0, "top5": 80.0},  # before a restart
    {"split": "eval", "step": 2, "epoch": 1.0, "loss": 1.5, "top1": 40.0, "top5": 80.0},
    {"split": "train", "step": 3, "epoch": 1.5, "loss": 0.5, "images_per_s": 200.0},
    {"split": "event", "step": 3, "event": "loss_spike", "loss": 1.0, "expected": 0.1},
    {"split": "train", "step": 4, "epoch": 2.0, "loss": 0.25, "images_per_s": 200.0},
    {"split": "eval", "step": 4, "epoch": 2.0, "loss": 1.25, "top1": 50.0, "top5": 90.0},
]


@pytest.fixture
def study_runs(tmp_path):
    return runs_of(tmp_path, STUDY)


def pretend(study_run, folder, done=None, lines=LINES, environment=None):
    run = leave_run(folder / study_run.name, study_run.recipe, done=False)
    found = {"commit": 40 * "a", "host": "n1", "device": "cpu", "usable_cpus": 2}
    (run / "environment.json").write_text(json.dumps(found if environment is None else environment))
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if done:
        (run / "done.json").write_text(json.dumps(done | {"step": 4, "seconds": 7.5, "recipe": "f"}))
    return run


def test_a_row_has_what_its_run_folder_has(study_runs, tmp_path):
    study_run = study_runs[1]
    pretend(study_run, tmp_path, {"top1": 50.0, "top5": 90.0, "loss": 1.2345678})
    (tmp_path / "logs").mkdir()
    for seconds in (2.5, 4.5):  # two starts
        add_core_seconds(tmp_path, study_run, seconds)
    row = finished_row(study_run, tmp_path)
    assert row.metrics == {"top1": 50.0, "top5": 90.0, "loss": 1.23457, "train_loss": 0.375}
    assert (row.state, row.seed, row.split, row.seconds, row.core_seconds) == ("done", 1, "test", 7.5, 7.0)
    assert row.epochs == study_run.recipe.train.epochs != 2
    assert (row.images_per_s, row.commit, row.machine, row.host) == (200.0, 12 * "a", "2 CPU cores", "n1")
    assert row.curve == [
        {"split": "train", "epoch": 1, "loss": 2.0},
        {"split": "eval", "epoch": 1.0, "loss": 1.5, "top1": 40.0},
        {"split": "train", "epoch": 2, "loss": 0.375},
        {"split": "eval", "epoch": 2.0, "loss": 1.25, "top1": 50.0},
    ]
    assert row.recipe == "recipes/digits/s_mixer.yaml --train.seed=1"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"commit": None, "device": "cpu:0"}, ("unknown", "1 CPU core", "unknown")),
        ({"host": "n2", "device": "NVIDIA H100", "usable_cpus": 8}, ("unknown", "NVIDIA H100", "n2")),
        ({}, ("unknown", "unknown device", "unknown")),
    ],
)
def test_a_row_says_unknown_where_the_environment_says_nothing(tmp_path, environment, expected):
    """Of a recipe in no folder of recipes, by a command that can be typed, without the study's log."""
    path = tmp_path / "my recipes" / "own.yaml"
    path.parent.mkdir()
    path.write_text("extends: digits/s_mixer\n")
    study_run = StudyRun(path, (("model.depth", "2"),), shared=(("data.path", "a b"),))
    pretend(study_run, tmp_path, {"top1": 50.0}, LINES[3:6], environment)
    row = finished_row(study_run, tmp_path)
    assert (row.commit, row.machine, row.host) == expected
    assert (row.core_seconds, row.images_per_s, row.metrics["train_loss"]) == (None, None, None)
    assert shlex.split(row.recipe) == [str(path), "--data.path=a b", "--model.depth=2"]


@pytest.mark.parametrize("text", ["{", '"text"', '{"device": 3}', None])
def test_a_run_without_its_environment_is_not_finished(study_runs, tmp_path, text):
    environment = pretend(study_runs[0], tmp_path, {"top1": 50.0}) / "environment.json"
    environment.unlink()
    if text is not None:
        environment.write_text(text)
    with pytest.raises(InputError, match=f"{study_runs[0].name}: is not a finished run"):
        finished_row(study_runs[0], tmp_path)


def test_a_curve_counts_the_steps_of_training_in_order(study_runs, tmp_path):
    """After a rollback from step 7 to 2, with an evaluation in the middle of an interval, and none of classes."""
    train = {"split": "train"}
    lines = [
        {**train, "step": 2, "epoch": 0.2, "loss": 7.0},
        {**train, "step": 7, "epoch": 0.7, "loss": 9.0},
        {"split": "eval", "step": 7, "epoch": 0.7, "loss": 3.0},
        {"split": "event", "step": 2, "event": "rollback"},
        {"split": "eval", "step": 4, "epoch": 0.4, "loss": 5.0},
        {**train, "step": 5, "epoch": 0.5, "loss": 2.0},
        {**train, "step": 7, "epoch": 0.7, "loss": 1.0, "images_per_s": 3.0},
    ]
    pretend(study_runs[0], tmp_path, {"loss": 1.25}, lines)
    row = finished_row(study_runs[0], tmp_path)
    assert row.images_per_s == 3
    assert row.curve == [
        {"split": "train", "epoch": 1, "loss": pytest.approx((2 * 7 + 3 * 2 + 2 * 1) / 7, rel=1e-5)},
        {"split": "eval", "epoch": 0.7, "loss": 3.0},
    ]
    assert row.metrics == {"loss": 1.25, "train_loss": row.curve[0]["loss"]}


def test_a_recipe_is_named_from_the_folder_of_recipes_on(tmp_path, monkeypatch):
    (tmp_path / "recipes/a/b").mkdir(parents=True)
    for name in ("one.yaml", "a/b/two.yaml"):
        (tmp_path / "recipes" / name).write_text("extends: digits/s_mixer\n")
        monkeypatch.chdir((tmp_path / "recipes" / name).parent)
        study_run = StudyRun(Path(Path(name).name), ())
        pretend(study_run, tmp_path / name, {"top1": 50.0})
        assert finished_row(study_run, tmp_path / name).recipe == f"recipes/{name}"


def test_only_runs_that_ended_have_rows(study_runs, tmp_path):
    pretend(study_runs[0], tmp_path)  # still running, or killed
    pretend(study_runs[1], tmp_path, {"top1": None, "loss": None})
    pretend(
        study_runs[2],
        tmp_path,
        lines=[*LINES, {"split": "event", "step": 5, "event": "diverged", "reason": "the loss"}],
    )
    table = Table(tmp_path / "study.jsonl")
    table.add_finished(study_runs, tmp_path)
    assert [table.row(study_run) and table.row(study_run).state for study_run in study_runs] == [
        None,
        "diverged",
        "diverged",
    ]
    assert [table.row(study_run).seconds for study_run in study_runs[1:]] == [7.5, None]
    assert table.missing(study_runs) == study_runs[:1]
    again = Table(tmp_path / "study.jsonl")
    assert again.rows == table.rows


@pytest.fixture
def path(study_runs, tmp_path):
    """A table that has a row of each run."""
    table = Table(tmp_path / "study.jsonl")
    for study_run in study_runs:
        table.append(row_of(study_run, 50.0))
    return table.path


def test_a_cut_last_line_is_left_out_and_replaced(study_runs, path, capsys):
    whole = path.read_bytes()
    assert whole.count(b"\n") == 3
    path.write_bytes(whole + 40 * b"\0")
    assert set(Table(path).rows) == {study_run.name for study_run in study_runs}
    for cut in (whole[:-1], whole[:-200], whole[: whole.index(b"\n") + 2]):
        path.write_bytes(cut)
        table = Table(path)
        assert "its last line was cut off" in capsys.readouterr().err
        for study_run in study_runs:
            table.append(row_of(study_run, 50.0))
        assert path.read_bytes() == whole


def test_processes_that_share_a_table_add_each_row_once(study_runs, tmp_path):
    """Also that of a run which another row names."""
    path = tmp_path / "study.jsonl"
    one, other = Table(path), Table(path)  # neither knows of the other's rows
    for table, own in ((one, study_runs[:2]), (other, study_runs), (one, study_runs)):
        for study_run in own:
            table.append(row_of(study_run, 50.0, recipe=f"of {study_runs[2].name}"))
    assert [json.loads(line)["run"] for line in path.read_text().splitlines()] == [each.name for each in study_runs]
    assert set(one.rows) == set(other.rows)


def test_a_row_added_while_the_lock_is_waited_for_counts(study_runs, tmp_path, system: System):
    row = row_of(study_runs[0], 50.0)
    one, other = Table(tmp_path / "one.jsonl"), Table(tmp_path / "other.jsonl")
    other.append(replace(row, recipe="of another process"))
    system({"fcntl.flock": lambda *_: one.path.write_bytes(other.path.read_bytes())})
    one.append(row)
    assert one.path.read_bytes() == other.path.read_bytes()


def test_a_row_is_added_where_nothing_can_be_locked(study_runs, tmp_path, system: System):
    def refuse(*_):
        raise OSError("no locks")

    system({"fcntl.flock": refuse})
    table = Table(tmp_path / "study.jsonl")
    table.append(row_of(study_runs[0], 50.0))
    assert list(Table(table.path).rows) == [study_runs[0].name]


def test_tables_are_merged_by_their_lines(study_runs, path):
    """Of two rows of a run the first counts, as the report has shown it."""
    lines = path.read_text()
    path.write_text(f"{lines}\n{lines.replace('50.0', '60.0')}\n")
    rows = Table(path).rows
    assert set(rows) == {study_run.name for study_run in study_runs}
    assert {row.metrics["top1"] for row in rows.values()} == {50.0}


@pytest.mark.parametrize(
    "change",
    [
        {"metrics": 5}, {"metrics": None}, {"metrics": {"top1": [50.0]}}, {"metrics": {"top1": "50"}}, {"epochs": 0},
        {"epochs": None}, {"curve": [5]}, {"curve": None}, {"curve": [{"split": "eval"}]}, {"images_per_s": "fast"},
        {"machine": None}, {"run": 5}, "<<<<<<< HEAD", "{}", "[]", "\0\0", '{"run": 1}',
    ],
)  # fmt: skip
def test_a_line_in_the_middle_is_named(study_runs, tmp_path, change):
    row = asdict(row_of(study_runs[0], 50.0))
    bad = change if isinstance(change, str) else json.dumps(row | change)
    (tmp_path / "study.jsonl").write_text(f"{json.dumps(row)}\n{bad}\n")
    with pytest.raises(InputError, match="line 2: is not the line of a run"):
        Table(tmp_path / "study.jsonl")

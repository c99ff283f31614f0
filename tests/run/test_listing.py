"""Runs side by side: what is listed is what their files say."""

import csv
import io
import json
import os
import re
import shutil
import time

import pytest

from tests.run.saved import position, state
from widemix.cli.commands import run_command
from widemix.cli.parser import make_parser
from widemix.cli.runs import table_lines
from widemix.errors import InputError
from widemix.recipe import dump_recipe, flat_recipe, load_recipe
from widemix.run import checkpoint
from widemix.run.checkpoint import RetentionPolicy
from widemix.run.listing import compare_recipes, differing_keys, evaluated, find_runs

LINES = [
    {"step": 10, "split": "train", "images_per_s": 100.0},
    {"step": 20, "split": "train", "images_per_s": 1300.0},
    {"step": 20, "split": "eval", "top1": 90.5},
    {"step": 30, "split": "train", "images_per_s": 1200.0},
]
OWN = {"step": 20, "ema": False, "data": "datasets/digits", "split": "test", "samples": 360, "top1": 61.67}
REGRESSION = {"data.targets": "regression", "train.loss": "mse", "augment.smoothing": "0", "augment.cutmix": "0"}


def json_lines(lines) -> str:
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def write_run(run, recipe="digits/mixer", keys=(), **files):
    """A run folder with these files; of Python values as JSON, of lists as lines."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "recipe.yaml").write_text(dump_recipe(load_recipe(recipe, list(dict(keys).items()))))
    (run / "environment.json").write_text("{}")
    for name, content in files.items():
        if isinstance(content, (list, dict)):
            content = json_lines(content) if isinstance(content, list) else json.dumps(content)
        (run / f"{name}.json{'l' if name in ('metrics', 'evaluations') else ''}").write_text(content)
    return run


@pytest.fixture
def runs(tmp_path):
    """A finished run and one that was killed while it wrote a line, which differ in depth and seed."""
    done = {"top1": 91.25, "step": 30, "seconds": 5400.0}
    write_run(tmp_path / "a", keys={"model.depth": "2", "train.seed": "0"}, metrics=LINES, done=done)
    torn = json_lines(LINES)
    b = write_run(
        tmp_path / "b", keys={"model.depth": "3", "train.seed": "1"}, metrics=torn[: torn.rindex('"images')]
    )
    os.utime(b / "metrics.jsonl", 2 * (time.time() - 36000,))
    return tmp_path


def said(capsys, *words, code=0):
    assert run_command(make_parser(), None, [*map(str, words)]) == code
    output = capsys.readouterr()
    return output.err if code else output.out


def listed(capsys, *folders) -> list[list[str]]:
    return list(csv.reader(io.StringIO(said(capsys, "runs", "csv", *folders))))


def test_the_list_is_of_the_files(runs, capsys):
    header, a, b = listed(capsys, runs)
    assert header == ["state", "step", "top-1 %", "samples/s", "hours", "run", "differs in"]
    assert a == ["done", "30", "91.25", "1200", "1.50", str(runs / "a"), "model.depth=2, train.seed=0"]
    assert b == ["10 h ago", "20", "90.50", "700", "", str(runs / "b"), "model.depth=3, train.seed=1"]
    lines = [line.split() for line in said(capsys, "runs", runs).splitlines()]
    assert lines[1] == ["done", "30", "91.25", "1,200", "1.50", str(runs / "a"), "model.depth=2,", "train.seed=0"]
    assert lines[2][:7] == ["10", "h", "ago", "20", "90.50", "700", "-"]
    assert said(capsys, "runs", "diff", runs / "a", runs / "b") == "model.depth: 2 -> 3\ntrain.seed: 0 -> 1\n"
    assert said(capsys, "runs", "diff", runs / "a", runs / "a") == "the recipes are the same\n"


STOPPED = {"step": 20, "split": "event", "event": "stopped"}


@pytest.mark.parametrize(
    ("files", "saved", "minutes", "cells"),
    [
        ({"metrics": [STOPPED]}, (), 0, ["stopped", "20", "", "", ""]),
        ({"metrics": [{**STOPPED, "step": 17}]}, (10, 15), 0, ["stopped, checkpoint 15", "17", "", "", "2.00"]),
        ({"metrics": [{**STOPPED, "event": "diverged"}]}, (), 0, ["diverged", "20", "", "", ""]),
        (
            {"metrics": [STOPPED, LINES[3], {"step": 30, "split": "eval", "top1": 0.0},
                         {"step": 10, "split": "event", "event": "rollback"}]},
            (), 0, ["0 min ago", "30", "0.00", "1200", ""],
        ),
        ({"metrics": LINES}, (10, 15), 118, ["118 min ago", "30", "90.50", "1200", "2.00"]),
        ({"metrics": LINES}, (), 122, ["2 h ago", "30", "90.50", "1200", ""]),
        ({"metrics": ""}, (), 0, ["0 min ago", "0", "", "", ""]),
        ({}, (), 0, ["no line yet", "0", "", "", ""]),
        ({"done": {"top1": 0.0, "step": 0, "seconds": 0.0}}, (10,), 0, ["done", "0", "0.00", "", "0.00"]),
        (
            {"metrics": LINES, "evaluations": [OWN | {"top1": 60.0}, OWN, OWN | {"ema": True, "top1": 1.0},
                                               OWN | {"split": "train", "top1": 2.0},
                                               OWN | {"data": "x", "top1": 3.0}]},
            (), 0, ["0 min ago", "30", "61.67", "1200", ""],
        ),
    ],
    ids=["stopped", "saved", "diverged", "gone on", "minutes", "hours", "empty", "new", "zeros", "evaluated later"],
)  # fmt: skip
def test_a_run_is_as_its_files_say(tmp_path, capsys, files, saved, minutes, cells):
    """It may have been stopped, started again, and rolled back; a later evaluation is its newest."""
    run = write_run(tmp_path / "run", **files)
    for step in saved:
        checkpoint.save(run, state(), position(step, seconds=480.0 * step), RetentionPolicy(2))
    if minutes:
        os.utime(run / "metrics.jsonl", (time.time() - 60 * minutes,) * 2)
    (_, found) = listed(capsys, tmp_path)
    assert found[:5] == cells


def test_the_folder_runs_is_listed_where_none_is_named(runs, monkeypatch, capsys):
    (runs / "runs").mkdir()
    (runs / "a").rename(runs / "runs/a")
    monkeypatch.chdir(runs)
    for verb in ("csv", "diff"):  # which are no folders, even where there are some
        (runs / verb).mkdir()
    assert "runs diff: takes two runs, got 0" in said(capsys, "runs", "diff", code=2)
    assert listed(capsys)[1][-2] == "runs/a"
    assert said(capsys, "runs").splitlines()[1].split()[5] == "runs/a"
    (runs / "runs/a").rename(runs / "a")
    assert said(capsys, "runs", code=2) == "error: runs: holds no runs\n"
    assert said(capsys, "runs", runs / "csv", runs / "diff", code=2).endswith(f"csv, {runs}/diff: holds no runs\n")


@pytest.mark.parametrize(("keys", "more"), [(5, ", 2 more keys"), (4, ", 1 more key"), (3, "")])
def test_the_three_most_telling_keys_are_named(tmp_path, capsys, keys, more):
    named = ["model.depth", "model.channels", "data.workers", "train.seed", "log.every"][:keys]
    for seed in (2, 1):
        write_run(tmp_path / str(seed), keys={name: str(8 * seed) for name in reversed(named)})
    words = ["model.channels=8", "model.depth=8", *(f"{name}=8" for name in named[2:])]
    assert listed(capsys, tmp_path)[1][-1] == ", ".join(words)
    lines = said(capsys, "runs", tmp_path).splitlines()
    assert lines[1].endswith(", ".join(words[:3]) + more)
    hint = f"`widemix runs diff {tmp_path}/1 {tmp_path}/2` has all keys in which two runs differ"
    assert lines[3:] == [hint] * bool(more)


def test_runs_of_one_folder_are_compared_with_each_other(runs, capsys):
    """What tells a folder from another is in its name."""
    for seed in ("5", "6"):
        write_run(runs / f"study/{seed}", "cifar10/mixer_ss8", {"train.seed": seed})
    lines = said(capsys, "runs", runs).splitlines()
    assert [line.split()[-1] for line in lines[3:]] == ["train.seed=5", "train.seed=6"]
    assert lines[1].endswith("model.depth=2, train.seed=0")
    alone = said(capsys, "runs", runs / "a", runs / "b", runs / "study/5").splitlines()
    assert re.search(r"model.*=.*=.*=.*, \d\d more keys$", alone[3])
    assert f"runs diff {runs}/a {runs}/study/5`" in alone[-1]  # the first and the last
    assert listed(capsys, runs / "a", runs / "study/5")[1][-1].count("=") > 20


def test_each_run_has_the_metric_of_what_it_predicts(runs, capsys):
    write_run(
        runs / "b", keys=REGRESSION, metrics=[{"step": 20, "split": "eval", "mae": 0.25, "r2": 0.5, "loss": 1.0}]
    )
    header, a, b = listed(capsys, runs)
    assert (header[2:5], a[2:4], b[2:4]) == (["top-1 %", "MAE", "samples/s"], ["91.25", ""], ["", "0.25"])
    header, b = listed(capsys, runs / "b")
    assert (header[2], b[2]) == ("MAE", "0.25")
    said(capsys, "report", runs / "a", runs / "b", "--to", runs / "page.html")
    page = (runs / "page.html").read_text()
    for cells in ('<th class="n">{}</th>', "top-1 %", "MAE"), ('<td class="n">{}</td>', "91.25", "–"):
        assert "".join(cells[0].format(text) for text in cells[1:]) in page


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"\xff\n", "not JSON ('utf-8' codec"), (4 * b"\0" + b"\n", "not JSON"), (b"[1]\n", "no JSON object")],
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "done.json", "environment.json"])
def test_a_damaged_file_is_named_and_hides_no_other_run(runs, name, content, reason, capsys):
    """Bytes of another file, or zeros where a disk lost them."""
    (runs / "a" / name).write_bytes(content)
    error = said(capsys, "report", runs / "a", "--to", runs / "x.html", code=2)
    what = f"{runs}/a/{name}{', line 1' * (name == 'metrics.jsonl')}: is damaged, {reason}"
    assert error.startswith(f"error: {what}")
    assert error.count("\n") == 1
    if name == "environment.json":  # which a list does not read
        return
    assert run_command(make_parser(), None, ["runs", str(runs)]) == 0
    output = capsys.readouterr()
    assert output.err.startswith(f"warning: {what}")
    assert output.err.endswith("; restore or remove it; the run is left out\n")
    assert f"{runs}/b" in output.out
    assert f"{runs}/a" not in output.out
    (runs / "b/recipe.yaml").write_text("")
    assert said(capsys, "runs", runs, code=2).startswith(f"error: {what}")


def test_a_line_too_long_has_its_last_column_below():
    rows = [("state", "step", "run", "differs in"), ("done", "20", "runs/a", "optim.lr=0.004, train.ema_decay=null")]
    wide = ["state  step  run     differs in", "done     20  runs/a  optim.lr=0.004, train.ema_decay=null"]
    assert list(table_lines(rows)) == list(table_lines(rows, 57)) == wide
    below = ["done     20  runs/a", "  optim.lr=0.004,", "  train.ema_decay=null"]
    assert list(table_lines(rows, 32)) == [wide[0], *below]
    rows = [("", "", "a", "optim.lr=0.004, data.path=my-images")]
    assert list(table_lines(rows, 32)) == ["    a", "  optim.lr=0.004,", "  data.path=my-images"]  # no value is cut


def test_runs_are_folders_with_a_recipe_and_an_environment(runs):
    """And none lies within another."""
    for name in ("recipe.yaml", "environment.json"):
        (runs / f"only/{name[0]}").mkdir(parents=True)
        (runs / f"only/{name[0]}" / name).touch()
    shutil.copytree(runs / "b", runs / "a/within")
    for name in ("p", "c", "z", "k"):
        shutil.copytree(runs / "b", runs / "deep/er" / name)
    assert list(find_runs([runs])) == [runs / "a", runs / "b", *(runs / "deep/er" / name for name in "ckpz")]
    with pytest.raises(InputError, match=r"recipe.yaml: no such folder"):
        list(find_runs([runs / "a/recipe.yaml"]))


@pytest.mark.parametrize("ema", [False, True])
def test_evaluations_of_the_ema_are_named_as_the_others(runs, ema):
    recipe = load_recipe("digits/mixer")
    where = {"data": recipe.data.path, "split": recipe.data.eval_split}
    lines = [{"split": "eval", "step": step, "loss": 1.0, "top1": step, "ema_loss": 0.5, "ema_top1": step + 0.5}
             for step in (20, 10)]  # fmt: skip
    later = {"step": 10, **where, "loss": 0.1, "top1": 99.0}
    rows = [later | {"ema": each, "top5": 1.0 + each} for each in (False, True)]
    (runs / "b/evaluations.jsonl").write_text(json_lines(rows))
    early, late = evaluated(runs / "b", lines, recipe, ema)
    assert early == rows[ema]
    own = {"loss": 0.5, "top1": 20.5} if ema else {"loss": 1.0, "top1": 20}
    assert late == {"step": 20, **where, **own}


def test_keys_that_one_recipe_lacks_differ_from_those_without_value(runs, capsys):
    one, other = load_recipe("digits/mixer"), load_recipe("cifar10/resnet")
    rows = dict(differing_keys([one, other, one]))
    only = flat_recipe(other).keys() - flat_recipe(one).keys()
    assert only
    for name in only:
        assert rows[name] == [..., flat_recipe(other)[name], ...]
    assert "train.init_from" not in rows  # None in all
    write_run(runs / "b", "mnist/dense")
    _, a, b = listed(capsys, runs)
    assert {word.partition("=")[0] for word in a[-1].split(", ")} >= {"model.kind", "model.project_tokens"}
    assert ["model.width=" in b[-1], "model.project_tokens" in b[-1], "model.width" in a[-1]] == [True, False, False]
    for name, images in (("a", "0"), ("b", "7")):
        write_run(runs / name, keys={"log.images": images})
    assert compare_recipes(runs / "a", runs / "b") == [("log.images", 0, 7)]
    assert compare_recipes(runs / "b", runs / "a") == [("log.images", 7, 0)]

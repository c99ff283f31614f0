"""Runs side by side: what is listed is what their files say."""

import csv
import io
import json
import os
import re
import shutil
import time

import pytest

from tests.run.test_checkpoint import position, state
from widemix.cli.listing import table_lines
from widemix.cli.parser import make_parser
from widemix.command_line.commands import run_command
from widemix.errors import InputError
from widemix.recipe import dump_recipe, flat_recipe, load_recipe
from widemix.run import checkpoint
from widemix.run.checkpoint import RetentionPolicy
from widemix.run.listing import compare_recipes, differing_keys, evaluated, find_runs, summarise


@pytest.fixture
def runs(tmp_path):
    """A finished run and one that was just begun, which differ in depth and seed."""
    for name, depth, seed in (("a", 2, 0), ("b", 3, 1)):
        run = tmp_path / name
        run.mkdir()
        recipe = load_recipe("digits/mixer", [("model.depth", str(depth)), ("train.seed", str(seed))])
        (run / "recipe.yaml").write_text(dump_recipe(recipe))
        (run / "environment.json").write_text("{}")
    lines = [
        {"step": 10, "split": "train", "images_per_s": 100.0},
        {"step": 20, "split": "train", "images_per_s": 1300.0},
        {"step": 20, "split": "eval", "top1": 90.5},
        {"step": 30, "split": "train", "images_per_s": 1200.0},
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (tmp_path / "a/metrics.jsonl").write_text(text)
    (tmp_path / "a/done.json").write_text(json.dumps({"top1": 91.25, "step": 30, "seconds": 5400.0}))
    (tmp_path / "b/metrics.jsonl").write_text(text[: text.rindex('"images')])  # killed while writing
    then = time.time() - 10 * 3600
    os.utime(tmp_path / "b/metrics.jsonl", (then, then))
    return tmp_path


def said(capsys, *words, code=0):
    assert run_command(make_parser(), None, [*map(str, words)]) == code
    output = capsys.readouterr()
    return output.err if code else output.out


def test_the_list_is_of_the_files(runs, capsys):
    (header, a, b) = csv.reader(io.StringIO(said(capsys, "runs", "csv", runs)))
    assert header == ["state", "step", "top-1 %", "samples/s", "hours", "run", "differs in"]
    assert a == ["done", "30", "91.25", "1200", "1.50", str(runs / "a"), "model.depth=2, train.seed=0"]
    assert b == ["10 h ago", "20", "90.50", "700", "", str(runs / "b"), "model.depth=3, train.seed=1"]
    lines = said(capsys, "runs", runs).splitlines()
    assert [line.split()[0] for line in lines] == ["state", "done", "10"]
    assert lines[1].endswith("model.depth=2, train.seed=0")
    assert lines[1].split()[3:5] == ["1,200", "1.50"]
    assert lines[2].split()[5:7] == ["700", "-"]


def test_the_runs_of_runs_are_listed_where_no_folder_is_named(runs, monkeypatch, capsys):
    (runs / "runs").mkdir()
    (runs / "a").rename(runs / "runs/a")
    monkeypatch.chdir(runs)
    for verb in ("csv", "diff"):  # which are no folders, even where there are some
        (runs / verb).mkdir()
    assert "runs diff: takes two runs, got 0" in said(capsys, "runs", "diff", code=2)
    (_, only) = csv.reader(io.StringIO(said(capsys, "runs", "csv")))
    assert only[-2] == "runs/a"
    assert said(capsys, "runs").splitlines()[1].split()[5] == "runs/a"
    (runs / "runs/a").rename(runs / "a")
    assert said(capsys, "runs", code=2) == "error: runs: holds no runs\n"


def test_a_key_more_than_three_is_one_more_key(runs, capsys):
    for name, seed in (("a", 2), ("b", 1)):
        keys = [("train.seed", str(seed)), *((f"model.{key}", str(8 * seed)) for key in ("depth", "channels"))]
        keys += [("log.every", str(seed)), ("data.workers", str(seed))]
        (runs / name / "recipe.yaml").write_text(dump_recipe(load_recipe("digits/mixer", keys)))
    (_, first, _) = csv.reader(io.StringIO(said(capsys, "runs", "csv", runs)))
    named = ["model.channels=16", "model.depth=16", "data.workers=2", "train.seed=2", "log.every=2"]
    assert first[-1].split(", ") == named  # the more telling sections first
    listed = said(capsys, "runs", runs).splitlines()[1]
    assert listed.endswith(", ".join([*named[:3], "2 more keys"]))
    for name in "ab":
        text = (runs / name / "recipe.yaml").read_text()
        (runs / name / "recipe.yaml").write_text(re.sub("  every: .", "  every: 3", text))
    assert said(capsys, "runs", runs).splitlines()[1].endswith(", data.workers=2, 1 more key")
    for name in "ab":
        text = (runs / name / "recipe.yaml").read_text()
        (runs / name / "recipe.yaml").write_text(re.sub("  seed: .", "  seed: 3", text))
    lines = said(capsys, "runs", runs).splitlines()
    assert lines[1].endswith(", ".join(named[:3]))
    assert len(lines) == 3  # and nothing about diff


def test_a_long_list_of_keys_is_cut_and_says_where_the_rest_is(runs, capsys):
    """Runs of one folder are compared with each other: what tells a folder from another is in its name."""
    study = runs / "study"
    for seed in (5, 6):
        (study / str(seed)).mkdir(parents=True)
        (study / str(seed) / "environment.json").write_text("{}")
        text = dump_recipe(load_recipe("cifar10/mixer_ss8", [("train.seed", str(seed))]))
        (study / str(seed) / "recipe.yaml").write_text(text)
    lines = said(capsys, "runs", runs).splitlines()
    assert [line.split()[-1] for line in lines[3:5]] == ["train.seed=5", "train.seed=6"]
    assert lines[1].endswith("model.depth=2, train.seed=0")
    assert len(lines) == 5
    alone = said(capsys, "runs", runs / "a", study / "5").splitlines()
    assert alone[1].count("=") == 3
    assert re.search(r", \d\d more keys$", alone[1])
    assert alone[1].split("differs in")[-1].split()[-6].startswith("model.")
    assert alone[-1] == f"`widemix runs diff {runs}/a {study}/5` has all keys in which two runs differ"
    hint = said(capsys, "runs", runs / "a", runs / "b", study / "5").splitlines()[-1]
    assert f"runs diff {runs}/a {study}/5`" in hint  # the first and the last
    (_, first, _) = csv.reader(io.StringIO(said(capsys, "runs", "csv", runs / "a", study / "5")))
    assert first[-1].count("=") > 20


def test_a_later_evaluation_is_the_runs_newest(runs, capsys):
    own = {"step": 20, "ema": False, "data": "datasets/digits", "split": "test", "samples": 360, "top1": 61.67}
    lines = [own | {"top1": 60.0}, own, own | {"ema": True, "top1": 1.0}, own | {"split": "train", "top1": 2.0}]
    lines.append(own | {"data": "datasets/others", "top1": 3.0})
    (runs / "b/evaluations.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (_, _, b) = csv.reader(io.StringIO(said(capsys, "runs", "csv", runs)))
    assert b[2] == "61.67"


@pytest.mark.parametrize("event", ["stopped", "diverged"])
def test_how_a_run_has_ended(runs, event, capsys):
    line = {"step": 20, "split": "event", "event": event, "reason": "the loss is nan"}
    (runs / "b/metrics.jsonl").write_text(json.dumps(line) + "\n")
    (_, _, b) = csv.reader(io.StringIO(said(capsys, "runs", "csv", runs)))
    assert b[0] == event


def test_each_run_has_the_figure_of_what_it_predicts(runs, capsys):
    keys = [
        ("data.targets", "regression"),
        ("train.loss", "mse"),
        ("augment.smoothing", "0"),
        ("augment.cutmix", "0"),
    ]
    (runs / "b/recipe.yaml").write_text(dump_recipe(load_recipe("digits/mixer", keys)))
    line = {"step": 20, "split": "eval", "mae": 0.25, "r2": 0.5, "loss": 1.0}
    (runs / "b/metrics.jsonl").write_text(f"{json.dumps(line)}\n")
    (header, a, b) = csv.reader(io.StringIO(said(capsys, "runs", "csv", runs)))
    assert header[2:5] == ["top-1 %", "MAE", "samples/s"]
    assert (a[2:4], b[2:4]) == (["91.25", ""], ["", "0.25"])
    cells = [line.split() for line in said(capsys, "runs", runs).splitlines()]
    assert (cells[1][2:4], cells[2][4:6]) == (["91.25", "-"], ["-", "0.25"])
    (header, b) = csv.reader(io.StringIO(said(capsys, "runs", "csv", runs / "b")))
    assert (header[2], b[2]) == ("MAE", "0.25")
    said(capsys, "report", runs / "a", runs / "b", "--to", runs / "page.html")
    page = (runs / "page.html").read_text()
    assert '<th class="n">top-1 %</th><th class="n">MAE</th>' in page
    assert '<td class="n">91.25</td><td class="n">–</td>' in page
    assert '<td class="n">–</td><td class="n">0.25</td>' in page


def test_a_run_is_told_by_the_keys_that_it_has_and_one_that_took_no_time_by_its_zeros(runs, capsys):
    (runs / "b/recipe.yaml").write_text(dump_recipe(load_recipe("mnist/dense")))
    (runs / "b/done.json").write_text(json.dumps({"top1": 0.0, "step": 0, "seconds": 0.0}))
    (_, a, b) = csv.reader(io.StringIO(said(capsys, "runs", "csv", runs)))
    assert {word.partition("=")[0] for word in a[-1].split(", ")} >= {"model.kind", "model.tokens"}
    assert "model.width=" in b[-1]
    assert ("model.tokens" in b[-1], "model.width" in a[-1]) == (False, False)
    assert b[:3] + b[4:5] == ["done", "0", "0.00", "0.00"]


def test_the_difference_of_two(runs, capsys):
    assert said(capsys, "runs", "diff", runs / "a", runs / "b") == "model.depth: 2 -> 3\ntrain.seed: 0 -> 1\n"
    assert said(capsys, "runs", "diff", runs / "a", runs / "a") == "the recipes are the same\n"


def test_what_is_wrong(runs, capsys):
    (runs / "empty").mkdir()
    assert "no such folder; name run folders" in said(capsys, "runs", runs / "no", code=2)
    (runs / "other").mkdir()
    for folders in (["empty"], ["empty", "other"]):
        error = said(capsys, "runs", *(runs / name for name in folders), code=2)
        assert error == f"error: {', '.join(str(runs / name) for name in folders)}: holds no runs\n"
    assert "takes two runs, got 1" in said(capsys, "runs", "diff", runs / "a", code=2)
    assert "empty: is not a run folder" in said(capsys, "runs", "diff", runs / "a", runs / "empty", code=2)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"\xff\n", "not JSON ('utf-8' codec"), (4 * b"\0" + b"\n", "not JSON"), (b"[1]\n", "no JSON object")],
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "done.json", "environment.json"])
def test_a_damaged_file_is_named(runs, name, content, reason, capsys):
    """Bytes of another file, or zeros where a disk lost them."""
    (runs / "a" / name).write_bytes(content)
    error = said(capsys, "report", runs / "a", "--to", runs / "x.html", code=2)
    line = ", line 1" * (name == "metrics.jsonl")
    assert error.startswith(f"error: {runs}/a/{name}{line}: is damaged, {reason}")
    assert error.count("\n") == 1


def test_a_damaged_run_hides_no_other(runs, capsys):
    done = runs / "a" / "done.json"
    done.write_text("[1]")
    assert run_command(make_parser(), None, ["runs", str(runs)]) == 0
    output = capsys.readouterr()
    assert output.err == f"warning: {done}: is damaged, no JSON object; restore or remove it; the run is left out\n"
    assert f"{runs}/b" in output.out
    assert f"{runs}/a" not in output.out
    (runs / "b" / "done.json").write_text("")
    assert said(capsys, "runs", runs, code=2).startswith(f"error: {done}: is damaged")


def test_a_line_too_long_for_the_terminal_has_its_last_column_below():
    rows = [("state", "step", "run", "differs in"), ("done", "20", "runs/a", "optim.lr=0.004, train.ema_decay=null")]
    wide = ["state  step  run     differs in", "done     20  runs/a  optim.lr=0.004, train.ema_decay=null"]
    assert list(table_lines(rows)) == list(table_lines(rows, 57)) == wide
    below = ["done     20  runs/a", "  optim.lr=0.004,", "  train.ema_decay=null"]
    assert list(table_lines(rows, 32)) == [wide[0], *below]
    rows = [("", "", "a", "optim.lr=0.004, data.path=my-images")]
    assert list(table_lines(rows, 32)) == ["    a", "  optim.lr=0.004,", "  data.path=my-images"]  # no value is cut


def test_a_run_that_is_not_done_has_the_hours_of_its_newest_checkpoint(runs, capsys):
    for step, seconds in ((10, 1800.0), (15, 7200.0)):
        checkpoint.save(runs / "b", state(), position(step, seconds=seconds), RetentionPolicy(2))
        checkpoint.save(runs / "a", state(), position(step, seconds=1.0), RetentionPolicy(2))
    (_, a, b) = csv.reader(io.StringIO(said(capsys, "runs", "csv", runs)))
    assert (a[4], b[4]) == ("1.50", "2.00")
    assert b[1] == "20"  # of its lines
    for minutes, age in ((118, "118 min ago"), (122, "2 h ago")):
        os.utime(runs / "b/metrics.jsonl", (time.time() - 60 * minutes,) * 2)
        assert summarise(runs / "b").state == age
    (runs / "b/metrics.jsonl").write_text('{"step": 17, "split": "event", "event": "stopped"}\n')
    assert (summarise(runs / "b").state, summarise(runs / "b").step) == ("stopped, checkpoint 15", 17)
    assert summarise(runs / "a").state == "done"


def test_only_folders_with_a_recipe_and_an_environment_are_runs_and_none_within_one_is(runs):
    for name in ("recipe.yaml", "environment.json"):
        (runs / f"only/{name[0]}").mkdir(parents=True)
        (runs / f"only/{name[0]}" / name).touch()
    shutil.copytree(runs / "b", runs / "a/within")
    for name in ("p", "c", "z", "k"):
        shutil.copytree(runs / "b", runs / "deep/er" / name)
    assert list(find_runs([runs])) == [runs / "a", runs / "b", *(runs / "deep/er" / name for name in "ckpz")]
    with pytest.raises(InputError, match=r"recipe.yaml: no such folder"):
        list(find_runs([runs / "a/recipe.yaml"]))


def test_evaluations_of_the_average_are_read_under_the_names_of_the_others(runs):
    recipe = load_recipe("digits/mixer")
    where = {"data": recipe.data.path, "split": recipe.data.eval_split}
    lines = [{"split": "eval", "step": step, "loss": 1.0, "top1": step, "ema_loss": 0.5, "ema_top1": step + 0.5}
             for step in (20, 10)]  # fmt: skip
    later = {"step": 10, **where, "loss": 0.1, "top1": 99.0}
    (runs / "b/evaluations.jsonl").write_text(
        "".join(f"{json.dumps(later | {'ema': ema, 'top5': 1.0 + ema})}\n" for ema in (False, True))
    )
    for ema in (False, True):
        early, late = evaluated(runs / "b", lines, recipe, ema)
        assert early == later | {"ema": ema, "top5": 1.0 + ema}
        own = {"loss": 0.5, "top1": 20.5} if ema else {"loss": 1.0, "top1": 20}
        assert late == {"step": 20, **where, **own, "top5": None}


def test_a_run_that_goes_on_is_as_its_last_line_says_and_as_far_as_its_furthest(runs):
    """It was stopped, started again, and rolled back."""
    lines = [
        {"step": 20, "split": "event", "event": "stopped"},
        {"step": 30, "split": "train", "images_per_s": 100.0},
        {"step": 30, "split": "eval", "top1": 0.0},
        {"step": 10, "split": "event", "event": "rollback"},
    ]
    path = runs / "b/metrics.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = summarise(runs / "b")
    assert (found.state, found.step, found.cell("top1"), found.cell("mae")) == ("0 min ago", 30, "0.00", "")
    path.write_text("")
    found = summarise(runs / "b")
    assert (found.state, found.step, found.images_per_s, found.hours) == ("0 min ago", 0, None, None)
    path.unlink()
    assert summarise(runs / "b").state == "no line yet"


def test_the_keys_that_only_one_of_two_recipes_has_are_told_from_those_without_a_value(runs):
    one, other = load_recipe("digits/mixer"), load_recipe("cifar10/resnet")
    rows = dict(differing_keys([one, other, one]))
    only = flat_recipe(other).keys() - flat_recipe(one).keys()
    assert only
    for name in only:
        assert rows[name] == [..., flat_recipe(other)[name], ...]
    assert "train.init_from" not in rows  # None in all
    (runs / "a/recipe.yaml").write_text(dump_recipe(load_recipe("digits/mixer", [("log.images", "0")])))
    (runs / "b/recipe.yaml").write_text(dump_recipe(load_recipe("digits/mixer", [("log.images", "7")])))
    assert compare_recipes(runs / "a", runs / "b") == [("log.images", 0, 7)]
    assert compare_recipes(runs / "b", runs / "a") == [("log.images", 7, 0)]

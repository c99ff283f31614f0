"""A report has each run's result in its place: means over seeds, missing runs, no other recipe's runs."""

import csv
import json
import math
import re
import statistics
from contextlib import nullcontext
from dataclasses import replace

import pytest
from matplotlib.image import imread

from tests.conftest import ROOT
from widemix.cli.parser import make_parser
from widemix.command_line.commands import run_command
from widemix.errors import InputError
from widemix.lease import Holder, Leases
from widemix.markdown import escaped
from widemix.models.cost import model_cost
from widemix.recipe import dump_recipe, load_recipe, recipe_hash
from widemix.studies.page import as_page, write_report
from widemix.studies.plan import state
from widemix.studies.requirements import requirements
from widemix.studies.results import _number, as_csv, collect, lines_of, measured
from widemix.studies.rows import Row, Table, add_core_seconds
from widemix.studies.study import read_study, study_runs_of

STUDY = """
title: Widths
source: a paper, figure 1
claim: Wider is better.
seeds: [0, 1, 2]
runs:
- label: Normal
  recipes: {Digits: ROOT/recipes/digits/s_mixer.yaml}
  axes: {model.channels: [8, 16]}
- label: RP
  recipes: {Digits: ROOT/recipes/digits/rp_s_mixer.yaml}
  axes: {model.channels: [8, 16]}
  seeded: [model.permutation_seed]
figure: {x: width}
published:
- {source: figure 1, line: Normal, points: [[128, 30, 1.5]], digitised: true}
"""


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "widths.yaml"
    path.write_text(STUDY.replace("ROOT", str(ROOT)))
    return path


def pretend(study_run, folder, top1, recipe=None, seconds=2.0, trained=()):
    """A finished run in a run's folder. trained: loss and images/s of each epoch."""
    run = folder / study_run.name
    run.mkdir(parents=True)
    recipe = recipe or study_run.recipe
    (run / "recipe.yaml").write_text(dump_recipe(recipe))
    done = {"top1": top1, "top5": 90.0, "loss": 1.0, "step": 1, "seconds": seconds, "recipe": recipe_hash(recipe)}
    (run / "done.json").write_text(json.dumps(done))
    (run / "environment.json").write_text(json.dumps({"host": "n1", "device": "cpu", "commit": 40 * "c"}))
    lines = [{"split": "eval", "step": s, "epoch": s, "loss": 1.0, "top1": (top1 or 0) - 3 + s} for s in (1, 2, 3)]
    for epoch, (loss, speed) in enumerate(trained, start=1):
        lines.append({"split": "train", "step": epoch, "epoch": epoch, "loss": loss, "images_per_s": speed})
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def results_of(path, folder, **figure):
    parsed = read_study(path)
    parsed = parsed.model_copy(update={"figure": parsed.figure.model_copy(update=figure)})
    study_runs = study_runs_of(path, parsed)
    table = Table(folder / f"{path.stem}.jsonl")
    table.add_finished(study_runs, folder)
    return collect(study_runs, table, parsed), parsed


def test_points_are_means_over_seeds_at_their_widths_and_missing_cells_are_missing(study, tmp_path):
    study_runs = study_runs_of(study, read_study(study))
    values = (60.0, 61.0, 65.0, 70.0, 72.0)  # of Normal: three seeds at C = 8, two of three at C = 16
    for study_run, top1 in zip(study_runs, values, strict=False):
        pretend(study_run, tmp_path, top1)
    (tmp_path / "logs").mkdir()
    add_core_seconds(tmp_path, study_runs[4], 5.5)
    results, parsed = results_of(study, tmp_path)
    lines = lines_of(results, "Digits", "error", parsed.figure)
    first, second = lines["Normal"]
    assert (first.x, second.x) == (16 * 8, 16 * 16)  # one point each: seeds are no points of a line
    assert first.mean == pytest.approx(100 - statistics.fmean(values[:3]))
    assert first.std == pytest.approx(statistics.stdev(values[:3]))
    assert (first.count, second.count, second.wanted) == (3, 2, 3)
    assert [(point.count, math.isnan(point.mean)) for point in lines["RP"]] == [(0, True)] * 2
    rows = list(csv.DictReader(as_csv(results, parsed).splitlines()))
    assert [row["state"] for row in rows] == 5 * ["done"] + 7 * ["missing"]
    assert [row["error"] for row in rows[:6]] == ["40", "39", "35", "30", "28", ""]
    assert [row["seed"] for row in rows[:3]] == ["0", "1", "2"]
    own = {"panel": "Digits", "line": "Normal", "model.channels": "16", "model.permutation_seed": "", "seed": "1"}
    own |= {"width": "256", "error": "28", "top1": "72", "loss": "1", "train_loss": "", "epoch_seconds": "0.666667"}
    own |= {"epochs": f"{study_runs[4].recipe.train.epochs}", "seconds": "2", "core_seconds": "5.5", "state": "done"}
    assert rows[4] == own | {
        "host": "n1",
        "machine": "1 CPU core",
        "commit": 12 * "c",
        "train_loss_over": "steps",
        "run": study_runs[4].name,
    }
    assert [rows[8][name] for name in ("line", "model.permutation_seed", "seconds", "commit")] == ["RP", "2", "", ""]
    assert "\r" not in as_csv(results, parsed)
    page = as_page(results, parsed, "widths.yaml")
    assert "\n\nNo values were searched for each line of this study" in page
    compared = parsed.model_copy(update={"figure": parsed.figure.model_copy(update={"x": "optim.lr"})})
    assert "No values were searched" not in as_page(results, compared, "widths.yaml")
    assert "| 128 | 38.00 ± 2.65 (3) | missing |" in page
    assert "(2 of 3)" in page
    assert "Missing: 7 of 12 runs" in page
    assert "Normal: 128: 30 ± 1.5 [figure 1 (digitised)]" in page
    assert "5 of 12 runs have ended, 0 of them diverged" in page
    assert "a paper, figure 1. The paper's claim: Wider is better.\n" in page
    ours = parsed.model_copy(update={"claim": ""})
    assert "a paper, figure 1.\n" in as_page(results, ours, "widths.yaml")


def test_a_panel_has_its_own_runs_in_the_order_of_x_and_a_row_for_each_point_at_one_x(study, tmp_path):
    recipe = f"{ROOT}/recipes/digits/s_mixer.yaml"
    study.write_text(
        "title: t\nsource: s\nfigure: {x: width}\nruns:\n"
        f"- {{label: A, recipes: {{One: {recipe}, Two: digits/rp_s_mixer}}, axes: {{model.channels: [16, 8]}}}}\n"
        f"- {{label: B, recipes: {{One: {recipe}}}, axes: {{model.channels: [12], optim.lr: [0.1, 0.2]}}}}\n"
    )
    for study_run, top1 in zip(study_runs_of(study, read_study(study)), (70, 60, 71, 61, 65, 67), strict=True):
        pretend(study_run, tmp_path, float(top1))
    results, parsed = results_of(study, tmp_path)
    two = lines_of(results, "Two", "error", parsed.figure)
    assert {line: [(point.x, point.mean) for point in points] for line, points in two.items()} == {
        "A": [(128, 39), (256, 29)]
    }
    page = as_page(results, parsed, "widths.yaml")
    found = re.findall(r"^(\w+): test error .*\n\n\| effective width m \| (.*) \|\n.*\n((?:\|.*\n)*)", page, re.M)
    one, two = found
    assert one[:2] == ("One", "A | B")
    assert one[2].splitlines() == ["| 128 | 40 |  |", "| 192 |  | 35 |", "| 192 |  | 33 |", "| 256 | 30 |  |"]
    assert two == ("Two", "A", "| 128 | 39 |\n| 256 | 29 |\n")
    rows = list(csv.DictReader(as_csv(results, parsed).splitlines()))
    assert {row["seed"] for row in rows} == {""}
    assert [(row["model.channels"], row["optim.lr"]) for row in rows[3:5]] == [("8", ""), ("12", "0.1")]


def test_a_result_of_zero_is_told_where_it_has_no_place(study, tmp_path):
    first, second = study_runs_of(study, read_study(study))[:2]
    for study_run, top1 in ((first, 100.0), (second, 99.0)):
        pretend(study_run, tmp_path, top1)
    results, parsed = results_of(study, tmp_path, log_y=True)
    page = as_page(results, parsed, "widths.yaml")
    lost = [line for line in page.splitlines() if line.startswith("Not plotted")]
    assert lost == [f"Not plotted, since a logarithmic axis has no 0: error of `{first.name}`."]


def test_another_recipes_run_is_no_result(study, tmp_path):
    study_run = study_runs_of(study, read_study(study))[0]
    pretend(study_run, tmp_path, 60.0, load_recipe(study_run.path, [*study_run.overrides, ("optim.lr", "0.7")]))
    results, _ = results_of(study, tmp_path)
    assert results[0].row is None
    assert not study_run.has_ended(tmp_path)
    moved = load_recipe(
        study_run.path, [*study_run.overrides, ("data.path", "/scratch/digits")]
    )  # staged to a node's disk
    (tmp_path / study_run.name / "recipe.yaml").write_text(dump_recipe(moved))
    assert study_run.has_ended(tmp_path)


def test_a_report_keeps_the_results_of_cells_that_were_trained_elsewhere(study, tmp_path, monkeypatch, capsys):
    def widemix(*words):
        monkeypatch.setattr("sys.argv", ["widemix", *map(str, words)])
        code = run_command(make_parser())
        output = capsys.readouterr()
        return code, output.out + output.err

    parsed = read_study(study)
    study_runs = study_runs_of(study, parsed)
    here, there, both, report = (tmp_path / name for name in ("here", "there", "both", "report"))
    for number, study_run in enumerate(study_runs[:5]):
        pretend(study_run, there if number < 3 else here, 60.0 + number)
        pretend(study_run, both, 60.0 + number)
    pretend(study_runs[0], here, 10.0)  # trained twice: the row that is there counts
    assert widemix("study", "report", study, "--to", there, "--report", report)[0] == 0
    assert widemix("study", "report", study, "--to", here, "--report", report)[0] == 0
    assert widemix("study", "report", study, "--to", both, "--report", tmp_path / "whole")[0] == 0
    for name in ("widths.csv", "widths.md"):
        assert (report / name).read_text() == (tmp_path / "whole" / name).read_text()
    first = ("--to", tmp_path / "new", "--only", "*-s_mixer_channels-8_*")
    code, output = widemix("study", "run", study, "--report", report, *first)  # trains none
    assert code == 0
    assert "3 of 3 runs have ended" in output
    (report / "widths.jsonl").write_text('{"run": "x"}\n')
    code, output = widemix("study", "report", study, "--to", here, "--report", report)
    assert code == 2
    assert "widths.jsonl, line 1: is not the line of a run; remove it" in output


def test_a_report_of_a_part_or_with_other_keys_says_so_and_a_part_decides_nothing(study, tmp_path, monkeypatch):
    claim = "claims:\n- {text: RP is better, left: {line: RP}, right: {line: Normal}, expect: less}\n"
    study.write_text(study.read_text() + claim)
    for overrides in ([], [("train.epochs", "3")]):
        for number, study_run in enumerate(study_runs_of(study, read_study(study), overrides)):
            pretend(study_run, tmp_path / "runs", 60.0 + number)
    for options, said, has_claims in (
        ([], "", True),
        (["--only", "*-s_mixer_*"], "--only '*-s_mixer_*'", False),
        (["--train.epochs", "3"], "--train.epochs=3", True),
    ):
        monkeypatch.setattr(
            "sys.argv", ["widemix", "study", "report", str(study), "--to", str(tmp_path / "runs"), *options]
        )
        assert run_command(make_parser()) == 0
        page = (tmp_path / "runs/widths.md").read_text()
        assert ("RP is better" in page) == has_claims
        assert (f"**Not the study as its file has it**, but with `{said}`.") in page or not options
        assert ("Not the study" in page) == bool(options)
        assert f"`{' '.join(filter(None, ['widemix study run widths', said]))}` trains those" in page


def test_values_and_names_share_an_axis(study, tmp_path):
    """Where one line has numbers and another has none, as a Mixer has no model.density."""
    text = study.read_text().replace("rp_s_mixer", "mixer").replace("  seeded: [model.permutation_seed]\n", "")
    study.write_text(text)
    pretend(study_runs_of(study, read_study(study))[0], tmp_path, 60.0)
    results, parsed = results_of(study, tmp_path, x="model.expansion", y=("error",))
    assert {result.x for result in results} == {"None", 2.0}
    (csv_file, png, *_) = write_report(results, parsed, study, tmp_path / "report")
    assert imread(png).shape[2] == 4
    assert csv_file.exists()


def test_points_whose_seeds_deviate_are_left_out(study, tmp_path):
    study_runs = study_runs_of(study, read_study(study))
    for study_run, top1 in zip(study_runs, (60.0, 60.1, 60.2, 70.0, 71.0, 72.0), strict=False):
        pretend(study_run, tmp_path, top1)
    results, parsed = results_of(study, tmp_path, max_std=0.15)
    assert [point.x for point in lines_of(results, "Digits", "top1", parsed.figure)["Normal"]] == [128]
    deviation = statistics.stdev([60.0, 60.1, 60.2])
    for most, kept in ((deviation, []), (math.nextafter(deviation, 1), [128]), (None, [128, 256])):
        figure = parsed.figure.model_copy(update={"max_std": most})
        assert [point.x for point in lines_of(results, "Digits", "top1", figure)["Normal"]] == kept


def test_points_whose_seeds_deviate_are_left_out_also_where_one_diverged(study, tmp_path):
    for study_run, top1 in zip(study_runs_of(study, read_study(study)), (60.0, 70.0, None), strict=False):
        pretend(study_run, tmp_path, top1)
    for most, kept in ((7.0, [256]), (7.1, [128, 256])):  # their deviation is the root of 50
        results, parsed = results_of(study, tmp_path, max_std=most)
        assert [point.x for point in lines_of(results, "Digits", "top1", parsed.figure)["Normal"]] == kept


def test_a_learning_curve_is_the_mean_of_the_evaluations(study, tmp_path):
    study_runs = study_runs_of(study, read_study(study))
    for study_run, top1 in zip([*study_runs[:2], study_runs[6]], (60.0, 64.0, 70.0), strict=True):
        pretend(study_run, tmp_path, top1)
    results, parsed = results_of(study, tmp_path, x="epoch")
    curves = lines_of(results, "Digits", "error", parsed.figure)
    assert {line: [(point.x, point.mean) for point in curve] for line, curve in curves.items()} == {
        "Normal": [(1, 40.0), (2, 39.0), (3, 38.0)],
        "RP": [(1, 32.0), (2, 31.0), (3, 30.0)],
    }
    top1 = lines_of(results, "Digits", "top1", parsed.figure)["Normal"]
    assert [(point.x, point.mean, point.count, point.wanted) for point in top1[1:]] == [(2, 61, 2, 6), (3, 62, 2, 6)]


def test_a_curve_of_the_train_loss_is_that_of_the_epochs_of_training(study, tmp_path):
    for study_run, trained in zip(
        study_runs_of(study, read_study(study)), ([(4, 100), (2, 100)], [(3, 100)]), strict=False
    ):
        pretend(study_run, tmp_path, 60.0, trained=trained)
    results, parsed = results_of(study, tmp_path, x="epoch", y=("train_loss", "loss"))
    found = [lines_of(results, "Digits", name, parsed.figure)["Normal"] for name in parsed.figure.y]
    assert [[(point.x, point.mean) for point in points] for points in found] == [
        [(1, 3.5), (2, 2)],
        [(1, 1), (2, 1), (3, 1)],
    ]


def test_a_line_whose_runs_all_diverged_has_no_result_at_its_last_epoch(study, tmp_path):
    """Its table had their last evaluation before, as if that were of the end."""
    study.write_text(study.read_text().replace("model.channels: [8, 16]", "model.channels: [8]"))
    study_runs = study_runs_of(study, read_study(study))
    for study_run, top1 in zip(study_runs, (60.0, 64.0, None, None, None, None), strict=True):
        pretend(study_run, tmp_path, top1)
    results, parsed = results_of(study, tmp_path, x="epoch", y=("error", "loss"))
    page = as_page(results, parsed, "widths.yaml")
    assert "| last epoch | Normal | RP |\n|---:|---:|---:|\n| 3 | 38.00 ± 2.83 (2 of 3, 1 diverged) |" in page
    assert page.count("| missing, 3 diverged |") == 2
    lost = [result for result in results if result.study_run.line == "RP"]  # as in a panel of its own
    epochs = lost[0].study_run.recipe.train.epochs
    assert f"| last epoch | RP |\n|---:|---:|\n| {epochs} | missing, 3 diverged |" in as_page(lost, parsed, "w.yaml")


def test_a_learning_curve_is_of_one_network(study, monkeypatch, capsys):
    """Not of the mean over the values of an axis, nor over those of two entries with the label of one line."""
    study.write_text(study.read_text().replace("{x: width}", "{x: epoch}"))
    code, output = widemix(monkeypatch, capsys, "study", "plan", study)
    assert code == 2
    assert "figure.x epoch: the line Normal has runs that differ in model.channels" in output
    single = study.read_text().replace("[8, 16]", "[8]")
    study.write_text(single)
    assert widemix(monkeypatch, capsys, "study", "plan", study)[0] == 0
    study.write_text(single.replace("{Digits: ", "{Others: digits/mixer, Digits: ", 1))  # each panel has a curve
    assert widemix(monkeypatch, capsys, "study", "plan", study)[0] == 0
    study.write_text(single.replace("label: RP", "label: Normal"))
    code, output = widemix(monkeypatch, capsys, "study", "plan", study)
    assert code == 2
    assert "figure.x epoch: the line Normal has runs of runs.0 and runs.1" in output


def test_the_report_is_written_and_the_same_twice(study, tmp_path):
    for number, study_run in enumerate(study_runs_of(study, read_study(study))[:8]):
        pretend(study_run, tmp_path, 50.0 + number)
    results, parsed = results_of(study, tmp_path, y=["error", "loss"])
    files = write_report(results, parsed, study, tmp_path / "report")
    assert [path.name for path in files] == ["widths.csv", "widths.png", "widths.svg", "widths.md"]
    before = files[2].read_bytes()
    write_report(results, parsed, study, tmp_path / "report")
    assert files[2].read_bytes() == before


def test_sizes_are_drawn_without_runs(tmp_path):
    path = ROOT / "recipes/studies/figure3.yaml"
    results, parsed = results_of(path, tmp_path)
    assert not parsed.measured
    assert {row["state"] for row in csv.DictReader(as_csv(results, parsed).splitlines())} == {"done"}
    page = as_page(results, parsed, path.name)
    assert re.search(
        r"\n\nComputed on [\d-]+ with `widemix study report \S+/figure3.yaml`, without training.\n$", page
    )
    assert not [word for word in ("Missing", "No values were searched", "±", "(1)") if word in page]
    points = next(iter(lines_of(results, results[0].study_run.panel, "width", parsed.figure).values()))
    best = max(points, key=lambda point: point.mean)
    assert best.x == pytest.approx(1e8 ** (1 / 3), rel=0.05)  # equation 15: C* = S* = Omega^(1/3)
    assert best.mean == pytest.approx(1e8 ** (2 / 3), rel=0.01)


def test_runs_that_ended_elsewhere_are_noted_before_others_are_started(study, digits, tmp_path, capsys):
    """By a job of Slurm, say: nothing is left to train, and the table has them."""
    study.write_text(study.read_text().replace("seeds:", f"set: {{data.path: {digits}}}\nseeds:"))
    study_runs = study_runs_of(study, read_study(study))
    for number, study_run in enumerate(study_runs):
        pretend(study_run, tmp_path / "runs", 50.0 + number)
    table = tmp_path / "tables/widths.jsonl"
    words = ["study", "run", str(study), "--to", str(tmp_path / "runs"), "--report", str(table.parent)]
    assert run_command(make_parser(), argv=words) == 0
    assert f"{table}: 12 of 12 runs have ended\n" in capsys.readouterr().out
    found = {row.run: row.metrics["top1"] for row in Table(table).rows.values()}
    assert found == {study_run.name: 50.0 + number for number, study_run in enumerate(study_runs)}


def test_a_plan_knows_states_hours_and_disk(study, tmp_path, monkeypatch):
    study_runs = study_runs_of(study, read_study(study))
    done, begun, running = study_runs[0], study_runs[1], study_runs[2]
    pretend(done, tmp_path, 50.0)
    (tmp_path / begun.name).mkdir()
    (tmp_path / begun.name / "recipe.yaml").touch()
    leases, table = Leases(tmp_path), Table(tmp_path / "widths.jsonl")
    assert leases.take(running.name)
    states = [state(study_run, tmp_path, leases, table) for study_run in study_runs[:4]]
    assert states[:2] == ["done", "begun"]
    assert states[2].startswith("running on ")
    assert states[3] == "open"
    needs = requirements(study_runs[:3], "v100")
    assert needs[done.name] == needs[begun.name]  # seeds take the same
    model = done.recipe.model
    weights = model_cost(model, 8, 10).parameters
    kept = done.recipe.train.keep_last * (1 + done.recipe.optim.spec.states)
    assert needs[done.name].bytes == 4 * weights * kept
    assert needs[done.name].hours > 0
    monkeypatch.setattr(leases, "holder", lambda _: Holder(1, "", "n1", 1, alive=False))
    assert state(begun, tmp_path, leases, table) == "begun"  # by a process that is gone
    best = read_study(study).model_copy(update={"set": {"train.keep_best": "top1"}})
    [with_best] = requirements(study_runs_of(study, best)[:1], "v100").values()
    assert with_best.bytes == 4 * weights * (kept + 1 + done.recipe.optim.spec.states)
    averaged = read_study(study).model_copy(update={"set": {"train.ema_decay": 0.9, "train.epochs": 300}})
    _, with_average = requirements([study_runs[0], study_runs_of(study, averaged)[0]], "v100").values()
    assert with_average.bytes == 4 * weights * (kept + done.recipe.train.keep_last)
    assert with_average.hours == pytest.approx(10 * needs[done.name].hours, rel=1e-3)
    assert requirements(study_runs[:1], "h100")[done.name].hours < needs[done.name].hours


def test_recipes_with_no_header_have_hours_too(study, tmp_path):
    (tmp_path / "own.yaml").write_text("extends: digits/s_mixer\n")
    recipes = f"{{Digits: {ROOT}/recipes/digits/s_mixer.yaml}}"
    study.write_text(study.read_text().replace(recipes, "{Digits: digits/s_mixer, Own: own.yaml}"))
    shipped, own = [study_runs_of(study, read_study(study))[number] for number in (0, 6)]
    needs = requirements([shipped, own], "v100")
    assert needs[own.name].bytes == needs[shipped.name].bytes


def test_any_label_is_drawn_and_stays_in_its_cell(study, tmp_path):
    label = "_a|b $c_d$ *e* 50 %"
    text = study.read_text().replace("label: RP", f"label: '{label}'").replace("{Digits:", "{'$x|_y':")
    study.write_text(text)
    study_runs = study_runs_of(study, read_study(study))
    for study_run in study_runs:
        pretend(study_run, tmp_path, 60.0)
    results, parsed = results_of(study, tmp_path)
    write_report(results, parsed, study, tmp_path / "report")
    page = (tmp_path / "report" / "widths.md").read_text()
    assert r"| Normal | \_a\|b &#36;c\_d&#36; \*e\* 50 % |" in page
    drawn = (tmp_path / "report" / "widths.svg").read_text()
    assert f"<!--  {label} -->" in drawn  # the text of the legend, which matplotlib draws as outlines
    assert "<!--  $x|_y -->" in drawn


def test_a_table_has_each_column_once_and_whole_numbers_whole(tmp_path):
    path = tmp_path / "sizes.yaml"
    path.write_text(
        f"""
title: t
source: s
runs:
- label: B/16
  recipes: {{ImageNet: {ROOT}/recipes/imagenet/mixer_b16.yaml}}
figure: {{x: parameters, y: [parameters, width]}}
"""
    )
    results, parsed = results_of(path, tmp_path)
    (row,) = csv.DictReader(as_csv(results, parsed).splitlines())
    head = as_csv(results, parsed).splitlines()[0].split(",")
    assert len(head) == len(set(head))
    cost = model_cost(results[0].study_run.recipe.model, 224, 1000)
    assert row["parameters"] == str(cost.parameters) == "59880472"


def test_a_key_that_is_plotted_too_is_one_column_and_numbers_beyond_whole_ones_have_six_digits(study, tmp_path):
    for y in (("model.channels",), ("model.channels", "error")):
        results, parsed = results_of(study, tmp_path, y=y)
        head, first, *_ = csv.reader(as_csv(results, parsed).splitlines())
        assert head.count("model.channels") == 1
        assert first[head.index("model.channels")] == "8"
    shown = [_number(value) for value in (1e15, float(2**53), 1e300, 0.1234567, -3.0, 7, None, math.nan)]
    assert shown == ["1000000000000000", "9.0072e+15", "1e+300", "0.123457", "-3", 7, "", ""]


def test_epochs_that_were_evaluated_divide_the_seconds_or_else_those_of_the_recipe():
    numbers = {"metrics": {}, "core_seconds": None, "images_per_s": None, "commit": "c", "machine": "m", "host": "h"}
    row = Row(run="r", recipe="", state="done", seed=0, split="test", epochs=8, seconds=24.0, date="d", **numbers)
    curve = [{"split": "train", "epoch": 6, "loss": 1.0}, {"split": "eval", "epoch": 4.0, "loss": 1.0}]
    found = [measured(replace(row, curve=own), "epoch_seconds") for own in ([], curve[:1], curve)]
    assert found == [3, 3, 6]
    assert math.isnan(measured(replace(row, seconds=None), "epoch_seconds"))
    assert math.isnan(measured(replace(row, state="diverged", metrics={"loss": 2.0}), "loss"))


def test_a_seed_that_diverged_is_told_from_one_that_is_missing(study, tmp_path):
    first, second, third, *_ = study_runs_of(study, read_study(study))
    pretend(first, tmp_path, 60.0)
    pretend(second, tmp_path, None)  # its last evaluation was not finite
    results, parsed = results_of(study, tmp_path)
    page = as_page(results, parsed, "widths.yaml")
    assert "| 128 | 40 (1 of 3, 1 diverged) |" in page
    assert "2 of 12 runs have ended, 1 of them diverged" in page
    assert third.name in page  # missing


def widemix(monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.argv", ["widemix", *map(str, words)])
    code = run_command(make_parser())
    output = capsys.readouterr()
    return code, output.out + output.err


def test_what_cannot_be_drawn_is_refused_when_the_study_is_read(study, monkeypatch, capsys):
    text = study.read_text()
    for old, new, message in (
        ("{x: width}", "{x: epoch, y: [parameters]}", "parameters has no value for each epoch"),
        ("{x: width}", "{x: epoch, y: [epoch_seconds]}", "epoch_seconds has no value for each epoch"),
        ("{x: width}", "{x: epoch, max_std: 2}", "max_std leaves out points"),
        (
            "axes: {model.channels: [8, 16]}\nfigure: {x: width}",
            "axes: {optim.weight_decay: [0, 0.1]}\nfigure: {x: optim.weight_decay, log_x: true}",
            "optim.weight_decay is 0.0 at",
        ),
    ):
        study.write_text(text.replace("  seeded: [model.permutation_seed]\n", "").replace(old, new, 1))
        code, output = widemix(monkeypatch, capsys, "study", "plan", study)
        assert (code, message in output) == (2, True), output


def test_a_study_of_a_recipe_with_plugins_is_planned(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_parts.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    names = set()
    for plugins in ("", "plugins: [own_parts]\n"):
        (tmp_path / "own.yaml").write_text(f"extends: {ROOT}/recipes/digits/mixer.yaml\n{plugins}")
        (tmp_path / "study.yaml").write_text(
            "title: t\nsource: s\nruns:\n- {label: a, recipes: {Digits: own.yaml}}\nfigure: {x: width}\n"
        )
        code, output = widemix(monkeypatch, capsys, "study", "plan", tmp_path / "study.yaml")
        assert code == 0, output
        names.add(output)
    assert len(names) == 2  # another experiment: the plug-in may change any number


def test_published_points_with_and_without_a_deviation_are_plotted_together(study, tmp_path):
    study.write_text(study.read_text().replace("[[128, 30, 1.5]]", "[[128, 30, 1.5], [256, 28]]"))
    results, parsed = results_of(study, tmp_path)
    write_report(results, parsed, study, tmp_path / "report")
    assert "128: 30 ± 1.5; 256: 28" in (tmp_path / "report/widths.md").read_text()
    text = study.read_text().replace("source: figure 1, line: Normal,", "source: t, text: so, panel: P, line: RP,")
    study.write_text(text.replace("digitised: true", "digitised: false"))
    assert "\n- P, RP: so 128: 30 ± 1.5; 256: 28 [t]\n" in as_page(results, read_study(study), "w.yaml")
    study.write_text(text.replace("panel: P, line: RP, points: [[128, 30, 1.5], [256, 28]], digitised: true", ""))
    assert "\n- so [t]\n" in as_page(results, read_study(study), "w.yaml")


@pytest.mark.parametrize(
    ("points", "scale", "words"),
    [
        ("[1, 2, -1]", "", "published: figure 1: the standard deviation -1 is negative"),
        ("[0, 2]", ", log_x: true", "published: figure 1: x is 0, which a logarithmic axis has not"),
        ("[1, -2]", ", log_y: true", "published: figure 1: y is -2, which a logarithmic axis has not"),
        ("[1, 0]", ", log_y: true", "published: figure 1: y is 0, which a logarithmic axis has not"),
        ("[0, 2]", ", log_y: true", ""),
        ("[1, 0]", ", log_x: true", ""),
        ("[1, 2, 0]", "", ""),
        ("[1]", "", "published.0.points.0: "),
        ("[1, 2, 3, 4]", "", "published.0.points.0: "),
    ],
)
def test_published_points_that_cannot_be_plotted_are_refused(study, points, scale, words):
    text = study.read_text().replace("[128, 30, 1.5]", points).replace("{x: width}", f"{{x: width{scale}}}")
    study.write_text(text)
    with pytest.raises(InputError, match=words) if words else nullcontext():
        read_study(study)


def test_texts_of_a_report_are_shown_as_they_are(study, tmp_path):
    """In one line each, whatever Markdown makes of their characters."""
    text = study.read_text().replace("title: Widths", r'title: "# [a](b) $x$\n~c~ <b> &amp;"')
    study.write_text(text.replace("source: a paper", "source: 1. paper_of_*me*"))
    results, parsed = results_of(study, tmp_path)
    title, source, *_ = as_page(results, parsed, "my study.yaml").split("\n\n")
    assert title == r"# \# \[a\](b) &#36;x&#36; &#126;c&#126; &lt;b> \&amp;"
    assert source.startswith(r"1\. paper\_of\_\*me\*, figure 1.")
    assert "](my%20study.png)" in as_page(results, parsed, "my study.yaml")
    assert [escaped(text) for text in ("A & B &c", "&#36; &lt;", "12. a", "a 1. b", "- a")] == [
        *("A & B &c", r"\&#36; \&lt;", r"12\. a", "a 1. b", r"\- a")
    ]

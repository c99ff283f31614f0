"""Keys under their names of an earlier release: read, with one line of warning, as the same experiment."""

import json
import subprocess
import sys

import pytest
import yaml

from tests.conftest import ROOT
from widemix.errors import InputError
from widemix.recipe import dump_recipe, experiment_hash, keys, load_recipe, load_stored_recipe, parse_recipe
from widemix.recipe.renamed import RENAMED
from widemix.studies.plan import make_plan
from widemix.studies.rows import Table
from widemix.studies.study import is_study, read_study

DIGITS = ROOT / "recipes/digits/mixer.yaml"
WARNING = "engine.kernels is now called engine.memory_layout; the next release does not read the old name\n"


@pytest.fixture(autouse=True)
def not_warned(monkeypatch):
    monkeypatch.setenv("WIDEMIX_RENAMED_KEYS", "")


def as_before(recipe) -> dict:
    """The recipe as a version before the rename of engine.kernels stored it."""
    values = yaml.safe_load(dump_recipe(recipe))
    values["engine"]["kernels"] = values["engine"].pop("memory_layout")
    return values


def test_each_renamed_key_has_its_values_under_both_names(capsys):
    known = keys()
    assert RENAMED.keys().isdisjoint(known)
    for old, new in RENAMED.items():
        value = json.dumps({"data.memory_gib": 2}.get(new, known[new].default))
        assert load_recipe(DIGITS, [(old, value)]) == load_recipe(DIGITS, [(new, value)]), old
        assert capsys.readouterr().err.startswith(f"warning: the command line: {old} is now called {new};")


def test_how_many_skips_and_rollbacks_were_allowed_is_still_allowed():
    faults = load_recipe(DIGITS, [("faults.skips", "17"), ("faults.rollbacks", "5")]).faults
    assert (faults.max_skipped_steps, faults.max_rollbacks) == (17, 5)


def test_checkpoints_are_written_and_kept_as_often():
    """Three keys whose old names are alike."""
    recipe = load_recipe(DIGITS, [("train.save_every", "5"), ("train.keep", "3"), ("train.keep_every", "10")])
    assert (recipe.train.save_every_steps, recipe.train.keep_last, recipe.train.keep_every_steps) == (5, 3, 10)


def test_a_file_and_those_that_extend_it_may_differ_in_spelling(tmp_path, capsys):
    base, path = tmp_path / "base.yaml", tmp_path / "recipe.yaml"
    base.write_text(f"extends: {DIGITS}\nengine: {{kernels: plain, kind: fsdp}}\n")
    path.write_text("extends: base.yaml\nengine: {memory_layout: batch_last}\n")
    for _ in range(2):
        recipe = load_recipe(path)
        assert (recipe.engine.memory_layout, recipe.engine.kind) == ("batch_last", "fsdp")
    assert load_recipe(path, [("engine.kernels", "auto")]).engine.memory_layout == "auto"
    assert capsys.readouterr().err == f"warning: {base}: {WARNING}"  # once


def test_each_old_name_is_warned_of_once(capsys):
    for _ in range(2):
        load_recipe(DIGITS, [("engine.kernels", "plain"), ("train.keep", "3")])
    warned = [line.split(" is now ")[0] for line in capsys.readouterr().err.splitlines()]
    assert warned == [f"warning: the command line: {name}" for name in ("engine.kernels", "train.keep")]


def test_a_recipe_is_warned_of_and_what_a_run_keeps_is_not(tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(as_before(load_recipe(DIGITS))))
    assert load_stored_recipe(path) == load_recipe(DIGITS)
    assert capsys.readouterr().err == ""
    assert load_recipe(path) == load_recipe(DIGITS)
    assert capsys.readouterr().err == f"warning: {path}: {WARNING}"


def test_both_names_in_one_file_are_an_error(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"extends: {DIGITS}\nengine: {{kernels: plain, memory_layout: plain}}\n")
    with pytest.raises(
        InputError, match=r"engine.kernels and engine.memory_layout are one key; remove engine.kernels"
    ):
        load_recipe(path)


def test_a_stored_recipe_is_read_without_a_warning(tmp_path, capsys):
    recipe = load_recipe(DIGITS, [("engine.memory_layout", "plain")])
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(as_before(recipe)))
    values = as_before(recipe)
    assert load_stored_recipe(tmp_path / "recipe.yaml") == parse_recipe(values) == recipe
    assert values == as_before(recipe)  # which are the caller's
    assert capsys.readouterr().err == ""


def test_a_section_that_is_text_with_an_old_name_in_it_is_reported_as_a_wrong_section(tmp_path):
    path = tmp_path / "recipe.yaml"
    for text in ("kernels", "[kernels]"):
        path.write_text(f"extends: {DIGITS}\nengine: {text}\n")
        with pytest.raises(InputError, match=r"recipe.yaml: engine .*: input should be a mapping of keys"):
            load_recipe(path)


def test_a_wrong_value_is_reported_under_the_new_name():
    with pytest.raises(InputError, match=r"the command line: engine.memory_layout 'fast'"):
        load_recipe(DIGITS, [("engine.kernels", "fast")])


def test_the_hashes_are_those_of_the_version_before():
    assert experiment_hash(load_recipe(DIGITS)) == "5b0cd099d1"
    assert experiment_hash(load_recipe(DIGITS, [("engine.kernels", "plain")])) == "5b0cd099d1"


def test_only_rank_0_warns_and_not_again_after_the_command_that_started_it():
    code = f"from widemix.recipe import load_recipe; load_recipe({str(DIGITS)!r}, [('engine.kernels', 'plain')])"
    for variables, said in (({}, WARNING), ({"RANK": "1"}, ""), ({"WIDEMIX_RENAMED_KEYS": "engine.kernels"}, "")):
        environment = {"PYTHONPATH": str(ROOT), **variables}
        ran = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert ran.stderr == (f"warning: the command line: {said}" if said else "")


def test_a_study_in_the_old_spelling_has_the_runs_that_it_had(tmp_path, capsys):
    path = tmp_path / "study.yaml"
    path.write_text(
        "title: Layouts\nsource: none\n"
        f"runs: [{{label: all, recipes: {{digits: {DIGITS}}}, axes: {{engine.kernels: [plain, batch_last]}}}}]\n"
        "figure: {x: engine.kernels}\n"
    )
    study_runs = make_plan(path, read_study(path), Table(tmp_path / "study.jsonl"), (), "*").study_runs
    assert [study_run.name for study_run in study_runs] == [
        "digits-mixer_kernels-plain_5b0cd099d1",
        "digits-mixer_kernels-batch_last_5b0cd099d1",
    ]
    assert [study_run.recipe.engine.memory_layout for study_run in study_runs] == ["plain", "batch_last"]
    assert capsys.readouterr().err == f"warning: {path}: {WARNING}"
    with pytest.raises(InputError, match="varies it"):
        make_plan(path, read_study(path), Table(tmp_path / "study.jsonl"), [("engine.memory_layout", "plain")], "*")


def test_a_study_that_says_cells_is_read(tmp_path, capsys):
    path = tmp_path / "study.yaml"
    path.write_text(
        f"title: t\nsource: s\ncells: [{{label: a, recipes: {{Digits: {DIGITS}}}}}]\nfigure: {{x: model.depth}}\n"
    )
    assert is_study(path)
    assert [group.label for group in read_study(path).runs] == ["a"]
    with pytest.raises(InputError, match="is a study, not a recipe"):
        load_recipe(path)
    said = "cells is now called runs; the next release does not read the old name\n"
    assert capsys.readouterr().err == f"warning: {path}: {said}"

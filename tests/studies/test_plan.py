# ruff: noqa: F401, F811 - `study` is a fixture
"""What `widemix study plan` prints: the state of each run, and the hours and bytes of those that have not ended."""

from types import SimpleNamespace

import pytest

from tests.conftest import ROOT
from tests.studies.test_report import pretend, study, widemix
from tests.studies.test_search import STUDY as SEARCHED
from widemix.cli.study import _gpus
from widemix.formats.manifest import read_manifest
from widemix.studies import requirements
from widemix.studies.requirements import Requirements
from widemix.studies.study import read_study, study_runs_of


def test_a_plan_adds_up_what_the_runs_take_that_have_not_ended(study, tmp_path, monkeypatch, capsys):
    study_runs = study_runs_of(study, read_study(study))
    for number, top1 in ((0, 50.0), (3, None)):  # done, and diverged
        pretend(study_runs[number], tmp_path / "runs", top1)
    needs = {
        study_run.name: Requirements(None if number == 4 else 1.5**number, 7**number * 10**6)
        for number, study_run in enumerate(study_runs)
    }
    monkeypatch.setattr("widemix.studies.requirements.requirements", lambda runs, gpu: needs)
    code, output = widemix(monkeypatch, capsys, "study", "plan", study, "--to", tmp_path / "runs", "--gpu", "h100")
    assert code == 0, output
    lines = dict(zip((study_run.name for study_run in study_runs), output.splitlines(), strict=False))
    for number, (name, line) in enumerate(lines.items()):
        first = {0: "done", 3: "diverged"}.get(number, "open")
        assert line.split() == [first, "?" if number == 4 else f"{1.5**number:.2f}", "h", name]
    ended, rest = output.splitlines()[len(study_runs) :]
    assert ended == f"{tmp_path / 'runs'}: 2 of {len(study_runs)} runs have ended"
    left = [number for number in range(len(study_runs)) if number not in (0, 3)]
    hours, size = sum(1.5**n for n in left if n != 4), sum(7**n for n in left) / 1000
    assert rest == f"the others take {hours:.1f} hours on one h100, {size:.2f} GB of checkpoints"


def test_trials_of_a_search_come_before_its_runs_by_default_in_a_folder_of_the_studys_name(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rates.yaml").write_text(SEARCHED.replace("ROOT", str(ROOT)))
    needs = Requirements(1.5, 2 * 10**9)
    monkeypatch.setattr(
        "widemix.studies.requirements.requirements", lambda runs, gpu: {run.name: needs for run in runs}
    )
    code, output = widemix(monkeypatch, capsys, "study", "plan", "rates.yaml", "--gpu", "a100")
    assert code == 0, output
    *lines, ended, trials, rest = output.splitlines()
    notes = [line.split()[:4] for line in lines]
    assert notes == 9 * [["open", "1.50", "h", "trial"]] + 9 * [["open", "1.50", "h", "run"]]
    assert ended == "runs/rates: 0 of 9 runs have ended"
    assert trials.startswith("9 trials of the search come first")
    assert rest == "the others take 27.0 hours on one a100, 36.00 GB of checkpoints"


def test_runs_that_have_ended_are_put_into_the_table_of_their_folder(study, tmp_path, monkeypatch, capsys):
    pretend(study_runs_of(study, read_study(study))[2], tmp_path / "runs", 50.0)
    code, output = widemix(monkeypatch, capsys, "study", "plan", study, "--to", tmp_path / "runs")
    assert (code, (tmp_path / "runs/widths.jsonl").read_text().count("\n")) == (0, 1), output
    assert [line.split()[0] for line in output.splitlines()[:4]] == ["open", "open", "done", "open"]


@pytest.mark.parametrize("verb", ["plan", "run", "search", "baselines"])
def test_what_shows_sizes_of_networks_alone_is_not_trained(study, monkeypatch, capsys, verb):
    study.write_text(study.read_text().replace("{x: width}", "{x: width, y: [parameters]}"))
    code, output = widemix(monkeypatch, capsys, "study", verb, study)
    assert code == 2
    assert "shows sizes of networks alone; `widemix study report` plots it" in output


def test_what_the_runs_lack_is_said_before_any_is_trained(study, digits, tmp_path, monkeypatch, capsys):
    limits = ("--low", "0.1", "--high", "1")
    splits = ", ".join(read_manifest(digits).splits)
    monkeypatch.setattr("widemix.studies.runner.Runner", None)
    for verb, words, said in (
        ("run", ("--ranks", "7"), "7"),
        (
            "run",
            ("--data.path", digits, "--data.eval_split", "dev"),
            f"{digits}: has no split dev, it has {splits}\n",
        ),
        ("search", ("--data.path", digits, *limits), f"has no split holdout, it has {splits}; `widemix prep --hold"),
        ("search", ("--data.path", digits, *limits, "--split", "dev"), f"has no split dev, it has {splits}\n"),
        ("run", ("--data.path", tmp_path / "no"), f"{tmp_path}/no: no such folder"),
    ):
        code, output = widemix(monkeypatch, capsys, "study", verb, study, "--to", tmp_path / "runs", *words)
        assert (code, said in output) == (2, True), output
        assert not (tmp_path / "runs").exists()


def test_the_gpus_of_a_study_are_those_that_the_command_may_use(monkeypatch):
    for text, expected in (("2,GPU-a", ["2", "GPU-a"]), ("", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        assert _gpus() == expected
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert _gpus() == ["0", "1", "2"]


def test_hours_are_of_the_samples_of_the_prepared_data_and_without_any_of_the_headers(tmp_path, monkeypatch):
    recipe, asked = tmp_path / "recipe.yaml", []
    recipe.write_text("#   cost      `widemix cost recipe.yaml --samples 50000`\n")
    monkeypatch.setattr(requirements, "estimate", lambda recipe, cluster, samples: asked.append(samples) or [])
    of_recipe = SimpleNamespace(data=SimpleNamespace(path=str(tmp_path)))
    for _ in range(2):
        assert requirements._hours(SimpleNamespace(path=recipe, recipe=of_recipe), "v100") is None
        (tmp_path / "manifest.json").touch()
    assert asked == [50000, None]

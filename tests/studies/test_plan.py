# ruff: noqa: F401, F811 - `study` is a fixture
"""What `widemix study plan` prints: the state of each run, and the hours and bytes of those that have not ended."""

from tests.studies.test_report import pretend, study, widemix
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

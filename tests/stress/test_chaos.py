"""Runs with killed ranks, damaged files, full disks and invalid data, in real processes: what they leave behind."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.conftest import train_lines
from tests.engine.plain import plain_loop
from tests.faults.ranks import ranks
from tests.stress.chaos import short, undisturbed
from widemix.data.loader import TrainLoader
from widemix.distributed.topology import read_topology
from widemix.models.registry import build_model
from widemix.recipe import load_recipe
from widemix.training.schedule import build_schedule


@pytest.fixture(scope="module")
def chaos(digits, tmp_path_factory) -> Path:
    """The run folders of the short form, in which every run that could end is complete with the undisturbed curve."""
    folder = tmp_path_factory.mktemp("chaos")
    short(digits, folder, undisturbed(digits, folder / "clean"))
    return folder


def events(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == "event"]


@pytest.mark.long
def test_ranks_change_across_kills_damage_full_disks_and_stops(chaos):
    for name in ("ddp", "ZeRO-1"):
        said = (chaos / f"{name}.log").read_text()
        # The stop comes while the save of step 24 is being written, beside which training goes on.
        for number, step in (("4 ranks", "8"), ("1 rank", "12"), ("3 ranks", "2[5-9]")):
            assert re.search(f"at step {step} to 36 steps on {number}", said)
        assert re.search(r"00000016/(model|optimizer)\.safetensors: is damaged .*; an older checkpoint is used", said)
        assert "No space left on device" in said
        assert "stopped with a checkpoint" in said
        assert json.loads((chaos / name / "done.json").read_text())["step"] == 36


@pytest.mark.long
def test_restarted_ranks_see_nothing_of_attempts_before(chaos):
    """Two of them are killed; `chaos` has compared the curve with the undisturbed one."""
    said = (chaos / "killed.log").read_text()
    assert said.count(" steps on 2 ranks\n") == 3
    assert said.count("SIGKILL\n") == 2  # of the agent: nothing else ended a rank
    assert "no checkpoint was saved" not in said


@pytest.mark.long
def test_a_loader_that_hangs_leaves_all_stacks(chaos):
    for rank in (0, 1):
        stacks = (chaos / f"hangs/stacks/rank-{rank}.txt").read_text()
        assert f"rank {rank} on " in stacks
        assert "no step or batch was finished in 30 s" in stacks
        assert "in advance" in stacks
        assert (" in faulty\n" in stacks) == (rank == 1)  # the loader's thread, where it stands
    assert "no step or batch was finished in 30 s; the stacks are in" in (chaos / "hangs.log").read_text()
    assert not any(path.stat().st_size for path in (chaos / "ddp").glob("stacks/*"))  # killed, not hung


@pytest.mark.long
def test_a_failing_rank_shows_its_traceback_alone(chaos):
    said = (chaos / "raises.log").read_text().splitlines()
    assert said.count("OSError: [Errno 5] Input/output error") == 1
    assert said.count("Traceback (most recent call last):") == 1
    (other,) = (line for line in said if line.startswith("error:"))
    assert other.startswith("error: rank 1 on ")
    assert "[Errno 5] Input/output error; so this rank ends" in other


@pytest.mark.long
def test_images_that_are_nan_are_skipped_and_nothing_else_changes(chaos, digits):
    """Two steps in a row are skipped; of six the run rolls back after four, excludes these and skips the others."""
    found = [(e["event"], e["step"], e.get("skipped_ranges")) for e in events(chaos / "nan")]
    assert found == [
        ("step_skipped", 7, None),
        ("step_skipped", 8, None),
        ("rollback", 12, [13, 17]),
        ("step_skipped", 14, None),
        ("step_skipped", 15, None),
    ]
    assert json.loads((chaos / "nan/skipped_ranges.json").read_text()) == [[13, 17]]

    data_steps = [number for number in range(29) if not 13 <= number < 17][:20]  # the data of step 1, 2, ...
    recipe = load_recipe(chaos / "nan/recipe.yaml")
    train = recipe.train
    loader = TrainLoader(recipe.data, recipe.augment, train, read_topology())
    with loader.batches(0) as batches:
        everything = [(batch.inputs, batch.targets) for batch in batches]
    schedule = build_schedule(recipe.schedule, recipe.optim.lr, loader.steps, train.epochs)
    steps = [(step, number) for step, number in enumerate(data_steps) if number not in (6, 7, 17, 18)]
    torch.manual_seed(train.seed)
    model = build_model(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    expected = plain_loop(
        model, [everything[number] for _, number in steps], [schedule(step) for step, _ in steps], optim=recipe.optim
    )
    losses = {line["step"]: line["loss"] for line in train_lines(chaos / "nan")}
    assert [losses[step + 1] for step, _ in steps] == pytest.approx(expected, rel=1e-5)
    assert not {7, 8, 14, 15} & losses.keys()
    assert max(losses) == 36


def test_a_renamed_run_folder_ends_the_run(digits, tmp_path):
    run = tmp_path / "run"
    codes, said = ranks(2, "rename@7", digits, run, "--train.save_every_steps", "5").wait()
    assert 1 in codes, said
    assert f"error: {run}: was renamed or removed while the run wrote to it; move it back" in said
    assert "Traceback" not in said
    assert not run.exists()
    assert (tmp_path / "elsewhere/checkpoints/00000005/COMPLETE").exists()

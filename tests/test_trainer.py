"""How a run begins and ends: what is said, written and removed, and by which rank."""

import json
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import ROOT
from tests.run.test_checkpoint import position, state
from widemix import trainer
from widemix.distributed.topology import Topology
from widemix.errors import Exit, InputError
from widemix.recipe import load_recipe, recipe_hash
from widemix.run import checkpoint
from widemix.run.checkpoint import RetentionPolicy
from widemix.run.run_dir import ResumeState


def rank(number: int = 0, world: int = 1, verbosity: int = 0, **keys: str) -> trainer._Rank:
    recipe = load_recipe(
        ROOT / "recipes/digits/mixer.yaml", [(k.replace("__", "."), value) for k, value in keys.items()]
    )
    topology = Topology(number, world, number, world, torch.device("cpu"))
    return trainer._Rank(
        recipe, topology, SimpleNamespace(), SimpleNamespace(), SimpleNamespace(), verbosity, ExitStack()
    )


def saved(run, step: int = 3):
    run.mkdir(exist_ok=True)
    return checkpoint.read(checkpoint.save(run, state(), position(step), RetentionPolicy(9)))


def test_rank_0_says_all_unless_only_warnings_are_wanted_and_no_other_says_anything(capsys):
    for number, verbosity, lines in ((0, 0, ["a", "warning: b", "c"]), (0, -1, ["warning: b", "c"]), (1, 1, [])):
        one = rank(number, 2, verbosity)
        one.note("a")
        one.warn("b")
        one.print("c")
        assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.parametrize("world", [1, 3])
def test_a_run_says_from_where_to_where_it_trains_on_how_many_ranks(tmp_path, capsys, world):
    trainer._begin(rank(world=world), ResumeState(tmp_path / "run"), 9)
    ranks = "1 rank" if world == 1 else "3 ranks"
    assert capsys.readouterr().err == f"{tmp_path}/run: training for 9 steps on {ranks}\n"
    origin = saved(tmp_path / "run")
    trainer._begin(rank(world=world), ResumeState(tmp_path / "run", origin), 9)
    assert f"training from {origin.path} at step 3 to 9 steps on {ranks}\n" in capsys.readouterr().err


def test_damaged_checkpoints_are_warned_of_with_what_is_used_instead(tmp_path, capsys):
    origin, problems = saved(tmp_path / "run"), ["5: is damaged", "4: is damaged"]
    for start, instead in ((origin, "an older checkpoint is used"), (None, "so training starts anew")):
        trainer._begin(rank(verbosity=-1), ResumeState(tmp_path / "run", start, problems=problems), 9)
        said = capsys.readouterr().err.splitlines()
        assert [line.partition(";")[0] for line in said] == ["warning: 5: is damaged", "warning: 4: is damaged"]
        assert all(line.endswith(instead) for line in said)


@pytest.mark.parametrize("number", [0, 1])
def test_rank_0_removes_the_result_of_a_run_that_goes_on_and_writes_what_it_trains_now(
    tmp_path, number, capsys, monkeypatch
):
    """The result last: one that is killed before would go on under what it was."""
    describe, there = trainer.describe_start, []

    def describes(*given):
        there.append((tmp_path / "done.json").exists())
        describe(*given)

    monkeypatch.setattr(trainer, "describe_start", describes)
    (tmp_path / "done.json").write_text("{}")
    start = ResumeState(tmp_path, saved(tmp_path), {"step": 3}, {"host": "here"})
    trainer._begin(rank(number, 2, -1, train__epochs="77"), start, 9)
    assert there == [True] * (number == 0)
    said = f"{tmp_path}: was complete after 3 steps; its done.json is removed\n"
    assert capsys.readouterr().err == (said if number == 0 else "")
    assert (tmp_path / "done.json").exists() is (number == 1)
    assert (tmp_path / "recipe.yaml").exists() is (number == 0)
    if number == 0:
        assert "epochs: 77" in (tmp_path / "recipe.yaml").read_text()
        assert json.loads((tmp_path / "environment.json").read_text()) == {"host": "here"}


@pytest.mark.parametrize("number", [0, 1])
def test_rank_0_keeps_the_checkpoint_of_another_run_or_says_that_it_could_not(tmp_path, capsys, monkeypatch, number):
    origin, run = saved(tmp_path / "base"), tmp_path / "run"
    run.mkdir()
    trainer._begin(rank(number, 2), ResumeState(run, origin), 9)
    kept = [path.name for path in checkpoint.complete_checkpoints(run)]
    assert kept == (["00000003"] if number == 0 else [])
    assert "could not be kept" not in capsys.readouterr().err
    (run / "origin.json").unlink(missing_ok=True)
    (run / "origin.json").mkdir()
    trainer._begin(rank(number, 2), ResumeState(run, origin), 9)
    assert ("warning: " in capsys.readouterr().err) is (number == 0)

    def full(start):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer, "keep_origin", full)
    trainer._begin(rank(number, 2), ResumeState(run, origin), 9)
    said = f"{run}: the checkpoint that it starts from could not be kept there ([Errno 28] No space left on device)\n"
    assert (said in capsys.readouterr().err) is (number == 0)


def test_an_engine_has_the_checkpoints_state_which_is_not_verified_again_and_its_settings_are_kept(
    tmp_path, monkeypatch
):
    loaded = []
    engine = SimpleNamespace(config={"a": 1}, load=loaded.append)
    monkeypatch.setattr(trainer, "build_engine", lambda *_: engine)
    origin = saved(tmp_path)
    mark = origin.path / "COMPLETE"
    mark.write_text("{}")  # what rank 0 has verified
    for number, start in ((1, origin), (0, origin), (0, None)):
        one = rank(number, 2)
        assert (
            trainer._build_engine(one.recipe, torch.nn.Identity(), ResumeState(tmp_path, start), one.topology)
            is engine
        )
        assert (tmp_path / "deepspeed.json").exists() is (number == 0)
    assert [each.model["fc.bias"].tolist() for each in loaded] == [[1, 1, 1]] * 2
    assert json.loads((tmp_path / "deepspeed.json").read_text()) == {"a": 1}
    (tmp_path / "deepspeed.json").unlink()
    engine.config = None
    trainer._build_engine(one.recipe, torch.nn.Identity(), ResumeState(tmp_path), one.topology)
    assert not (tmp_path / "deepspeed.json").exists()


def test_only_rank_0_traces_and_only_steps_that_the_run_has(tmp_path, monkeypatch):
    made = []

    def profiler(*words):
        made.append(words)
        return ExitStack()

    monkeypatch.setattr(trainer, "Profiler", profiler)
    assert trainer._open_profiler(rank(), tmp_path, 9) is None
    assert trainer._open_profiler(rank(1, 2, train__profile="8:20"), tmp_path, 9) is None
    assert made == []
    assert trainer._open_profiler(rank(0, 2, train__profile="8:20"), tmp_path, 9) is not None
    assert made == [(tmp_path, 8, 20)]
    for number in (0, 1):
        with pytest.raises(InputError, match="the run ends after 8 steps"):
            trainer._open_profiler(rank(number, 2, train__profile="8:20"), tmp_path, 8)


@pytest.mark.parametrize("number", [0, 1])
def test_a_run_ends_with_its_result_by_rank_0_or_asks_to_be_started_again(tmp_path, capsys, number):
    one = rank(number, 2, verbosity=-1)
    for failing, how in ((False, "stopped with a checkpoint"), (True, "stopped while steps fail")):
        assert trainer._finish(one, tmp_path, None, failing) == Exit.REQUEUE
        assert (how in capsys.readouterr().err) is (number == 0)
    assert list(tmp_path.iterdir()) == []
    result = {"loss": 1.0, "top1": 62.5, "step": 9, "seconds": 12.34}
    assert trainer._finish(one, tmp_path, result, False) == Exit.DONE
    assert ("done, top-1 62.50 % after 12.3 s" in capsys.readouterr().err) is (number == 0)
    if number == 0:
        assert json.loads((tmp_path / "done.json").read_text()) == result | {"recipe": recipe_hash(one.recipe)}
    else:
        assert list(tmp_path.iterdir()) == []


def test_a_complete_run_may_go_on_from_its_own_checkpoint(tmp_path):
    """And one that goes on from another's needs more steps than that has made."""
    recipe, own = rank().recipe, saved(tmp_path / "run")
    trainer._check_something_is_left(recipe, ResumeState(tmp_path / "run", own, {"step": 3}), 3)
    trainer._check_something_is_left(recipe, ResumeState(tmp_path / "other", own), 4)
    with pytest.raises(InputError, match="is at step 3, and this run would end at step 3"):
        trainer._check_something_is_left(recipe, ResumeState(tmp_path / "other", own), 3)
    for steps, key in (("3", "train.max_steps"), ("99", "train.epochs")):
        recipe = rank(train__max_steps=steps).recipe
        with pytest.raises(InputError, match=f"; raise {key}, or take its weights alone"):
            trainer._check_something_is_left(recipe, ResumeState(tmp_path / "other", own), 3)
    with pytest.raises(InputError, match="is complete, and has no checkpoint from which to go on to step 4"):
        trainer._check_something_is_left(recipe, ResumeState(tmp_path / "run", None, {"step": 3}), 4)


def test_what_cannot_be_printed_stops_no_run(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("builtins.print", full)
    rank().warn("a")

"""train.patience_epochs: a run whose metric gains no more ends, however it was interrupted, and says so."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.conftest import Fork, train_lines
from tests.unequal import TINY, options_of, prepare_unequal
from widemix.recipe.sections import TrainSection
from widemix.run.records import Gains

SMALL = TINY | {
    "augment.mixup": 0,
    "optim.lr": 0.01,
    "train.epochs": 30,
    "train.global_batch": 16,
    "train.keep_best": "loss",
    "train.patience_epochs": 3,
    "train.patience_gain": 0.02,
    "log.every": 3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    counts = {"ant": 20, "bee": 14}
    return prepare_unequal(tmp_path_factory.mktemp("data"), {"train": counts, "val": counts})


@pytest.fixture
def start(folder, train):
    """start(run, key=value, ..., world=N) -> what it printed."""

    def started(run: str, world: int = 1, **changes: object) -> str:
        keys = SMALL | {"data.path": folder} | {name.replace("__", "."): value for name, value in changes.items()}
        code, said = train(run, *options_of(keys), recipe="base/own_images", world=world).wait()
        assert code == 0, said
        return said

    return started


def read(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.mark.parametrize("changes", [{}, {"train__keep_best": "ema_loss", "train__ema_decay": 0.6}], ids=["", "ema"])
def test_a_run_resumed_on_other_ranks_ends_alike(start, tmp_path, changes):
    said = start("whole", **changes)
    done = read(tmp_path / "whole/done.json")
    gains, losses = done["ended_early"], evaluated(tmp_path / "whole", changes.get("train__keep_best", "loss"))
    assert gains["last_epoch"] == len(losses) == plain_end(losses, 3, 0.02, False) < 30
    assert gains["best"] == losses[gains["best_epoch"] - 1]
    assert f"done, top-1 {done['top1']:.2f} %" in said
    assert f"ended early, after epoch {gains['last_epoch']}: best loss {gains['best']:.4f}" in said
    stops = [2 * gains["best_epoch"] + 1, 2 * gains["last_epoch"] - 1]
    for world, stop in zip((2, 1), stops, strict=True):  # steps of an epoch: 2
        start("parts", world=world, train__max_steps=stop, **changes)
    start("parts", world=2, **changes)
    parts = read(tmp_path / "parts/done.json")["ended_early"]
    assert parts.pop("best") == pytest.approx(gains.pop("best"), rel=1e-4)
    assert parts == gains
    assert "already complete" in start("parts", **changes)


def evaluated(run: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if line["split"] == "eval"]


def test_a_run_that_ended_early_goes_on_with_more_patience(start, tmp_path):
    start("run")
    first = read(tmp_path / "run/done.json")["ended_early"]
    said = start("run", train__patience_epochs=5)
    assert f"was complete after {2 * first['last_epoch']} steps; its done.json is removed" in said
    assert read(tmp_path / "run/done.json")["ended_early"]["last_epoch"] >= first["last_epoch"] + 2
    start("other", train__patience_epochs=5)
    assert [line["step"] for line in train_lines(tmp_path / "run")] == [
        line["step"] for line in train_lines(tmp_path / "other")
    ]


def test_an_unwritten_result_is_that_of_the_last_checkpoint(start, tmp_path):
    start("run")
    done, lines = read(tmp_path / "run/done.json"), (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    (tmp_path / "run/done.json").unlink()
    start("run")
    again = read(tmp_path / "run/done.json")
    assert again.pop("seconds") >= done.pop("seconds")
    assert again == done
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == len(lines)


def test_a_start_that_would_end_at_once_is_refused(start, tmp_path, train, folder):
    start("run")
    keys = SMALL | {"data.path": folder, "resume": tmp_path / "run"}
    code, said = train("other", *options_of(keys), recipe="base/own_images").wait()
    assert code == 2
    assert "this run would end at step" in said
    assert "raise train.patience_epochs, or take its weights alone by train.init_from" in said


def test_all_say_when_and_why_and_which_checkpoint_is_best(start, tmp_path):
    run = tmp_path / "run"
    said, done, losses = start("run"), read(run / "done.json"), evaluated(run, "loss")
    gains, least = done["ended_early"], min(losses)
    best = f"step {2 * losses.index(least) + 2}, loss {least:.4f}"
    assert done["best"] == {"step": 2 * losses.index(least) + 2, "metric": "loss", "value": least}
    assert f"; best checkpoint: {best}; see" in said

    def told(*words: object) -> str:
        code, said = Fork(*map(str, words), log=tmp_path / "log").wait()
        assert code == 0, said
        return said

    page = tmp_path / "page.html"
    for text in (told("runs", run), told("report", run, "--to", page) + page.read_text()):
        assert f"done early, epoch {gains['last_epoch']}" in text
        assert best in text
    assert (
        f"the run ended early, after epoch {gains['last_epoch']}: best loss {gains['best']:.4f}" in page.read_text()
    )

    took_best, took_last = (
        f"{run}: the best checkpoint, {best}\n",
        f"step {done['step']}; --checkpoint best takes {best}\n",
    )
    for which, value, line in (
        ("best", least, took_best),
        (done["best"]["step"], least, ""),
        ("last", losses[-1], took_last),
    ):
        said = told("eval", run, "--checkpoint", which, "--json", tmp_path / "found.json")
        assert line in said
        assert read(tmp_path / "found.json")["loss"] == pytest.approx(value, rel=1e-6)
    exported = tmp_path / "exported"
    assert took_best in told("export", run, "--checkpoint", "best", "--to", exported)
    stored = run / f"checkpoints/{done['best']['step']:08d}/model.safetensors"
    weights, kept = load_file(exported / "model.safetensors"), load_file(stored)
    assert all(weights[name].equal(value) for name, value in kept.items())


def plain_end(values: list[float | None], patience: int, least: float, higher: bool) -> int | None:
    """The epoch after which a run ends, all epochs being evaluated."""
    best, at = None, 0
    for epoch, value in enumerate(values, start=1):
        better = value is not None and (best is None or (value - best if higher else best - value) > 0)
        if better and (best is None or abs(value - best) >= least):
            best, at = value, epoch
        elif epoch - at >= patience:
            return epoch
    return None


@given(
    values=st.lists(st.one_of(st.none(), st.integers(0, 9).map(float)), min_size=1, max_size=12),
    patience=st.integers(1, 5),
    least=st.sampled_from([0.0, 1.0, 2.0]),
    metric=st.sampled_from(["top1", "loss", "ema_balanced_accuracy"]),
)
def test_a_run_ends_so_many_epochs_after_its_gain(values, patience, least, metric):
    """Whatever its metrics; what is not finite is no gain."""
    train = TrainSection(epochs=20, global_batch=1, keep_best=metric, patience_epochs=patience, patience_gain=least)
    gains, ended = Gains.of(train, None), None
    for epoch, value in enumerate(values, start=1):
        gains = gains.after({metric: value}, 7 * epoch, epoch, least)
        assert gains.best_step == 7 * gains.best_epoch
        if gains.end_run(train):
            ended = epoch
            break
    assert ended == plain_end(values, patience, least, metric != "loss")
    assert not gains.end_run(train.model_copy(update={"keep_best": "macro_f1"}))
    assert Gains.of(train.model_copy(update={"keep_best": "macro_f1"}), gains) == Gains(metric="macro_f1")


STUDY = """
title: one
source: ours
seeds: [0, 1, 2]
runs: [{label: a, recipes: {'': digits/mixer}, axes: {optim.lr: [0.001, 0.002]}}]
figure: {x: optim.lr, y: [top1]}
set: {train.keep_best: top1, train.patience_epochs: 3}
"""


def test_a_study_by_the_protocol_has_no_patience(tmp_path):
    refused = "(a): train.patience_epochs would end each run at another epoch, by its results on the"
    one_seed = STUDY.replace("seeds: [0, 1, 2]", "seeds: [0]")  # which compares nothing by the protocol
    for text, code, words in ((STUDY, 2, refused), (one_seed, 0, "2 runs")):
        (tmp_path / "study.yaml").write_text(text)
        found, said = Fork("study", "plan", tmp_path / "study.yaml", log=tmp_path / "log").wait()
        assert (found, words in said) == (code, True), said

"""Checkpoints are complete or absent, whatever fails while they are written, and which of them are kept."""

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.conftest import ROOT
from tests.run.saved import ALONE, DONE, FAILED, KILLED, WARNED, disturbed, folders, position, state
from tests.shims import disk_of
from widemix.errors import InputError
from widemix.recipe import load_recipe
from widemix.run import checkpoint
from widemix.run.checkpoint import RetentionPolicy
from widemix.run.run_dir import acquire_run_dir

pytestmark = pytest.mark.usefixtures("quick")

Kept = dict[int, tuple[float, float | None]]  # by step the value of its weights, and of its metric
FILES = ("model.safetensors", "optimizer.safetensors", "ema/model.safetensors", "state.json")


def save(run: Path, step: int, value: float, metrics: dict, policy: RetentionPolicy) -> Path:
    return checkpoint.save(run, state(value), position(step, metrics=metrics), policy)


def found_in(run: Path, metric: str) -> Kept:
    """The complete checkpoints, each of which can be loaded."""
    loaded = [(origin := checkpoint.read(path), origin.load()) for path in checkpoint.complete_checkpoints(run)]
    return {
        origin.position.step: (weights.model["fc.bias"].tolist()[0], origin.position.metrics.get(metric))
        for origin, weights in loaded
    }


def expected(before: Kept, policy: RetentionPolicy, lower: bool) -> Kept:
    """Those that are kept, by a plain loop."""
    kept = set(sorted(before)[-policy.newest :])
    kept |= {step for step in before if policy.every and step % policy.every == 0}
    best = None
    for step in sorted(before):
        metric = before[step][1]
        if metric is not None and (best is None or metric == best[1] or (metric < best[1]) is lower):
            best = step, metric
    kept |= {best[0]} if best and policy.best else set()
    return {step: before[step] for step in kept}


@pytest.mark.parametrize("how", [KILLED, FAILED])
def test_no_checkpoint_is_lost_whichever_change_is_the_last(tmp_path, how, capfd):
    """Of a step that is saved again, as after a stop that left its evaluation due, and with an old one to remove."""
    ends, told, policy = list[str](), set[str](), RetentionPolicy(1)
    while DONE not in ends:
        run = tmp_path / str(len(ends))
        run.mkdir()
        for step in (4, 7):
            save(run, step, 1.0, {}, RetentionPolicy(9))
        ends.append(disturbed(lambda run=run: save(run, 7, 2.0, {}, policy), len(ends) + 1, how))
        if ends[-1] == FAILED:
            assert folders(run) == ["00000004", "00000007"]
        if "an old checkpoint could not be removed (" in capfd.readouterr().err:
            told.add(ends[-1])
        checkpoint.put_back(run)  # as the next start does
        values = {step: value for step, (value, _) in found_in(run, "top1").items()}
        wanted = {DONE: [{7: 2.0}], FAILED: [{4: 1.0, 7: 1.0}]}
        assert values in wanted.get(ends[-1], [{7: 2.0}, {4: 1.0, 7: 2.0}, {4: 1.0, 7: 1.0}][: 2 + (how == KILLED)])
        save(run, 8, 3.0, {}, policy)
        assert folders(run) == ["00000008"]
    assert set(ends) == ({KILLED, DONE} if how == KILLED else {FAILED, WARNED, DONE})
    assert told == (set() if how == KILLED else {WARNED})
    assert len(ends) > 12


class Saves(RuleBasedStateMachine):
    """A run that saves, whose process is killed and started again, and whose files fail and are damaged."""

    root = None  # of the test
    numbers = itertools.count()
    recipe = None

    @initialize(
        newest=st.integers(1, 3),
        best=st.sampled_from([None, "top1", "ema_loss"]),
        every=st.sampled_from([None, 1, 2, 3]),
    )
    def begin(self, newest, best, every):
        self.run = self.root / str(next(self.numbers))
        self.policy, self.metric = RetentionPolicy(newest, best, every), best or "top1"
        self.kept: Kept = {}
        self.damaged: set[int] = set()
        self.value = 0.0
        self.start()

    @rule()
    def start(self):
        with acquire_run_dir(self.run, self.recipe, "auto", ALONE) as found:
            assert found.step == max(self.kept, default=0)
            assert found.problems == []
        self.matches(self.kept)

    @rule(step=st.integers(1, 9), metric=st.sampled_from([None, -0.5, 0.0, 0.25]))
    def save(self, step, metric):
        self.value += 1
        metrics = {} if metric is None else {self.metric: metric}
        path = save(self.run, step, self.value, metrics, self.policy)
        self.damaged.discard(step)
        self.kept = expected(self.kept | {step: (self.value, metric)}, self.policy, lower="loss" in self.metric)
        assert path.name == f"{step:08d}"
        self.matches(self.kept)
        assert folders(self.run) == [f"{step:08d}" for step in sorted(self.damaged | self.kept.keys())]

    @rule(step=st.integers(1, 9), at=st.integers(1, 40), how=st.sampled_from([KILLED, FAILED]))
    def save_and_fail(self, step, at, how):
        self.value += 1
        value = self.value
        ended = disturbed(lambda: save(self.run, step, value, {}, self.policy), at, how)
        checkpoint.put_back(self.run)
        found, after = found_in(self.run, self.metric), self.kept | {step: (value, None)}
        least = expected(after, self.policy, lower="loss" in self.metric)
        done, undone = least.items() <= found.items() <= after.items(), found == self.kept
        assert {DONE: found == least, FAILED: undone, WARNED: done}.get(ended, done or undone)
        self.damaged &= {int(path.parent.name) for path in self.run.glob("checkpoints/*/DAMAGED")}
        self.kept = found

    @precondition(lambda self: self.kept)
    @rule(chosen=st.randoms(use_true_random=False), name=st.sampled_from([*FILES[:2], "state.json"]))
    def damage(self, chosen, name):
        """The newest, and perhaps one before it."""
        steps = sorted(self.kept)[-chosen.choice((1, 2)) :]
        for step in steps:
            (self.run / f"checkpoints/{step:08d}" / name).write_bytes(b"damaged")
            del self.kept[step]
        found, problems = checkpoint.newest_valid(self.run)
        assert (found.position.step if found else 0) == max(self.kept, default=0)
        assert [f"{step:08d}/{name}" in problem for step, problem in zip(steps[::-1], problems, strict=True)] == [
            True
        ] * len(steps)
        self.damaged |= set(steps)

    def matches(self, kept: Kept):
        assert found_in(self.run, self.metric) == kept
        newest = checkpoint.newest(self.run)
        assert (newest.position.step if newest else 0) == max(kept, default=0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("count", [8, pytest.param(150, marks=pytest.mark.long)])
def test_whatever_happens_a_run_goes_on_from_its_newest_checkpoint(tmp_path, digits, count):
    recipe = load_recipe(ROOT / "recipes/digits/mixer.yaml", [("data.path", str(digits))])
    machine = type("Machine", (Saves,), {"root": tmp_path, "recipe": recipe})
    run_state_machine_as_test(machine, settings=settings(max_examples=count, stateful_step_count=8))


def test_folders_that_someone_else_has_named_are_left_alone(tmp_path):
    copied = save(tmp_path, 1, 1.0, {}, RetentionPolicy(1)).rename(tmp_path / "checkpoints/00000001-good")
    (tmp_path / "checkpoints/notes").mkdir()
    for name in (".writing-5", "00000006"):  # of a killed save
        (tmp_path / "checkpoints" / name).mkdir()
    for step in (2, 3):
        save(tmp_path, step, 1.0, {}, RetentionPolicy(1, every=10))
    assert checkpoint.newest(tmp_path).position.step == 3
    assert folders(tmp_path) == ["00000001-good", "00000003", "notes"]
    assert checkpoint.find(copied).position.step == 1  # but by its own name


def test_everything_is_on_disk_before_the_mark_of_completeness(tmp_path, system):
    """A machine may lose its power between any two of these calls, and with it all that was not flushed."""
    calls, rename = [], Path.rename

    def noted_rename(path, target):
        calls.append(("rename", path, target))
        return rename(path, target)

    note = lambda descriptor: calls.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))  # noqa: E731
    system({"os.fsync": note, "pathlib.Path.rename": noted_rename})
    final = checkpoint.save(tmp_path, state(ema=5.0), position(1), RetentionPolicy(2))
    folder, writing = final.parent, final.with_name(".writing-1")
    flushed = [*(writing / name for name in (*FILES, ".COMPLETE")), writing / "ema"]
    assert sorted(calls[: len(flushed)]) == sorted(("fsync", path) for path in flushed)
    assert calls[len(flushed) :] == [
        ("rename", writing, final),
        ("fsync", folder),
        ("rename", final / ".COMPLETE", final / "COMPLETE"),
        ("fsync", final),
    ]


def test_a_path_of_any_bytes_in_the_recipe_is_kept(tmp_path):
    recipe = {"data": {"path": os.fsdecode(b"/data/\xff")}}
    path = checkpoint.save(tmp_path, state(), position(3, recipe=recipe), RetentionPolicy(1))
    assert checkpoint.read(path).position.recipe == recipe


@pytest.mark.parametrize("content", [b'{"step": 1', b"\xff", None])
def test_one_whose_position_is_damaged_is_not_the_best(tmp_path, content):
    for step, top1 in ((1, 90.0), (2, 50.0)):
        save(tmp_path, step, 1.0, {"top1": top1}, RetentionPolicy(2, best="top1"))
    damaged = tmp_path / "checkpoints/00000001/state.json"
    damaged.unlink() if content is None else damaged.write_bytes(content)
    with pytest.raises(InputError, match=r"00000001/state.json: cannot be read \("):
        checkpoint.read(damaged.parent)
    save(tmp_path, 3, 1.0, {"top1": 40.0}, RetentionPolicy(1, best="top1"))
    assert folders(tmp_path) == ["00000002", "00000003"]
    assert checkpoint.best(tmp_path, "top1").position.step == 2
    assert checkpoint.best(tmp_path, "loss") is None


def without_hash(path: Path, name: str) -> None:
    hashes = json.loads((path / "COMPLETE").read_text())
    del hashes[name]
    (path / "COMPLETE").write_text(json.dumps(hashes))


def flip_a_bit(path: Path, name: str) -> None:
    content = bytearray((path / name).read_bytes())
    content[-2] ^= 1
    (path / name).write_bytes(content)


def remove(path: Path, name: str) -> None:
    (path / name).unlink()


GONE, WRONG = "{path}: cannot be loaded (", "{file}: is damaged (its hash is not the one in COMPLETE)"


@pytest.mark.parametrize(
    ("name", "act", "problem"),
    [
        *((name, flip_a_bit, WRONG) for name in FILES[:3]),
        ("state.json", flip_a_bit, "{file}: cannot be read ("),
        *((name, remove, GONE) for name in FILES[:3]),
        ("state.json", remove, "{file}: cannot be read ("),
        *((name, without_hash, WRONG) for name in FILES),
        ("COMPLETE", lambda path, name: (path / name).write_bytes(b""), GONE),
        ("COMPLETE", lambda path, name: (path / name).write_bytes(b"\xff"), GONE),
        ("COMPLETE", lambda path, name: (path / name).write_bytes(b"[1]"), "{file}: is damaged (it holds no hashes)"),
    ],
)
def test_damage_is_named_and_the_checkpoint_before_is_taken(tmp_path, name, act, problem):
    for step in (1, 2):
        path = checkpoint.save(tmp_path, state(ema=5.0), position(step), RetentionPolicy(2))
    act(path, name)
    hashes = (path / "COMPLETE").read_bytes()
    with pytest.raises(InputError):
        checkpoint.newest(tmp_path).load()
    found, (said,) = checkpoint.newest_valid(tmp_path)
    assert found.position.step == checkpoint.newest(tmp_path).position.step == 1  # the other is never read again
    assert said.startswith(problem.format(path=path, file=path / name))
    assert (path / "DAMAGED").read_bytes() == hashes
    checkpoint.save(tmp_path, state(2.0), position(2), RetentionPolicy(2))  # until the run reaches that step again
    assert checkpoint.newest(tmp_path).load().model["fc.bias"].tolist() == [2, 2, 2]
    assert not (path / "DAMAGED").exists()


@pytest.mark.parametrize("content", [b"no tensors", None])
def test_what_cannot_be_loaded_unverified_is_named(tmp_path, content):
    path = save(tmp_path, 7, 1.0, {}, RetentionPolicy(1))
    damaged = path / "optimizer.safetensors"
    damaged.unlink() if content is None else damaged.write_bytes(content)
    with pytest.raises(InputError, match=rf"^{path}: cannot be loaded \("):
        checkpoint.read(path).load(verify=False)


def test_a_folder_without_a_complete_checkpoint_is_named(tmp_path):
    path = save(tmp_path, 1, 1.0, {}, RetentionPolicy(9))
    checkpoint.mark_damaged(path)
    for place, what, run in (
        (path, "is an incomplete checkpoint", "one that `widemix train` has written"),
        (tmp_path, "holds no complete checkpoint", "one that `widemix train` has written"),
        (tmp_path / "checkpoints", "holds no complete checkpoint", tmp_path),
    ):
        with pytest.raises(InputError) as raised:
            checkpoint.find(place)
        assert str(raised.value) == f"{place}: {what}; name the run folder, {run}"


@pytest.mark.parametrize("most", [0, 100, 300])
def test_a_full_disk_leaves_nothing_of_a_checkpoint(tmp_path, most):
    with disk_of(most), pytest.raises(OSError, match=r"00000007: the checkpoint could not be written \(.*large"):
        save(tmp_path, 7, 1.0, {}, RetentionPolicy(1))
    assert folders(tmp_path) == []


@pytest.mark.parametrize("links", [True, False])
def test_a_checkpoint_of_another_run_is_kept(tmp_path, system, links):
    """By its step, also where a killed start or a damaged copy was, and on a disk without links."""

    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    if not links:
        system({"os.link": refuse})
    run = tmp_path / "run"
    origin = checkpoint.save(tmp_path, state(ema=5.0), position(7), RetentionPolicy(1)).rename(tmp_path / "good")
    (run / "checkpoints/.writing-00000007").mkdir(parents=True)
    for damaged in (False, True):
        if damaged:
            checkpoint.mark_damaged(run / "checkpoints/00000007")
        checkpoint.keep(checkpoint.read(origin), run)
        assert folders(run) == ["00000007"]
        assert (origin / "model.safetensors").stat().st_nlink == 1 + links
        if not damaged:
            shutil.copytree(origin, tmp_path / "again")
            (run / "checkpoints/00000007/model.safetensors").unlink()
            shutil.copy2(origin / "model.safetensors", run / "checkpoints/00000007")
    shutil.rmtree(origin)
    (tmp_path / "link").symlink_to(run)
    checkpoint.keep(checkpoint.newest(run), tmp_path / "link")
    assert checkpoint.newest(run).load().ema["fc.bias"].tolist() == [5, 5, 5]


def test_a_checkpoint_is_as_readable_as_other_files(tmp_path):
    before = os.umask(0o027)
    try:
        path = checkpoint.save(tmp_path, state(ema=5.0), position(7), RetentionPolicy(1))
    finally:
        os.umask(before)
    modes = {file.relative_to(path).as_posix(): file.stat().st_mode & 0o777 for file in path.rglob("*")}
    assert modes == dict.fromkeys([*FILES, "COMPLETE"], 0o640) | {"ema": 0o750}

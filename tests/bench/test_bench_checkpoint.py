"""The benchmark of a checkpoint, of which two ranks are started."""

import ctypes
import json
import os
import signal
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.conftest import ROOT
from widemix.bench import checkpoint
from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.models.cost import model_cost
from widemix.recipe import load_recipe
from widemix.run.checkpoint import COMPLETE, Position, find


@pytest.mark.parametrize(("gpus", "hidden"), [(0, True), (1, True), (2, False), (8, False)])
def test_ranks_are_on_cpus_unless_each_has_a_gpu(gpus: int, hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    environs, commands = [], []

    def run(command, env=None, **_):
        environs.append(env or {})
        commands.append(command)
        Path(command[-1], "row.json").write_text(json.dumps({"name": "DDP"}))
        return SimpleNamespace(returncode=0)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(checkpoint.subprocess, "run", run)
    monkeypatch.setenv("OF_THE_USER", "kept")
    assert checkpoint._measure_in_processes("DDP", 3) == {"name": "DDP"}
    assert [environ.get("CUDA_VISIBLE_DEVICES") for environ in environs] == ["" if hidden else None]
    assert environs[0]["OF_THE_USER"] == "kept"
    [command] = commands
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert command[:-1] == [*launcher, "-m", "widemix.bench.checkpoint", "DDP", "3"]
    failed = SimpleNamespace(returncode=1, stderr="Traceback\nRuntimeError: no disk\n")
    monkeypatch.setattr(checkpoint.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(InputError, match=r"^FSDP2: the ranks failed: RuntimeError: no disk$"):
        checkpoint._measure_in_processes("FSDP2", 1)


@pytest.mark.parametrize("name", checkpoint.ENGINES)
def test_cpus_compute_in_fp32(name: str) -> None:
    """In bf16 a step took a minute on a CPU without its instructions, and the whole benchmark over half an hour."""
    recipes = [checkpoint._recipe(name, torch.device(kind)) for kind in ("cpu", "cuda")]
    assert [recipe.train.precision for recipe in recipes] == ["fp32", "bf16"]
    for recipe in recipes:  # two images of each of two ranks
        assert (recipe.train.global_batch, recipe.augment.mix_group, recipe.train.grad_accum_steps) == (4, 2, 1)
        kind, _, stage = name.partition(", ZeRO ")
        assert recipe.engine.kind == {"DDP": "ddp", "FSDP2": "fsdp", "DeepSpeed": "deepspeed"}[kind]
        assert not stage or recipe.engine.zero_stage == int(stage)


def test_training_goes_on_while_a_checkpoint_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a small network on one rank: the steps are those of its engine, and the files those of the last save."""
    batch = [("train.global_batch", "2"), ("augment.mix_group", "2"), ("engine.kind", "ddp")]
    recipe, steps, build = load_recipe(ROOT / "recipes/digits/mixer.yaml", batch), [], checkpoint.build_engine

    def counted(*arguments):
        engine = build(*arguments)
        monkeypatch.setattr(engine, "step", lambda *own, step=engine.step: steps.append(own[1]) or step(*own))
        return engine

    monkeypatch.setattr(checkpoint, "set_torch_threads", lambda _: None)
    monkeypatch.setattr(checkpoint, "_recipe", lambda *_: recipe)
    monkeypatch.setattr(checkpoint, "build_engine", counted)
    row = checkpoint.measure("DDP", 2, tmp_path)
    assert len(steps) >= 1 + 2 * (2 + 1)  # the first; in each round two before the save, and at least one after it
    assert find(tmp_path).position.step == 2
    weights = model_cost(recipe.model, 8, 10).parameters
    assert row["size_mb"] == pytest.approx(3 * 4 * weights / 1e6, abs=0.1)  # and two moments of AdamW


def test_a_row_has_the_medians_of_the_saves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which are not those of one save. Steps that were faster during the writing make up for no stall."""
    saves = iter([(3.0, 9.0, 20.0), (1.20049, 6.0, 40.0), (0.6, 7.5, 30.0)] + 3 * [(1.2, -6.0, 40.0)])

    def save(number, engine, saver, step, alone, folder):
        alone += [1.0, 4.0]
        return next(saves)

    (tmp_path / "weights.safetensors").write_bytes(bytes(1_260_000))
    monkeypatch.setattr(checkpoint, "set_torch_threads", lambda _: None)
    monkeypatch.setattr(checkpoint, "_build", lambda *_: (SimpleNamespace(step=lambda *_: None), []))
    monkeypatch.setattr(checkpoint, "_save", save)
    row = checkpoint.measure("DDP", 3, tmp_path)
    stall = {"name": "DDP", "stall_s": 1.2, "stall_percent": 0.2, "size_mb": 1.3, "step_s": 2.5}  # of 600 s
    assert row == stall | {"slower_s": 7.5, "total_percent": 1.45, "written_s": 30}
    assert checkpoint.measure("DDP", 3, tmp_path) == stall | {"slower_s": -6, "total_percent": 0.2, "written_s": 40}


def test_a_save_stalls_for_its_begin_and_slows_the_steps_until_all_ranks_have_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Steps alone take 2 s in the median of this save's and an earlier one's; another rank writes a step longer."""
    clock, events, seconds = [100.0], [], iter((1.0, 3.0, 2.5, 4.0, 1.0, 2.25))
    others = iter((True, True, True, False))  # whether the other rank still writes
    complete = tmp_path / "checkpoints/00000007" / COMPLETE
    complete.parent.mkdir(parents=True)
    complete.touch()
    os.utime(complete, (0, 1000.0 + 5.5))

    class Saver:
        left = 2  # steps in which this rank writes

        @property
        def writing(self) -> bool:
            self.left -= 1
            return self.left >= 0

        def begin(self, shards: object, position: Position) -> None:
            assert (shards, position.step, position.data_step, position.scalars) == ("shards", 7, 7, {"scale": 2.0})
            events.append("begin")
            clock[0] += 0.7

        def finish(self) -> None:
            events.append("finish")

    def step() -> float:
        events.append("step")
        return next(seconds)

    def all_reduce(value: torch.Tensor, op: object) -> None:
        assert op is dist.ReduceOp.MAX
        value.fill_(max(value.item(), next(others)))

    engine = SimpleNamespace(scalars=lambda: {"scale": 2.0}, local_shards=lambda: "shards")
    times = SimpleNamespace(time=lambda: 1000.0, perf_counter=lambda: clock[0])
    monkeypatch.setattr(checkpoint, "time", times)
    monkeypatch.setattr(dist, "barrier", lambda: events.append("barrier"))
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    alone = [2.0]
    stall, slower, written = checkpoint._save(7, engine, Saver(), step, alone, tmp_path)  # type: ignore[arg-type]
    assert alone == [2.0, 1.0, 3.0]
    assert (stall, slower, written) == pytest.approx((0.7, 0.5 + 2.0 - 1.0 + 0.25, 5.5))
    assert events == ["step", "step", "barrier", "begin", *["step"] * 4, "finish", "barrier"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_ranks_end_with_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They ran on after the benchmark had been ended: `bench gpu` does so with a part that takes too long."""
    prctl, found = ctypes.CDLL(None).prctl, ctypes.c_int()

    def measure(*_: object) -> dict[str, object]:
        prctl(2, ctypes.byref(found))  # PR_GET_PDEATHSIG
        prctl(1, 0)  # this process is no rank
        return {}

    monkeypatch.setattr(checkpoint, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["checkpoint", "DDP", "1", str(tmp_path)])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("RANK", "1")
    checkpoint.main()
    assert found.value == signal.SIGTERM


def test_the_first_rank_writes_the_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checkpoint, "end_with_torchrun", lambda: None)
    monkeypatch.setattr(
        checkpoint, "measure", lambda *given: {"name": [str(each) for each in given], "rank": os.environ["RANK"]}
    )
    monkeypatch.setattr(sys, "argv", ["checkpoint", "DDP", "5", str(tmp_path)])
    for rank in ("1", "0"):
        assert not (tmp_path / "row.json").exists()
        monkeypatch.setenv("RANK", rank)
        checkpoint.main()
    assert json.loads((tmp_path / "row.json").read_text()) == {"name": ["DDP", "5", str(tmp_path)], "rank": "0"}


def test_each_engine_is_measured_on_batches_of_two_images(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple] = []
    monkeypatch.setattr(
        checkpoint, "_measure_in_processes", lambda *given: measured.append(given) or {"name": given[0]}
    )
    rows = checkpoint.run(Namespace(rounds=3))
    assert measured == [(name, 3) for name in checkpoint.ENGINES]
    assert [row["name"] for row in rows] == list(checkpoint.ENGINES)
    built: list[tuple] = []
    network = torch.nn.Linear(1, 1)
    monkeypatch.setattr(
        checkpoint, "build_model", lambda section, side, classes: built.append((side, classes)) or network
    )
    monkeypatch.setattr(checkpoint, "build_engine", lambda section, module, *_: (section.kind, module))
    for name, options in checkpoint.ENGINES.items():
        engine, [batch] = checkpoint._build(name, Topology(0, 2, 0, 2, torch.device("cpu")))
        assert engine == (dict(options)["engine.kind"], network)
        assert batch.inputs.shape == (2, 3, 224, 224)
        torch.testing.assert_close(batch.targets, torch.full((2, 1000), 0.001))
        assert batch.samples.tolist() == [0, 0]
    assert set(built) == {(224, 1000)}

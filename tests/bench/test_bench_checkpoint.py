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
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.bench.conftest import Clock
from tests.conftest import ROOT, System
from tests.forks import Forks, group_of
from widemix.bench.checkpoint import ENGINES, RECIPE, engine_recipe, main, row_of, run, time_save
from widemix.errors import InputError
from widemix.models.cost import model_cost
from widemix.recipe import load_recipe
from widemix.run.checkpoint import COMPLETE, Position, find


@pytest.mark.parametrize(("gpus", "hidden"), [(0, True), (1, True), (2, False), (8, False)])
def test_ranks_are_on_cpus_unless_each_has_a_gpu(gpus: int, hidden: bool, system: System, monkeypatch) -> None:
    commands = []

    def start(command, env, **_):
        commands.append((command, env))
        Path(command[-2], "row.json").write_text(json.dumps({"name": command[-4]}))
        return SimpleNamespace(returncode=0)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("OF_THE_USER", "kept")
    system({"torch.cuda.device_count": lambda: gpus, "subprocess.run": start})
    assert run(Namespace(rounds=3)) == [{"name": name} for name in ENGINES]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for (command, env), name in zip(commands, ENGINES, strict=True):
        assert command == [*launcher, "-m", "widemix.bench.checkpoint", name, "3", command[-2], str(RECIPE)]
        assert (env.get("CUDA_VISIBLE_DEVICES"), env["OF_THE_USER"]) == ("" if hidden else None, "kept")
    failed = SimpleNamespace(returncode=1, stderr="Traceback\nRuntimeError: no disk\n")
    system({"subprocess.run": lambda *_, **__: failed})
    with pytest.raises(InputError, match=r"^DDP: the ranks failed: RuntimeError: no disk$"):
        run(Namespace(rounds=1))


@pytest.mark.parametrize("name", ENGINES)
def test_cpus_compute_in_fp32(name: str) -> None:
    """In bf16 a step took a minute on a CPU without its instructions, and the whole benchmark over half an hour."""
    recipes = [engine_recipe(name, torch.device(kind)) for kind in ("cpu", "cuda")]
    assert [recipe.train.precision for recipe in recipes] == ["fp32", "bf16"]
    for recipe in recipes:  # two images of each of two ranks
        assert (recipe.train.global_batch, recipe.augment.mix_group, recipe.train.grad_accum_steps) == (4, 2, 1)
        assert (recipe.data.image_size, recipe.data.num_classes) == (224, 1000)
        kind, _, stage = name.partition(", ZeRO ")
        assert recipe.engine.kind == {"DDP": "ddp", "FSDP2": "fsdp", "DeepSpeed": "deepspeed"}[kind]
        assert not stage or recipe.engine.zero_stage == int(stage)


def check(inputs: object) -> None:
    if isinstance(inputs, torch.Tensor) and inputs.ndim == 4 and inputs.shape[1] == 3:
        assert inputs.shape == (2, 3, 8, 8)


def one_rank(*words: str) -> None:
    """A rank of the benchmark: each of its steps has two images."""
    register_module_forward_pre_hook(lambda _, inputs: check(inputs[0]))
    sys.argv = ["checkpoint", *words]
    main()


def test_two_ranks_save_twice_and_the_first_writes_the_row(tmp_path: Path) -> None:
    path = ROOT / "recipes/digits/mixer.yaml"
    ranks = Forks(one_rank, "DDP", "2", str(tmp_path), str(path), log=tmp_path / "log", environs=group_of(2))
    codes, output = ranks.wait()
    assert codes == [0, 0], output
    row = json.loads((tmp_path / "row.json").read_text())
    assert find(tmp_path).position.step == 2
    weights = model_cost(load_recipe(path).model, 8, 10).parameters
    assert row["name"] == "DDP"
    assert row["size_mb"] == pytest.approx(3 * 4 * weights / 1e6, abs=0.1)  # and two moments of AdamW


def test_a_row_has_the_medians_of_the_saves() -> None:
    """Which are not those of one save. Steps that were faster during the writing make up for no stall."""
    alone, size = [1.0, 4.0] * 3, 1_260_000
    row = row_of("DDP", [(3.0, 9.0, 20.0), (1.20049, 6.0, 40.0), (0.6, 7.5, 30.0)], alone, size)
    stall = {"name": "DDP", "stall_s": 1.2, "stall_percent": 0.2, "size_mb": 1.3, "step_s": 2.5}  # of 600 s
    assert row == stall | {"slower_s": 7.5, "total_percent": 1.45, "written_s": 30}
    row = row_of("DDP", [(1.2, -6.0, 40.0)] * 3, alone, size)
    assert row == stall | {"slower_s": -6, "total_percent": 0.2, "written_s": 40}


def test_a_save_stalls_at_first_and_slows_steps_until_written(clock: Clock, system: System, tmp_path: Path) -> None:
    """Steps alone take 2 s in the median of this save's and an earlier one's; another rank writes a step longer."""
    events, seconds = [], iter((1.0, 3.0, 2.5, 4.0, 1.0, 2.25))
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
            clock.takes(0.7)

        def finish(self) -> None:
            events.append("finish")

    def step() -> float:
        events.append("step")
        return next(seconds)

    def all_reduce(value: torch.Tensor, op: object) -> None:
        assert op is dist.ReduceOp.MAX
        value.fill_(max(value.item(), next(others)))

    engine, alone = SimpleNamespace(scalars=lambda: {"scale": 2.0}, local_shards=lambda: "shards"), [2.0]
    system({
        "time.time": lambda: 1000.0,
        "torch.distributed.barrier": lambda: events.append("barrier"),
        "torch.distributed.all_reduce": all_reduce,
    })  # fmt: skip
    stall, slower, written = time_save(7, engine, Saver(), step, alone, tmp_path)  # type: ignore[arg-type]
    assert alone == [2.0, 1.0, 3.0]
    assert (stall, slower, written) == pytest.approx((0.7, 0.5 + 2.0 - 1.0 + 0.25, 5.5))
    assert events == ["step", "step", "barrier", "begin", *["step"] * 4, "finish", "barrier"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_ranks_end_with_torchrun(system: System, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They ran on after the benchmark had been ended: `bench gpu` does so with a part that takes too long."""
    prctl, found = ctypes.CDLL(None).prctl, ctypes.c_int()

    def asked() -> bool:
        prctl(2, ctypes.byref(found))  # PR_GET_PDEATHSIG
        prctl(1, 0)  # this process is no rank
        raise InterruptedError

    system({"sys.argv": ["checkpoint", "DDP", "1", str(tmp_path), "none"], "torch.cuda.is_available": asked})
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(InterruptedError):
        main()
    assert found.value == signal.SIGTERM

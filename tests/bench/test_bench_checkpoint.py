"""The benchmark of a checkpoint, of which two ranks are started."""

import ctypes
import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from widemix.bench import checkpoint


@pytest.mark.parametrize(("gpus", "hidden"), [(0, True), (1, True), (2, False), (8, False)])
def test_ranks_are_on_cpus_unless_each_has_a_gpu(gpus: int, hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    environs = []

    def run(command, env=None, **_):
        environs.append(env or {})
        Path(command[-1], "row.json").write_text(json.dumps({"name": "DDP"}))
        return SimpleNamespace(returncode=0)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(checkpoint.subprocess, "run", run)
    assert checkpoint._measure_in_processes("DDP", 1) == {"name": "DDP"}
    assert [environ.get("CUDA_VISIBLE_DEVICES") for environ in environs] == ["" if hidden else None]


@pytest.mark.parametrize("name", checkpoint.ENGINES)
def test_cpus_compute_in_fp32(name: str) -> None:
    """In bf16 a step took a minute on a CPU without its instructions, and the whole benchmark over half an hour."""
    precisions = [checkpoint._recipe(name, torch.device(kind)).train.precision for kind in ("cpu", "cuda")]
    assert precisions == ["fp32", "bf16"]


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

"""The benchmark of a checkpoint, of which two ranks are started."""

import json
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

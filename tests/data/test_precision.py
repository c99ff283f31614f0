"""A word where bf16 is slow: GPUs before Ampere, CPUs without its instructions."""

from types import SimpleNamespace

import pytest
import torch

from widemix.data import precision


@pytest.mark.parametrize(
    ("name", "capability", "warned"),
    [("Tesla V100", (7, 0), True), ("Tesla T4", (7, 5), True), ("A100", (8, 0), False), ("H200", (9, 0), False)],
)
def test_gpus_without_bf16_are_named(monkeypatch, name, capability, warned):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = precision.bf16_warning(torch.device("cuda", 0))
    if warned:
        version = ".".join(map(str, capability))
        assert found == (
            f"{name} has no bf16 (compute capability {version}, it needs 8.0) and computes it in fp32; set "
            "train.precision fp16"
        )
    else:
        assert found is None


@pytest.mark.parametrize(("slowdown", "warned"), [(1.0, False), (4.0, False), (4.4, True), (12.0, True)])
def test_slow_cpus_are_told(monkeypatch, slowdown, warned):
    monkeypatch.setattr(precision, "bf16_slowdown", lambda: slowdown)
    found = precision.bf16_warning(torch.device("cpu"))
    words = f"bf16 is {slowdown:.0f} times as slow as fp32 on this CPU; set train.precision fp32"
    assert found == (words if warned else None)


@pytest.mark.parametrize("name", precision.DTYPES)
def test_a_context_computes_in_its_type(name):
    x = torch.ones(2, 2)
    with precision.autocast(torch.device("cpu"), precision.DTYPES[name]):
        assert (x @ x).dtype == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def test_measuring_leaves_torch_its_threads(monkeypatch):
    threads = [3]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    assert precision.bf16_slowdown(8, 1) > 0
    assert threads == [3, 1, 3]


def test_the_quickest_rounds_are_compared(monkeypatch):
    """By a clock of which each round of fp32 takes 3 or 2 s, and of bf16 8 or 9 s."""
    clock, types = iter([0.0, 3.0, 10.0, 12.0, 20.0, 28.0, 30.0, 39.0]), []
    monkeypatch.setattr(precision, "time", SimpleNamespace(perf_counter=lambda: next(clock)))

    def linear(one, other):
        types.append((one.dtype, other.dtype, one.device.type))

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    with torch.device("meta"):  # whatever a program's default is
        assert precision.bf16_slowdown(8, 2) == 4.0
    kinds = (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16)
    assert types == [(kind, kind, "cpu") for kind in kinds]

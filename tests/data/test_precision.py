"""A line where bf16 is slow: GPUs before Ampere, CPUs without its instructions."""

import pytest
import torch

from widemix.data import precision
from widemix.data.precision import bf16_slowdown, bf16_warning


@pytest.mark.parametrize(
    ("name", "capability", "warned"),
    [("Tesla V100", (7, 0), True), ("Tesla T4", (7, 5), True), ("A100", (8, 0), False), ("H200", (9, 0), False)],
)
def test_gpus_without_bf16_are_named(system, name, capability, warned):
    system({"torch.cuda.get_device_capability": lambda _: capability, "torch.cuda.get_device_name": lambda _: name})
    version = ".".join(map(str, capability))
    words = f"{name} has no bf16 (compute capability {version}, it needs 8.0) and computes it in fp32; set "
    found = bf16_warning(torch.device("cuda", 0))
    assert found == (words + "train.precision fp16" if warned else None)


def by_clock(system, seconds: dict[torch.dtype, tuple[float, ...]]) -> list[tuple]:
    """The layers that are computed, whose rounds in each type take so many seconds."""
    clock, layers = [0.0], []

    def linear(one, other):
        number = sum(kind == one.dtype for kind, *_ in layers)
        clock[0] += seconds[one.dtype][number % len(seconds[one.dtype])]
        layers.append((one.dtype, other.dtype, one.device.type))

    system({"time.perf_counter": lambda: clock[0], "torch.nn.functional.linear": linear})
    return layers


@pytest.mark.parametrize(("slowdown", "warned"), [(1.0, False), (4.0, False), (4.5, True), (12.0, True)])
def test_slow_cpus_are_told(system, slowdown, warned):
    by_clock(system, {torch.float32: (1.0,), torch.bfloat16: (slowdown,)})
    words = f"bf16 is {slowdown:.0f} times as slow as fp32 on this CPU; set train.precision fp32"
    assert bf16_warning(torch.device("cpu")) == (words if warned else None)


def test_the_quickest_rounds_are_compared_on_one_thread(system):
    """Also where a program's default device is another; torch has its threads again."""
    layers, threads = by_clock(system, {torch.float32: (3.0, 2.0), torch.bfloat16: (8.0, 9.0)}), [3]
    system({"torch.get_num_threads": lambda: threads[-1], "torch.set_num_threads": threads.append})
    with torch.device("meta"):
        assert bf16_slowdown(8, 2) == 4.0
    kinds = (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16)
    assert layers == [(kind, kind, "cpu") for kind in kinds]
    assert threads == [3, 1, 3]


@pytest.mark.parametrize("name", precision.DTYPES)
def test_a_context_computes_in_its_type(name):
    x = torch.ones(2, 2)
    with precision.autocast(torch.device("cpu"), precision.DTYPES[name]):
        assert (x @ x).dtype == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]

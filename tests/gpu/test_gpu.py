"""Training on a GPU has the losses of a CPU, in every way of computing. Without one only the comparison is tested."""

import json
from pathlib import Path

import pytest
import torch

from tests.conftest import Command, hide_gpus, train_lines

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU_ALONE = {"CUDA_VISIBLE_DEVICES": ""}
STEPS = 40
# Of a loss, relative, from that of fp32 on the CPU.
TOLERANCE = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 5e-2}
MIXED = ("--augment.mixup", "0.8", "--augment.cutmix", "1.0", "--augment.mix_group", "8")
MIXED += ("--augment.re_prob", "0.5", "--augment.re_count", "3")


def of(engine: str) -> tuple[str, ...]:
    kind, _, stage = engine.partition(" ")
    return ("--engine.kind", kind, *(("--engine.zero_stage", stage) if stage else ()))


ENGINES = ("ddp", "fsdp", "deepspeed 0", "deepspeed 1", "deepspeed 2", "deepspeed 3")
WAYS = {
    f"{engine}, {precision}": (*of(engine), "--train.precision", precision)
    for engine in ENGINES
    for precision in (TOLERANCE if engine != "deepspeed 0" else ["fp32"])
}
WAYS |= {
    f"{memory_layout}, {precision}": ("--engine.memory_layout", memory_layout, "--train.precision", precision)
    for memory_layout in ("plain", "batch_last")
    for precision in TOLERANCE
}
WAYS |= {
    "compiled, fp32": ("--train.compile", "true"),
    "compiled, bf16": ("--train.compile", "true", "--train.precision", "bf16"),
    "checkpointed, fp32": ("--train.activation_checkpointing", "true"),
    "deterministic, fp32": ("--train.deterministic", "true"),
    "Muon, fp32": ("--optim.name", "muon"),
    "stochastic depth, fp32": ("--model.drop_path", "0.3"),
}


def curve(train, folder: Path, name: str, *options: str, cpu: bool = False, steps: int = STEPS) -> list[float]:
    """The losses of a run, which warns of nothing. On the CPU it is a fork, which sees no GPU."""
    words = ("--ranks", "1", "--train.max_steps", str(steps), *MIXED, *options)
    code, output = train(name, *words, recipe="recipes/digits/rp_mixer.yaml", real=not cpu).wait()
    assert code == 0, output
    assert "warning" not in output.lower()
    return [line["loss"] for line in train_lines(folder / name)]


def assert_near(found: list[float], expected: list[float], tolerance: float) -> None:
    assert len(found) == len(expected)
    assert max(abs(a / b - 1) for a, b in zip(found, expected, strict=True)) <= tolerance


def on_the_cpu(way: str) -> tuple[str, ...]:
    """What changes the losses by more than rounding is the same there."""
    options = WAYS[way]
    return options if way.startswith(("Muon", "stochastic")) else ()


@pytest.fixture(scope="module")
def on_cpu():
    """The losses of runs on the CPU, by their options: most ways have the same."""
    return {}


@GPU
@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_the_cpu(way, on_cpu, train, tmp_path):
    options = on_the_cpu(way)
    if options not in on_cpu:
        on_cpu[options] = curve(train, tmp_path, "cpu", *options, cpu=True)
    assert_near(curve(train, tmp_path, "gpu", *WAYS[way]), on_cpu[options], TOLERANCE[way.rpartition(" ")[2]])


@pytest.mark.long
def test_the_comparison_itself(train, tmp_path):
    """On a CPU: a way that computes the same is near, and another experiment is not."""
    plain = curve(train, tmp_path, "plain", "--engine.memory_layout", "plain", cpu=True)
    other = curve(train, tmp_path, "other", *WAYS["batch_last, fp32"], cpu=True)
    assert_near(other, plain, TOLERANCE["fp32"])
    with pytest.raises(AssertionError):
        assert_near([*other[1:], other[0]], plain, TOLERANCE["bf16"])


@GPU
def test_deterministic_runs_are_the_same_bits(train, tmp_path):
    one, two = (curve(train, tmp_path, name, "--train.deterministic", "true") for name in ("one", "two"))
    assert one == two


@GPU
def test_a_killed_run_goes_on_with_the_same_bits(train, tmp_path):
    """Its second start finds Triton's kernels in the cache of the first."""
    options = ("--train.deterministic", "true", "--train.save_every_steps", "10")
    whole = curve(train, tmp_path, "whole", *options, steps=400)
    killed = train("parts", "--ranks", "1", "--train.max_steps", "400", *MIXED, *options, real=True)
    killed.wait_for_step(tmp_path / "parts", 33)
    killed.kill()
    assert not (tmp_path / "parts/done.json").exists()
    assert curve(train, tmp_path, "parts", *options, steps=400) == whole


@GPU
@pytest.mark.parametrize("first", ["cpu", "gpu"])
def test_a_run_goes_on_on_the_other_device(first, train, tmp_path):
    """Half of it with ZeRO 2 on the GPU, the other half with DDP on the CPU, in either order."""
    ways = {"cpu": (), "gpu": of("deepspeed 2")}
    second = "gpu" if first == "cpu" else "cpu"
    curve(train, tmp_path, "run", *ways[first], cpu=first == "cpu", steps=STEPS // 2)
    found = curve(train, tmp_path, "run", *ways[second], cpu=second == "cpu")
    assert_near(found, curve(train, tmp_path, "whole", cpu=True), TOLERANCE["fp32"])


@GPU
def test_a_run_is_evaluated_alike_on_both_devices(train, tmp_path):
    curve(train, tmp_path, "run")
    metrics = []
    for env in (None, CPU_ALONE):
        code, output = Command("eval", tmp_path / "run", "--json", tmp_path / "metrics.json", env=env).wait()
        assert code == 0, output
        metrics.append(json.loads((tmp_path / "metrics.json").read_text()))
    assert metrics[0]["loss"] == pytest.approx(metrics[1]["loss"], rel=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_on_gpus_have_the_losses_of_one(engine, train, tmp_path):
    count = str(min(4, torch.cuda.device_count()) // 2 * 2)
    expected = curve(train, tmp_path, "one")
    assert_near(curve(train, tmp_path, "several", "--ranks", count, *of(engine)), expected, TOLERANCE["fp32"])


@GPU
@pytest.mark.parametrize("words", [("step", "recipes/digits/rp_mixer.yaml", "--compiled"), ("mixup",)])
def test_benchmarks_run(words, tmp_path):
    code, output = Command("bench", *words, "--rounds", "1", "--json", tmp_path / "rows.json").wait()
    assert code == 0, output
    assert all(row["images_per_s"] > 0 for row in json.loads((tmp_path / "rows.json").read_text())["rows"])


@pytest.mark.parametrize(
    ("arguments", "hidden"),
    [
        (["tests/gpu", "tests/data/test_normalise_and_mix.py"], False),
        (["tests/gpu/test_gpu.py::test_benchmarks_run"], False),
        (["tests/gpu", "tests/end_to_end"], True),
        (["tests"], True),
    ],
)
def test_only_tests_of_gpus_see_them(arguments, hidden):
    environ: dict[str, str] = {}
    hide_gpus(arguments, environ)
    assert environ == ({"CUDA_VISIBLE_DEVICES": ""} if hidden else {})

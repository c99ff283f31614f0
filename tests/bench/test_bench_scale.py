"""`widemix bench scale`, in this process and by its command on two ranks."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import ROOT, Fork
from widemix.bench import scale
from widemix.bench.scale import (
    PARTS,
    bind_to_cpus,
    measure_scale,
    read_rows,
    settings_of,
    with_efficiency,
    write_row,
)
from widemix.bench.timing import time_in_turns
from widemix.data.batches import Batch
from widemix.data.loader import TrainLoader
from widemix.distributed.topology import Topology, process_group
from widemix.errors import InputError
from widemix.formats.beton import open_beton
from widemix.models.registry import build_model
from widemix.recipe import Recipe, load_recipe
from widemix.recipe.data import DataSection

RECIPE = "recipes/digits/rp_mixer.yaml"
WAYS = ("plain", "batch_last")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "share_cpus", lambda topology: 1)


def small(digits: Path) -> Recipe:
    return load_recipe(ROOT / RECIPE, [("data.path", str(digits)), ("model.depth", "1"), ("data.workers", "1")])


def test_two_ranks_make_a_row_that_adds_up_next_to_that_of_one_rank(digits: Path, tmp_path: Path) -> None:
    alone = measure_scale(small(digits), batch=16, steps=3)
    assert alone is not None
    write_row(tmp_path / "scale", alone)
    options = (
        "--data.path",
        digits,
        "--batch",
        "16",
        "--steps",
        "3",
        "--to",
        tmp_path / "scale",
        "--model.depth",
        "1",
        "--data.workers",
        "1",
    )
    words = ("bench", "scale", RECIPE, *options, "--ranks", "2", "--json", tmp_path / "all.json")
    code, output = Fork(*words, log=tmp_path / "log").wait()
    assert code == 0, output
    assert f"\n{tmp_path / 'scale' / 'scale.png'}\n" in output
    rows = json.loads((tmp_path / "all.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["1 rank", "2 ranks"]
    for row, ranks in zip(rows, (1, 2), strict=True):
        assert row["images_per_s"] == pytest.approx(16 * ranks / row["step"])
        assert sum(row[part] for part in PARTS) >= 0.999 * row["step"]
        assert all(row[part] >= 0 for part in PARTS)
    assert all(json.loads(path.read_text())["memory_layout"] in WAYS for path in (tmp_path / "scale").glob("*.json"))
    assert rows[0]["efficiency"] == 1
    assert rows[1]["efficiency"] == pytest.approx(rows[1]["images_per_s"] / 2 / rows[0]["images_per_s"])
    assert (tmp_path / "scale" / "scale.png").read_bytes()[:4] == b"\x89PNG"


def test_a_repeated_run_replaces_its_row(tmp_path: Path) -> None:
    for ranks, rate in ((4, 300.0), (16, 800.0), (2, 200.0), (4, 200.0)):
        rows = write_row(tmp_path, {"ranks": ranks, "images_per_s": rate, "settings": {"batch": 8}})
    found = [(row["ranks"], row["images_per_s"], row["efficiency"]) for row in rows]
    assert found == [(2, 200, 1), (4, 200, 0.5), (16, 800, 0.5)]
    assert with_efficiency(rows[1:])[0]["efficiency"] == 1


def test_rows_of_other_settings_are_kept_apart(digits: Path, tmp_path: Path) -> None:
    recipe = small(digits)
    write_row(tmp_path, {"ranks": 1, "images_per_s": 100.0, "settings": settings_of(recipe, 8)})
    with pytest.raises(InputError, match="measured with another cpus; name another folder"):
        read_rows(tmp_path, settings_of(recipe, 8, cpus=1))
    other = recipe.model_copy(update={"data": recipe.data.model_copy(update={"path": "/local/digits"})})
    assert len(read_rows(tmp_path, settings_of(other, 8))) == 1
    with pytest.raises(InputError, match=r"1-ranks\.json: measured with another batch; name another folder"):
        read_rows(tmp_path, settings_of(recipe, 16))


def test_each_rank_of_a_node_keeps_all_its_threads_to_cpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: dict[int, list[int]] = {}
    monkeypatch.setattr(os, "sched_getaffinity", {0: {3, 5, 6, 9, 11}}.__getitem__)  # 0: of this process
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: bound.update({thread: list(cpus)}))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(threading.get_native_id).result()
        for rank, own in enumerate(([3, 5], [6, 9])):
            bind_to_cpus(2, Topology(rank, 2, rank, 2, torch.device("cpu")))
            assert bound[os.getpid()] == bound[other] == own
    with pytest.raises(InputError, match="--cpus 2: 3 ranks of a node may use 5 CPUs in all"):
        bind_to_cpus(2, Topology(0, 3, 0, 3, torch.device("cpu")))


def test_all_networks_have_the_weights_of_the_recipes_seed(digits: Path) -> None:
    """As training has: those of all ranks are alike, though not all engines send rank 0's to the others."""
    recipe = small(digits)
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": 3})})
    topology = Topology(0, 1, 0, 1, torch.device("cpu"))
    with process_group(topology, 60), torch.random.fork_rng():
        networks = [scale._build(recipe, topology)[0] for _ in range(2)]
        torch.manual_seed(3)
        networks.append(build_model(recipe.model, 8, 10))
    first, *others = (network.state_dict() for network in networks)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def test_gpus_compute_fp32_as_the_recipe_says(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(scale, "set_matmul_precision", chosen.append)
    monkeypatch.setattr(scale, "_row", lambda *_: {})
    recipe = small(digits)
    train = recipe.train.model_copy(update={"matmul_precision": "high"})
    measure_scale(recipe.model_copy(update={"train": train}), batch=16, steps=3)
    assert chosen == ["high"]


@pytest.mark.parametrize(("cpus", "workers", "expected"), [(None, 0, (1, 1)), (2, 0, (2, 2)), (2, 3, (2, 3))])
def test_a_rank_computes_and_loads_on_the_cpus_that_it_is_bound_to(
    digits: Path, monkeypatch: pytest.MonkeyPatch, cpus: int | None, workers: int, expected: tuple[int, int]
) -> None:
    """The third: a recipe's own number of threads that load stays."""
    called: dict[str, Any] = {}
    monkeypatch.setattr(scale, "bind_to_cpus", lambda cpus, topology: called.update(bound=(cpus, topology.world)))
    monkeypatch.setattr(scale.torch, "set_num_threads", lambda threads: called.update(threads=threads))
    monkeypatch.setattr(scale, "_row", lambda *_: {})

    def load(data: DataSection, *rest: Any) -> TrainLoader:
        called["workers"] = data.workers
        return TrainLoader(data, *rest)

    monkeypatch.setattr(scale, "TrainLoader", load)
    recipe = small(digits)
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"workers": workers})})
    measure_scale(recipe, batch=16, steps=3, cpus=cpus)
    assert called.pop("bound", None) == (cpus and (cpus, 1))
    assert (called["threads"], called["workers"]) == expected


def test_a_batch_that_leaves_no_steps_is_refused(digits: Path) -> None:
    with pytest.raises(InputError, match="--batch 512: 1 ranks leave 2 steps an epoch"):
        measure_scale(small(digits), batch=512, steps=3)


def test_steps_with_the_loader_are_timed_after_the_first_of_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by what a step takes: the third that counts is in a second epoch, and the last step."""
    clock, epochs, taken = [0.0], [], []
    loading, computing = iter((50, 50, 50, 1, 2, 50, 50, 50, 4)), iter((70, 70, 70, 10, 20, 70, 70, 70, 40))

    class Batches:
        waited = 0.0

        def __iter__(self) -> "Batches":
            return self

        def __next__(self) -> object:
            seconds = 0 if len(taken) % 2 else next(loading)  # the first of a step's two
            self.waited += seconds
            clock[0] += seconds
            taken.append(len(taken))
            return taken[-1]

    class Loader:
        steps = scale.WARMUP + 2

        @contextmanager
        def batches(self, epoch: int):
            epochs.append(epoch)
            yield Batches()

    def step(batches: list, lr: float) -> None:
        assert (batches, lr) == (taken[-2:], 0.0)
        clock[0] += next(computing)

    monkeypatch.setattr(scale, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(scale, "wall_clock", lambda device: clock[0])
    topology = Topology(0, 1, 0, 1, torch.device("cpu"))
    seconds, waited = scale._time_with_loader(step, Loader(), 2, 3, topology)  # type: ignore[arg-type]
    assert (seconds, waited) == ((11 + 22 + 44) / 3, (1 + 2 + 4) / 3)
    assert epochs == [0, 1]
    assert len(taken) == 2 * 9


def on_rank(rank: int, world: int, local_world: int) -> Topology:
    return Topology(rank, world, rank % local_world, local_world, torch.device("cpu"))


@pytest.mark.parametrize(
    ("topology", "times", "parts"),
    [
        (on_rank(0, 4, 2), (1.0, 1.5, 3.0, 0.25), (1.0, 0.5, 0.25, 1.25)),
        (on_rank(0, 4, 2), (1.5, 1.0, 3.0, 0.25), (1.5, 0.0, 0.25, 1.25)),  # the engine's step took less time
        (on_rank(0, 4, 2), (1.0, 1.5, 1.5, 0.25), (1.0, 0.5, 0.25, 0.0)),  # and so did the whole
        (on_rank(0, 1, 1), (1.0, 1.5, 3.0, 0.25), (1.0, 0.0, 0.25, 1.75)),  # which waits for nobody
        (on_rank(1, 4, 2), (1.0, 1.5, 3.0, 0.25), None),
    ],
)
def test_a_row_has_the_means_of_all_ranks_and_the_parts_of_a_step(
    topology: Topology, times: tuple, parts: tuple | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of measured times (alone, together, whole, waited), of which the mean over ranks is twice that of this one."""
    recipe = load_recipe(ROOT / RECIPE, [("train.grad_accum_steps", "2"), ("train.global_batch", "64")])
    alone, together, whole, waited = times
    steps: list[tuple] = []
    engine = SimpleNamespace(step=lambda batches, lr: steps.append((batches, lr)))

    @contextmanager
    def batches(epoch: int):
        assert epoch == 0
        yield iter("abc")

    def time_steps(plain: object, step, number: int, given: Topology) -> tuple[float, float]:
        step()
        assert (plain, steps, number, given) == (("plain", "network", ["a", "b"]), [(["a", "b"], 0.0)], 7, topology)
        return alone, together

    def time_with_loader(step, given: object, count: int, number: int, where: Topology) -> tuple[float, float]:
        assert (step, given, count, number, where) == (engine.step, loader, 2, 7, topology)
        return whole, waited

    loader = SimpleNamespace(batches=batches)
    monkeypatch.setattr(scale, "_build", lambda *_: ("network", "batch_last"))
    monkeypatch.setattr(scale, "build_engine", lambda *_: engine)
    monkeypatch.setattr(scale, "_plain_step", lambda recipe, module, kept, topology: ("plain", module, kept))
    monkeypatch.setattr(scale, "_time_steps", time_steps)
    monkeypatch.setattr(scale, "_time_with_loader", time_with_loader)
    monkeypatch.setattr(scale, "mean_over_ranks", lambda values: 2 * values)
    row = scale._row(recipe, loader, topology, 7, {"batch": 8})  # type: ignore[arg-type]
    if parts is None:
        assert row is None
        return
    assert row is not None
    assert [row[name] for name in PARTS] == [2 * seconds for seconds in parts]
    assert (row["step"], row["images_per_s"]) == (2 * whole, 64 / (2 * whole))
    assert (row["ranks"], row["nodes"]) == (topology.world, 2 if topology.world == 4 else 1)
    assert (row["settings"], row["engine"], row["memory_layout"]) == ({"batch": 8}, recipe.engine.kind, "batch_last")


def test_a_plain_step_has_the_gradient_of_the_whole_batch_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = load_recipe(ROOT / RECIPE, [("train.precision", "fp32"), ("optim.weight_decay", "0.1")])
    network, numbers = torch.nn.Linear(5, 3).eval(), torch.Generator().manual_seed(0)
    inputs, targets = (torch.rand(4, size, generator=numbers) for size in (5, 3))
    batches = [Batch(inputs[own], targets[own], np.arange(2)) for own in (slice(0, 2), slice(2, 4))]
    before, gradients = network.weight.clone(), []
    build = scale.build_optimizer

    def kept(*given):
        optimizer = build(*given)
        optimizer.register_step_pre_hook(lambda *_: gradients.append(network.weight.grad.clone()))  # type: ignore
        return optimizer

    monkeypatch.setattr(scale, "build_optimizer", kept)
    step = scale._plain_step(recipe, network, batches, on_rank(0, 1, 1))
    for _ in range(2):
        step()
    assert network.training
    torch.testing.assert_close(network.weight, before, rtol=0, atol=0)
    (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(network(inputs), targets), [network.weight])
    assert len(gradients) == 2
    for gradient in gradients:
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_steps_are_timed_in_turns_after_the_first_and_all_ranks_begin_together(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Medians, which are not means; the first three of each are not counted."""
    clock, events, shown = [0.0], [], []

    def takes(name: str, *seconds: float):
        own = iter((50, 60, 70, *seconds))

        def step() -> None:
            events.append(name)
            clock[0] += next(own)

        return step

    def barrier() -> None:
        events.append("all")
        clock[0] += 1000

    def in_turns(*given, **options):
        shown.append(options["shown"])
        return time_in_turns(*given, **options | {"shown": False})

    monkeypatch.setattr(scale, "time_in_turns", in_turns)
    monkeypatch.setattr(scale, "wall_clock", lambda device: clock[0])
    monkeypatch.setattr(scale.dist, "barrier", barrier)
    monkeypatch.setattr(scale.dist, "get_rank", lambda: rank)
    plain, engine = takes("plain", 1, 9, 2), takes("engine", 30, 4, 5)
    assert scale._time_steps(plain, engine, 3, on_rank(rank, 2, 2)) == (2, 5)
    assert events == ["all", "plain", "all", "engine"] * 6
    assert shown == [rank == 0]


def test_ranks_have_whole_groups_and_threads_and_steps_enough(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, threads = [], []
    monkeypatch.setattr(scale, "_row", lambda *given: rows.append(given))
    monkeypatch.setattr(scale, "share_cpus", lambda topology: 3)
    monkeypatch.setattr(scale, "bind_to_cpus", lambda cpus, topology: threads.append(("bound", cpus)))
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    values = {"augment.mixup": "0.2", "augment.mix_group": "4", "train.grad_accum_steps": "2"}
    recipe = load_recipe(ROOT / RECIPE, [("data.path", str(digits)), *values.items()])
    with pytest.raises(InputError, match=r"^--batch 6: must be a multiple of augment\.mix_group 4$"):
        measure_scale(recipe, batch=6, steps=7)
    count = len(open_beton(digits / "train.beton"))
    batch = count // 8 // 4 * 4  # four steps of two micro-batches
    for cpus in (None, 1):
        measure_scale(recipe, batch, 7, cpus)
        given, loader, topology, steps, settings = rows.pop()
        assert (given.train.global_batch, loader.steps, topology.world, steps) == (2 * batch, 4, 1, 7)
        assert settings == settings_of(recipe, batch, cpus)
    assert threads == [3, ("bound", 1), 1]
    plain = load_recipe(
        ROOT / RECIPE, [("data.path", str(digits)), ("augment.mix_group", "4"), ("augment.mixup", "0")]
    )
    measure_scale(plain, 6, 7)
    with pytest.raises(
        InputError, match=f"^--batch {batch + 24}: 1 ranks leave 3 steps an epoch; take a smaller one$"
    ):
        measure_scale(recipe, batch + 24, 7)

"""`widemix bench scale`, in this process and by its command on two ranks."""

import itertools
import json
import os
import platform
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.bench.conftest import Clock
from tests.conftest import ROOT, Fork, System
from tests.forks import Forks, group_of
from widemix.bench.scale import (
    PARTS,
    WARMUP,
    bind_to_cpus,
    measure_scale,
    plain_step,
    read_rows,
    settings_of,
    step_parts,
    time_steps,
    time_with_loader,
    with_efficiency,
    write_row,
)
from widemix.data.batches import Batch
from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.models.registry import build_model
from widemix.recipe import Recipe, load_recipe

RECIPE = "recipes/digits/rp_mixer.yaml"
WAYS = ("plain", "batch_last")


@pytest.fixture(autouse=True)
def one_cpu(system: System):
    """And what a rank sets for its process is undone."""
    system({"os.sched_getaffinity": lambda process: {0}})
    yield
    torch.set_float32_matmul_precision("highest")


def small(digits: Path, **values: str) -> Recipe:
    keys = {"data.path": str(digits), "model.depth": "1", "data.workers": "1"} | values
    return load_recipe(ROOT / RECIPE, list(keys.items()))


def one_rank(rank: int = 0, world: int = 1) -> Topology:
    return Topology(rank, world, rank, world, torch.device("cpu"))


def test_a_row_of_two_ranks_adds_up_beside_one_ranks(digits: Path, tmp_path: Path) -> None:
    alone = measure_scale(small(digits), batch=16, steps=3)
    assert alone is not None
    write_row(tmp_path / "scale", alone)
    options = ("--data.path", digits, "--batch", "16", "--steps", "3", "--to", tmp_path / "scale")
    options += ("--model.depth", "1", "--data.workers", "1")
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


def alone_on_a_node(folder: str, path: str) -> None:
    """A rank whose clock goes on by 1 or 3 s each time that it is read."""
    reads, rank = itertools.count(), int(os.environ["RANK"])
    os.sched_getaffinity = lambda process: {0}  # threads of both on the same CPUs would wait for each other
    time.perf_counter = lambda: next(reads) * (1.0, 3.0)[rank]
    row = measure_scale(
        small(Path(path), **{"train.grad_accum_steps": "2", "engine.memory_layout": "plain"}), batch=16, steps=3
    )
    Path(folder, f"{rank}.json").write_text(json.dumps(row))


def test_a_row_of_two_nodes_has_means_of_ranks(digits: Path, tmp_path: Path) -> None:
    environs = [each | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} for each in group_of(2)]
    ranks = Forks(alone_on_a_node, str(tmp_path), str(digits), log=tmp_path / "log", environs=environs)
    codes, output = ranks.wait()
    assert codes == [0, 0], output
    row, none = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert none is None
    assert (row["ranks"], row["nodes"], row["engine"], row["device"]) == (2, 2, "ddp", platform.machine())
    assert row["compute"] == 2  # the mean of 1 and 3 s
    assert row["exposed communication"] == 0
    assert row["step"] == sum(row[part] for part in PARTS)
    assert row["images_per_s"] == 2 * 2 * 16 / row["step"]


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


def test_each_rank_keeps_its_threads_to_its_own_cpus(system: System) -> None:
    bound: dict[int, list[int]] = {}
    system({
        "os.sched_getaffinity": {0: {3, 5, 6, 9, 11}}.__getitem__,  # 0: of this process
        "os.sched_setaffinity": lambda thread, cpus: bound.update({thread: list(cpus)}),
    })  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(threading.get_native_id).result()
        for rank, own in enumerate(([3, 5], [6, 9])):
            bind_to_cpus(2, one_rank(rank, 2))
            assert bound[os.getpid()] == bound[other] == own
    with pytest.raises(InputError, match="--cpus 2: 3 ranks of a node may use 5 CPUs in all"):
        bind_to_cpus(2, one_rank(0, 3))


@pytest.mark.parametrize(("cpus", "workers", "threads", "reads"), [(None, "0", 1, 0), (2, "0", 2, 2), (2, "3", 2, 3)])
def test_ranks_step_as_the_recipe_says_on_their_own_cpus(
    cpus: int | None, workers: str, threads: int, reads: int, digits: Path, system: System
) -> None:
    """Of a rank with five CPUs, or one. A recipe's own number of threads that load stays."""
    bound: dict[int, list[int]] = {}
    began: dict[int, dict] = {}

    def passed(module, *_) -> None:
        if isinstance(module, type(network)):
            began.setdefault(id(module), {name: value.clone() for name, value in module.state_dict().items()})

    values = {"augment.mixup": "0.2", "augment.mix_group": "4", "train.grad_accum_steps": "2", "train.seed": "3"}
    values |= {"train.matmul_precision": "high", "data.workers": workers}
    recipe = small(digits, **values)
    torch.manual_seed(3)
    network = build_model(recipe.model, 8, 10)
    system({
        "os.sched_getaffinity": lambda process: {3, 5, 6, 9, 11} if cpus else {3},
        "os.sched_setaffinity": lambda thread, cpus: bound.update({thread: list(cpus)}),
    })  # fmt: skip
    with register_module_forward_pre_hook(passed), torch.random.fork_rng():
        row = measure_scale(recipe, batch=16, steps=1, cpus=cpus)
    assert row is not None
    assert bound.get(os.getpid()) == ([3, 5][:cpus] if cpus else None)
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (threads, "high")
    assert {f"images_{k}" for k in range(reads)} <= {thread.name for thread in threading.enumerate()}
    assert row["settings"] == settings_of(recipe, 16, cpus)
    assert row["images_per_s"] * row["step"] == pytest.approx(32)
    assert len(began) == 2  # the networks of the plain step and of the engine
    for weights in began.values():
        torch.testing.assert_close(weights, network.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("values", "batch", "said"),
    [
        ({}, 512, "--batch 512: 1 ranks leave 2 steps an epoch; take a smaller one"),
        ({"train.grad_accum_steps": "2"}, 224, "--batch 224: 1 ranks leave 3 steps an epoch; take a smaller one"),
        ({"augment.mixup": "0.2", "augment.mix_group": "4"}, 6,
         r"--batch 6: must be a multiple of augment\.mix_group 4"),
        ({"augment.mixup": "0", "augment.mix_group": "4"}, 513, "--batch 513: 1 ranks leave 2 steps .*"),
    ],
)  # fmt: skip
def test_batches_that_do_not_fit_are_refused(digits: Path, values: dict[str, str], batch: int, said: str) -> None:
    with pytest.raises(InputError, match=f"^{said}$"):
        measure_scale(small(digits, **values), batch, steps=3)


def test_steps_with_the_loader_are_timed_after_the_first(clock: Clock) -> None:
    """The third that counts is in a second epoch, and the last step."""
    epochs, taken = [], []
    loading, computing = iter((50, 50, 50, 1, 2, 50, 50, 50, 4)), iter((70, 70, 70, 10, 20, 70, 70, 70, 40))

    class Batches:
        waited = 0.0

        def __iter__(self) -> "Batches":
            return self

        def __next__(self) -> object:
            seconds = 0 if len(taken) % 2 else next(loading)  # the first of a step's two
            self.waited += seconds
            clock.takes(seconds)
            taken.append(len(taken))
            return taken[-1]

    class Loader:
        steps = WARMUP + 2

        @contextmanager
        def batches(self, epoch: int):
            epochs.append(epoch)
            yield Batches()

    def step(batches: list, lr: float) -> None:
        assert (batches, lr) == (taken[-2:], 0.0)
        clock.takes(next(computing))

    seconds, waited = time_with_loader(step, Loader(), 2, 3, one_rank())  # type: ignore[arg-type]
    assert (seconds, waited) == ((11 + 22 + 44) / 3, (1 + 2 + 4) / 3)
    assert epochs == [0, 1]
    assert len(taken) == 2 * 9


@pytest.mark.parametrize(
    ("world", "times", "parts"),
    [
        (4, (1.0, 1.5, 3.0, 0.25), (1.0, 0.5, 0.25, 1.25)),
        (4, (1.5, 1.0, 3.0, 0.25), (1.5, 0.0, 0.25, 1.25)),  # the engine's step took less time
        (4, (1.0, 1.5, 1.5, 0.25), (1.0, 0.5, 0.25, 0.0)),  # and so did the whole
        (1, (1.0, 1.5, 3.0, 0.25), (1.0, 0.0, 0.25, 1.75)),  # which waits for nobody
    ],
)
def test_parts_of_a_step(world: int, times: tuple, parts: tuple) -> None:
    """Of measured times: alone, together, whole, waited."""
    assert step_parts(*times, world) == parts


def test_a_plain_step_has_the_batchs_gradient_and_changes_nothing() -> None:
    recipe = load_recipe(ROOT / RECIPE, [("train.precision", "fp32"), ("optim.weight_decay", "0.1")])
    network, numbers = torch.nn.Linear(5, 3).eval(), torch.Generator().manual_seed(0)
    inputs, targets = (torch.rand(4, size, generator=numbers) for size in (5, 3))
    batches = [Batch(inputs[own], targets[own], np.arange(2)) for own in (slice(0, 2), slice(2, 4))]
    before, gradients = network.weight.clone(), []
    step = plain_step(recipe, network, batches, one_rank())
    with register_optimizer_step_pre_hook(lambda *_: gradients.append(network.weight.grad.clone())):  # type: ignore
        step()
        step()
    assert network.training
    torch.testing.assert_close(network.weight, before, rtol=0, atol=0)
    (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(network(inputs), targets), [network.weight])
    torch.testing.assert_close(gradients, [expected, expected])


@pytest.mark.parametrize("rank", [0, 1])
def test_steps_are_timed_in_turns_that_all_ranks_begin(rank: int, clock: Clock, system: System, capsys) -> None:
    """Medians, which are not means; the first three of each are not counted. Rank 0 says how far they are."""
    events: list[str] = []

    def takes(name: str, *seconds: float):
        own = iter((50, 60, 70, *seconds))

        def step() -> None:
            events.append(name)
            clock.takes(next(own))

        return step

    def barrier() -> None:
        events.append("all")
        clock.takes(1000)

    system({"torch.distributed.barrier": barrier, "torch.distributed.get_rank": lambda: rank})
    plain, engine = takes("plain", 1, 9, 2), takes("engine", 30, 4, 5)
    assert time_steps(plain, engine, 3, one_rank(rank, 2)) == (2, 5)
    assert events == ["all", "plain", "all", "engine"] * 6
    assert ("turns timed" in capsys.readouterr().err) == (rank == 0)

"""`widemix cost --rehearse`, `--table` and `--measure`: steps of recipes on many ranks in one process, without a GPU.

This process is rank 0 of PyTorch's fake process group; engine and optimizer are those that train, so that what would
fail on the cluster fails here. With DDP and FSDP all tensors are fake, and the micro-batch has its true size;
DeepSpeed copies memory itself, so it gets real tensors and one sample. Fake tensors have no values, which loss
scaling needs, so fp16 is rehearsed as bf16, which has the same size.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from widemix.data.batches import Batch
from widemix.distributed.topology import Topology, read_topology
from widemix.engine import build_engine, check_engine
from widemix.engine.interface import Engine
from widemix.engine.torch_engine import DDPEngine
from widemix.errors import InputError
from widemix.estimate.fake import MemoryTracker, fake_inputs, fake_mode, fake_network, prepare_to_train, unused_of
from widemix.estimate.hardware import Cluster
from widemix.estimate.measure import compare
from widemix.estimate.network import Pass, fake_pass
from widemix.estimate.tables import Row, sample_of, size
from widemix.estimate.traffic import step_traffic
from widemix.models.cost import model_cost
from widemix.models.registry import build_model
from widemix.processes import children_cpu_seconds, end_with_parent
from widemix.recipe import Recipe, check_world
from widemix.recipe.sections import EngineSection


class Rehearsal(NamedTuple):
    """Counts on rank 0 in the second step, since buckets and optimizer state are created in the first."""

    calls: dict[str, int]  # by kind of collective
    bytes: dict[str, int]  # of the whole tensors, by kind of collective
    kept: int  # bytes that stay alive between steps
    peak: int | None  # most bytes alive; None if the micro-batch did not have its true size
    seconds: float  # that the rehearsal took


def rehearse(recipe: Recipe, world: int, local_world: int) -> Rehearsal:
    """Build the engine as rank 0 of `world` and take two steps.

    local_world: ranks on a node.

    Raises what the engine would raise on the cluster.
    """
    began = time.perf_counter()
    check_world(recipe, world)
    train = recipe.train
    if train.precision == "fp16":
        train = train.model_copy(update={"precision": "bf16"})
    topology = Topology(0, world, 0, local_world, torch.device("cpu"))
    check_engine(recipe.engine, recipe.optim, train, topology)
    real = recipe.engine.kind == "deepspeed"
    micro = 1 if real else train.micro_batch_size(world)
    with _fake_group(world):
        mode: Any = nullcontext() if real else fake_mode()
        if real:
            module = build_model(recipe.model, recipe.data.image_size, recipe.data.num_classes)
            eager = train.model_copy(update={"compile": False, "fp8": False})
            prepare_to_train(module, eager, topology.device, unused_of(recipe, module))
        else:
            module = fake_network(recipe, mode)
        memory = MemoryTracker()
        with memory:
            memory.watch(*module.parameters(), *module.buffers())
            engine = build_engine(recipe.engine, module, recipe.optim, train, topology)
        with mode:
            targets = torch.full((micro, recipe.data.num_classes), 1 / recipe.data.num_classes)
            batches = [Batch(fake_inputs(recipe, micro), targets, np.arange(micro))] * train.grad_accum_steps
        for _ in range(2):
            memory.reset()
            _rebuild_buckets(engine)
            with mode, memory:
                engine.step(batches, recipe.optim.lr)
    seconds = time.perf_counter() - began
    return Rehearsal(dict(memory.calls), dict(memory.bytes), memory.alive, None if real else memory.peak, seconds)


def _rebuild_buckets(engine: Engine) -> None:
    """Rebuild DDP's buckets as it does when the second step begins; within the fake mode it could not."""
    if isinstance(engine, DDPEngine):
        engine.model.reducer._rebuild_buckets()


@contextmanager
def _fake_group(world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


_COLUMNS = ("weights", "sent a step", "memory a GPU", "step", "hours", "GPU hours", "rehearsed in", "on CPUs for")
HEAD = f"| recipe | {' | '.join(_COLUMNS)} |\n|---|{'---:|' * len(_COLUMNS)}"


def rehearsal_rows(
    folder: Path, cluster: Cluster, overrides: Sequence[tuple[str, str]] = ()
) -> Iterator[dict[str, Any]]:
    """Yield one row a recipe, with these keys, as soon as it is complete: its numbers by name, or "error".

    "seconds" and "CPU seconds" are those of the whole command, with the start of Python and torch.
    """
    cluster.check()
    recipes = sorted(folder.glob("*.yaml"))
    if not recipes:
        raise InputError(f"--table {folder}: has no recipes (*.yaml)")
    options = ["--gpus", str(cluster.gpus), "--gpu", cluster.gpu, "--network", cluster.network]
    options += [] if cluster.nodes is None else ["--nodes", str(cluster.nodes)]
    options += ["--rehearse", *(f"--{name}={value}" for name, value in overrides)]
    with tempfile.TemporaryDirectory() as temporary:
        for recipe in recipes:
            file = Path(temporary) / f"{recipe.stem}.json"
            command = [sys.executable, "-m", "widemix", "cost", str(recipe), *options, "--json", str(file)]
            began, cpu = time.perf_counter(), children_cpu_seconds()
            run = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=end_with_parent())
            row: dict[str, Any] = {"name": recipe.stem, "seconds": round(time.perf_counter() - began, 1)}
            row["CPU seconds"] = round(children_cpu_seconds() - cpu, 1)
            if run.returncode:
                row["error"] = (run.stderr.strip().splitlines() or ["failed"])[-1]
            else:
                row |= {line["name"]: line["value"] for line in json.loads(file.read_text())["rows"]}
            yield row


def rehearsal_line(row: dict[str, Any]) -> str:
    """Return a row of the Markdown table whose first two lines are `HEAD`."""
    if "error" in row:
        cells = [row["error"].replace("|", "\\|"), *[""] * 5]
    else:
        sent = sum(row.get(f"rehearsed {kind}", 0) for kind in ("all-reduce", "all-gather", "reduce-scatter"))
        memory = f"{row['rehearsed memory'] / 1e9:.2f} GB"
        cells = [f"{row['parameters'] / 1e6:.1f} M", f"{sent / 1e6:,.0f} MB", memory, f"{1e3 * row['step']:.0f} ms"]
        # Without a number of samples there are no hours.
        cells += [f"{row['hours']:.1f}", f"{row['GPU hours']:,.0f}"] if "hours" in row else ["", ""]
    times = (f"{row['seconds']:.0f} s", f"{row['CPU seconds']:.0f} s")
    return " | ".join([f"| `{row['name']}`", *cells, *times]) + " |"


MEASURED = 4  # samples, at least, of a pass with --measure
_MEASURED_FLOPS = 1e11  # of a small network as many samples as have these FLOPs: its operators' starts take longer


def rehearsed(recipe: Recipe, network: Pass, cluster: Cluster, memory: float) -> list[Row]:
    """A step on fake ranks, and how far the estimate is from what was counted."""
    counts = rehearse(recipe, cluster.gpus, cluster.local)
    rows = []
    for collective in step_traffic(recipe.engine, recipe.train, network, cluster):
        if counted := counts.bytes.get(collective.kind):
            error = f"the estimate is {collective.bytes / counted - 1:+.1%} off"
            note = f"a step, in {counts.calls[collective.kind]} calls; {error}"
            rows.append(Row(f"rehearsed {collective.kind}", counted, size(counted), note))
    if counts.peak:
        peak, origin = counts.peak, "counted"
    else:
        peak, origin = counts.kept + network.peak, "counted between steps, plus estimated activations"
    error = f"the estimate is {memory / peak - 1:+.1%} off"
    ranks = f"{cluster.gpus} ranks, of which this process was rank 0"
    rows += [
        Row("rehearsed memory", peak, size(peak), f"peak on a GPU, {origin}; {error}"),
        Row("rehearsal", counts.seconds, f"{counts.seconds:.1f} s", ranks),
    ]
    if peak > cluster.kind.memory:
        raise InputError(_out_of_memory(recipe, peak, cluster))
    return rows


def measured(recipe: Recipe) -> list[Row]:
    """A pass in DDP's precision, timed on this machine, and its roofline there."""
    ddp = recipe.model_copy(update={"engine": EngineSection()})
    cost = model_cost(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    whole = recipe.train.global_batch // recipe.train.grad_accum_steps
    micro = min(max(MEASURED, int(_MEASURED_FLOPS / cost.training_flops)), whole)
    network = fake_pass(ddp, micro, read_topology().device)
    roofline, seconds, peak = compare(ddp, network, micro)
    error = f"its roofline is {1e3 * roofline:.0f} ms, {roofline / seconds:.0%} of it"
    samples = f"{micro} {sample_of(recipe)}s on this"
    rows = [Row("measured pass", seconds, f"{1e3 * seconds:.0f} ms", f"{samples} machine; {error}")]
    if peak:
        off = f"the estimate is {network.peak / peak - 1:+.1%} off"
        rows.append(Row("measured activations", peak, size(peak), f"{samples} GPU; {off}"))
    return rows


def cures(recipe: Recipe, cluster: Cluster) -> str:
    """Return the keys that make a step take less memory: one GPU has nobody to share its state with."""
    train = recipe.train
    first = f"raise train.grad_accum_steps (now {train.grad_accum_steps}), set train.activation_checkpointing"
    return f"{first}{' or engine.kind fsdp' if cluster.gpus > 1 else ' or take more --gpus with engine.kind fsdp'}"


def _out_of_memory(recipe: Recipe, peak: float, cluster: Cluster) -> str:
    reason = f"a step needs {peak / 1e9:.1f} GB on each GPU, a {cluster.gpu} has {cluster.kind.memory / 1e9:g}"
    return f"{reason}; {cures(recipe, cluster)}"

"""What one or several ranks compute for these tests."""

import functools
import itertools
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from tests.conftest import ROOT
from tests.engine.plain import plain_loop
from tests.engine.toys import Stateful
from widemix.data.batches import Batch
from widemix.data.loader import EvalLoader, TrainLoader
from widemix.distributed.topology import Topology, mean_over_ranks, on_main, read_topology
from widemix.engine import Engine, State, apply_training_options, broadcasts_rank0_weights, build_engine
from widemix.engine.memory_layout import set_memory_layout
from widemix.errors import InputError
from widemix.evaluation.evaluate import evaluate_engine
from widemix.models.registry import build_model, build_on_meta
from widemix.recipe import load_recipe
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection
from widemix.recipe.sections import TrainSection
from widemix.run.saving import assembled
from widemix.training.finetune import freeze
from widemix.training.schedule import build_schedule

ENGINES = ["ddp", "fsdp", "deepspeed 0", "deepspeed 1", "deepspeed 2", "deepspeed 3"]
GOLDEN = [
    (recipe, engine, precision)
    for recipe, precision in (("mixer", "fp32"), ("mixer", "bf16"), ("rp_s_mixer", "fp32"))
    for engine in (ENGINES if recipe == "mixer" else ("ddp", "fsdp", "deepspeed 3"))
    if (engine, precision) != ("deepspeed 0", "bf16")  # refused
]
GOLDEN += [("mixer", engine, "fp16") for engine in ("ddp", "fsdp")]
GOLDEN += [("rp_mixer", f"{engine} batch_last", "fp32") for engine in ("ddp", "fsdp", "deepspeed 2")]
GOLDEN += [("rp_s_mixer", f"{engine} batch_last", "bf16") for engine in ("ddp", "fsdp", "deepspeed 1")]
SUPPORTED = [(engine, precision) for engine in ENGINES for precision in ("fp32", "bf16")]
SUPPORTED.remove(("deepspeed 0", "bf16"))  # refused
STEPS, GOLDEN_STEPS = 10, 5
REPMLP = ROOT / "tests/engine/repmlp.yaml"


def overrides_for(engine: str) -> list[tuple[str, str]]:
    kind, *more = engine.split()
    stage = [("engine.zero_stage", each) for each in more if each.isdecimal()]
    layouts = [("engine.memory_layout", each) for each in more if not each.isdecimal()]
    return [("engine.kind", kind), *stage, *layouts]


@functools.cache
def first_batches(
    data: DataSection, augment: AugmentSection, train: TrainSection, topology: Topology
) -> tuple[list[Batch], int]:
    """This rank's micro-batches of the first steps, and how many steps an epoch has."""
    loader = TrainLoader(data, augment, train, topology)
    with loader.batches(0) as batches:
        return list(itertools.islice(batches, STEPS * train.grad_accum_steps)), loader.steps


class Setting:
    """A digits recipe of two blocks with this rank's part of its first batches, and the network as initialised."""

    def __init__(self, recipe: str | Path, data: Path, *overrides: tuple[str, str]):
        self.topology = read_topology()
        fixed = [("data.path", str(data)), ("data.workers", "1"), ("engine.memory_layout", "plain")]
        fixed.append(("model.depth", "2"))
        path = recipe if isinstance(recipe, Path) else ROOT / f"recipes/digits/{recipe}.yaml"
        self.recipe = load_recipe(path, [*fixed, *overrides])
        self.data, train = self.recipe.data, self.recipe.train
        in_fp32 = train.model_copy(update={"precision": "fp32"})
        first, epoch = first_batches(self.data, self.recipe.augment, in_fp32, self.topology)
        micro = train.grad_accum_steps
        self.steps: list[list[Batch]] = [first[i * micro : (i + 1) * micro] for i in range(STEPS)]
        schedule = build_schedule(self.recipe.schedule, self.recipe.optim.lr, epoch, train.epochs)
        self.rates = [schedule(20 + step) for step in range(STEPS)]  # within the warm-up, but well above zero

    @property
    def on_meta(self) -> bool:
        return broadcasts_rank0_weights(self.recipe.engine) and not self.topology.is_main

    def model(self, build: Callable[..., torch.nn.Module] = build_model) -> torch.nn.Module:
        torch.manual_seed(self.recipe.train.seed)
        return build(self.recipe.model, self.data.image_size, self.data.num_classes)

    def engine(self) -> Any:
        module = self.model(build_on_meta if self.on_meta else build_model)
        apply_training_options(module, self.recipe.train, self.topology.device)
        freeze(module, self.recipe.train.freeze)
        set_memory_layout(module, self.recipe.engine, self.recipe.train, self.topology)
        return build_engine(self.recipe.engine, module, self.recipe.optim, self.recipe.train, self.topology)

    def run(self, engine: Any, steps: range = range(STEPS)) -> list[float]:
        """The loss of each step, over all ranks."""
        losses = [engine.step(self.steps[step], self.rates[step]).loss for step in steps]
        return mean_over_ranks(torch.stack(losses).double()).tolist()

    def whole(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Images and targets of each step, of all its micro-batches."""
        return [(torch.cat([b.inputs for b in own]), torch.cat([b.targets for b in own])) for own in self.steps]

    def plain(self, ema: Callable[..., Any] | None = None, steps: int = STEPS) -> tuple[list[float], Any, Any]:
        """The losses of a plain loop on the same batches, its network, and the average of it that `ema` makes."""
        model, recipe = self.model(), self.recipe
        freeze(model, recipe.train.freeze)
        average = ema(model) if ema else None
        options = {"optim": recipe.optim, "loss": recipe.train.loss, "ema": average}
        losses = plain_loop(model, self.whole()[:steps], self.rates[:steps], **options)
        return losses, model, average and average.module


def golden(data: Path) -> dict[tuple[str, str, str], list[float]]:
    """The losses of every engine on two digits recipes, one of them in both precisions."""
    curves = {}
    for recipe, engine, precision in GOLDEN:
        setting = Setting(recipe, data, *overrides_for(engine), ("train.precision", precision))
        curves[recipe, engine, precision] = setting.run(setting.engine(), range(GOLDEN_STEPS))
    return curves


CHAIN = ["deepspeed 3", "ddp", "deepspeed 2", "fsdp", "deepspeed 1", "deepspeed 3", "fsdp"]
EMA = [("train.ema_decay", "0.8"), ("train.ema_warmup", "true")]


def chain(data: Path) -> dict[str, Any]:
    """Steps on one engine after the other, each from the state of the one before: losses, and the last one's state.

    And its metrics on 1437 images in batches of 359, whose last is a single image on rank 0 and none on rank 1.
    """
    losses: list[float] = []
    state, engine, setting = None, None, None
    for number, name in enumerate(CHAIN):
        setting = Setting("mixer", data, *overrides_for(name), *EMA, ("data.eval_split", "train"))
        engine = setting.engine()
        if state is not None:
            engine.load(state)
        first = number * STEPS // len(CHAIN)
        losses += setting.run(engine, range(first, (number + 1) * STEPS // len(CHAIN)))
        state = everywhere(engine.state())
    metrics = evaluate_engine(engine, EvalLoader(setting.data, 359, setting.topology), setting.data.num_classes)
    return {"losses": losses, "model": state.model, "ema": state.ema, "metrics": metrics}


SCHEDULE_FREE = [("optim.name", "schedule_free"), ("schedule.name", "constant"), ("schedule.min_lr", "0")]
MUON = [("optim.name", "muon"), ("optim.momentum", "0.95")]
OPTIMIZERS = {"muon": MUON, "schedule_free": SCHEDULE_FREE}
SHARING = {1: [("muon", "ddp"), ("schedule_free", "ddp")]}  # by world size: on one rank nothing is sharded
SHARING[2] = [("muon", "fsdp"), ("schedule_free", "fsdp"), ("schedule_free", "deepspeed 2")]


def _collectives(engine: Engine) -> int:
    """How many collectives the optimizer alone takes in a step."""
    for tensor in engine.optimizer_tensors():
        tensor.grad = torch.zeros_like(tensor)
    with CommDebugMode() as communication:
        engine.optimizer.step()
    return communication.get_total_counts()


def optimizers(data: Path) -> dict[tuple[str, str], Any]:
    """Losses and final weights of each optimizer on engines that can, resumed after four steps."""
    results = {}
    for name, kind in SHARING[dist.get_world_size()]:
        setting = Setting("mixer", data, *OPTIMIZERS[name], *overrides_for(kind))
        engine = setting.engine()
        losses = setting.run(engine, range(4))
        other = setting.engine()
        other.load(everywhere(engine.state()))
        whole, resumed = setting.run(engine, range(4, STEPS)), setting.run(other, range(4, STEPS))
        results[name, kind] = {
            "losses": losses + whole,
            "resumed": losses + resumed,
            "model": other.state().model,
            "collectives": _collectives(other),
        }
    return results


FIXED = ["ddp", "fsdp", "deepspeed 2", "deepspeed 3"]


def resumed(data: Path) -> dict[str, Any]:
    """With train.deterministic: losses and weights of a run, and of one that a new engine resumes midway."""
    results = {}
    for name in FIXED:
        fixed = [("train.deterministic", "true"), ("train.global_batch", "96")]
        setting = Setting("mixer", data, *overrides_for(name), *fixed)
        engine, other = setting.engine(), setting.engine()
        setting.run(engine, range(3))
        other.load(everywhere(engine.state()))
        results[name] = [(setting.run(one, range(3, 6)), one.state().model) for one in (engine, other)]
    return results


def hybrid(data: Path) -> dict[str, Any]:
    """On nodes of two ranks, each with all shards: losses, what a resumed engine has, and all ranks' shards."""
    setting = Setting("mixer", data, *overrides_for("fsdp"), ("engine.sharding", "hybrid"), *EMA)
    rank, world = dist.get_rank(), dist.get_world_size()
    setting.topology = Topology(rank, world, rank % 2, 2, torch.device("cpu"))
    engine, other = setting.engine(), setting.engine()
    losses, norm = setting.run(engine), engine.weight_norm()
    state = everywhere(engine.state())
    other.load(state)
    sizes = of_all_ranks(sum(len(shard.values) for shard in other.local_shards()))
    held = sum(tensor.to_local().numel() for tensor in engine.optimizer_tensors())
    total = sum(tensor.numel() for tensor in engine.optimizer_tensors())
    return {"losses": losses, "norm": norm, "state": vars(state), "saved": vars(saved_by(other)), "sizes": sizes} | {
        "held": held / total
    }


def handed_out(data: Path) -> dict[str, Any]:
    """Of FSDP's first weights: which ranks' modules had some, what they should be, what is saved, and all buffers."""
    results = {}
    for recipe in (REPMLP, "rp_mixer"):
        setting = Setting(recipe, data, *overrides_for("fsdp"))
        engine = setting.engine()
        results[setting.recipe.model.kind] = {
            "had": of_all_ranks(not setting.on_meta),
            "on_meta": {tensor.is_meta for tensor in setting.model(build_on_meta).parameters()},
            "initial": setting.model().state_dict(),
            "saved": engine.state().model,
            "buffers": of_all_ranks(dict(engine.module.named_buffers())),
        }
    return results


REDUCED = ["ddp", "fsdp", "deepspeed 1", "deepspeed 2", "deepspeed 3"]


def summed(data: Path) -> dict[tuple[str, int, str], float]:
    """In bf16, by engine, micro-batches and dtype of reduction: the sum of all gradients of one weight.

    They are 1 on rank 0 in its first micro-batch and 2^-8 in all others, half of what bf16 can tell from 1. SGD with
    a learning rate of 1 subtracts their mean from the weight, which is 0 before.
    """
    found = {}
    rank, world = dist.get_rank(), dist.get_world_size()
    keys = {"name": "sgd", "momentum": "0", "weight_decay": "0", "clip_grad": "null"}
    optim = [(f"optim.{name}", value) for name, value in keys.items()]
    for name, accumulated, dtype in itertools.product(REDUCED, (1, 4), ("fp32", "bf16")):
        half = [("train.precision", "bf16"), ("engine.reduce_dtype", dtype)]
        unmixed = [("augment.mixup", "0"), ("augment.cutmix", "0"), ("train.grad_accum_steps", str(accumulated))]
        setting = Setting("mixer", data, *overrides_for(name), *optim, *half, *unmixed)
        recipe, module = setting.recipe, torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.zeros_(module.weight)
        engine = build_engine(recipe.engine, module, recipe.optim, recipe.train, setting.topology)
        engine.loss = lambda outputs, targets: outputs.float().sum()
        inputs = [1.0 if rank == number == 0 else 2.0**-8 for number in range(accumulated)]
        batches = [Batch(torch.full((1, 4), value), torch.zeros(1), np.arange(1)) for value in inputs]
        engine.step(batches, 1.0)
        weight = everywhere(engine.state()).model["weight"]
        found[name, accumulated, dtype] = -weight[0, 0].item() * world * accumulated
    return found


def overflowing(data: Path) -> dict[str, Any]:
    """In fp16, steps of which the third overflows on the last rank alone: losses, loss scales and weights."""
    results = {}
    for name in ("ddp", "fsdp"):
        setting = Setting("mixer", data, *overrides_for(name), ("train.precision", "fp16"))
        engine, states = setting.engine(), []
        if setting.topology.rank == setting.topology.world - 1:
            setting.steps[2] = [replace(batch, inputs=batch.inputs * 1e30) for batch in setting.steps[2]]
        losses = []
        for step in range(4):
            losses += setting.run(engine, range(step, step + 1))
            states.append(engine.state())
        results[name] = {"losses": losses, "states": [(state.scalars, state.model) for state in states]}
    return results


def shards(data: Path) -> dict[str, Any]:
    """By engine: the state from all ranks' shards, the gathered state, and how many values each rank has."""
    states = {}
    for name in ENGINES:
        small = [("model.depth", "1"), ("train.global_batch", "96")]
        setting = Setting("rp_mixer", data, *overrides_for(name), *EMA, *small)
        engine = setting.engine()
        setting.run(engine, range(2))
        sizes = of_all_ranks(sum(len(shard.values) for shard in engine.local_shards()))
        states[name] = vars(saved_by(engine)), vars(engine.state()), sizes
    return states


def sampled_and_normed(data: Path) -> dict[str, Any]:
    """Of RepMLP with stochastic depth, by engine: losses, metrics on the test split, and the norm of the weights.

    In two micro-batches, over each of which batch norms take their statistics; "ddp whole" has one.
    """
    results = {}
    for name in ("ddp", "fsdp", "deepspeed 1", "deepspeed 3", "ddp whole"):
        engine_name, whole, _ = name.partition(" whole")
        accumulation = ("train.grad_accum_steps", "1" if whole else "2")
        setting = Setting(REPMLP, data, *overrides_for(engine_name), accumulation)
        engine = setting.engine()
        losses = setting.run(engine, range(5))
        metrics = evaluate_engine(engine, EvalLoader(setting.data, 90, setting.topology), setting.data.num_classes)
        results[name] = {
            "losses": losses,
            "metrics": metrics,
            "norm": engine.weight_norm(),
            "model": engine.state().model,
        }
    return results


STATEFUL = ("instance norm", "evo norm", "another tensor", "spectral norm")


def stateful_engine(setting: Setting, layer: str, recomputed: bool = False) -> Any:
    """An engine of the setting's recipe around another network, see `Stateful`."""
    recipe = setting.recipe
    torch.manual_seed(0)
    module = Stateful(layer, recomputed)
    apply_training_options(module, recipe.train, setting.topology.device)
    return build_engine(recipe.engine, module, recipe.optim, recipe.train, setting.topology)


def changed_by_forward_passes(data: Path) -> dict[str, Any]:
    """By layer: all ranks' buffers, and those of the EMA, after three steps and as they are averaged; what is saved.

    And the error of a count that is each rank's own.
    """
    setting, found = Setting(REPMLP, data, ("train.sync_batch_norm", "false"), *EMA), {}
    for layer in (*STATEFUL, "batch norm"):
        engine = stateful_engine(setting, layer)
        setting.run(engine, range(3))
        before = of_all_ranks(_buffers(engine))
        engine.average_buffers()
        found[layer] = {"before": before, "after": of_all_ranks(_buffers(engine)), "saved": engine.state().model}
    engine = stateful_engine(setting, "count")
    setting.run(engine, range(1))
    try:
        engine.average_buffers()
    except InputError as error:
        found["count"] = str(error)
    return found


def _buffers(engine: Engine) -> dict[str, torch.Tensor]:
    own = {key: value.clone() for key, value in engine.module.named_buffers()}
    averages = engine.ema.tensors[len(engine.optimizer_tensors()) :]
    return own | {f"ema {number}": value.clone() for number, value in enumerate(averages)}


def deepspeeds_own(data: Path) -> dict[int, Any]:
    """By ZeRO stage: the weights that zero_to_fp32 finds in DeepSpeed's own checkpoint, and ours."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights = {}
    for stage in (1, 2, 3):
        setting = Setting("rp_mixer", data, *overrides_for(f"deepspeed {stage}"), ("model.depth", "1"))
        engine = setting.engine()
        setting.run(engine, range(2))
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        engine.engine.save_checkpoint(folder[0], tag="theirs")
        theirs = dict(get_fp32_state_dict_from_zero_checkpoint(folder[0], tag="theirs"))
        weights[stage] = theirs, engine.state().model
        dist.barrier()
        shutil.rmtree(folder[0], ignore_errors=True)
    return weights


def matrix(data: Path, first: int | None = None) -> tuple[dict[str, str], Any]:
    """Of cells in which each two values of the matrix meet: what became of each, and the pairs that never meet.

    first: of so many cells, in which most of them meet.
    """
    from tests.engine.matrix import pairwise, run_cell, said

    cells, never = on_main(read_topology(), pairwise)
    return {said(cell): run_cell(cell) for cell in cells[:first]}, never


def matrix_begun(data: Path) -> tuple[dict[str, str], Any]:
    return matrix(data, 6)


# Bits are compared on three ranks: of two numbers the order of their sum does not matter.
JOBS: dict[str, Callable[[Path], Any]] = {
    job.__name__: job
    for job in (
        golden,
        chain,
        matrix,
        matrix_begun,
        optimizers,
        hybrid,
        handed_out,
        summed,
        overflowing,
        sampled_and_normed,
        changed_by_forward_passes,
        deepspeeds_own,
        resumed,
        shards,
    )
}


def of_all_ranks(own: Any) -> list[Any]:
    """What each rank has, on every rank."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


def everywhere(state: State) -> State:
    """Rank 0's state on every rank, as a checkpoint brings it there."""
    box = [state]
    dist.broadcast_object_list(box)
    return box[0]


def saved_by(engine: Engine) -> State:
    """The state from all ranks' shards, as a save assembles it."""
    every = of_all_ranks(engine.local_shards())
    return State.of(assembled([shard for own in every for shard in own]), engine.scalars())


def assert_equal(one: State, other: State, what: str = "") -> None:
    """Both states, where this rank has them, bit by bit."""
    assert one.scalars == other.scalars, f"{what}: {one.scalars} and {other.scalars}"
    for kind in ("model", "optimizer", "ema"):
        assert_same(getattr(one, kind), getattr(other, kind), f"{what}: {kind}")


def assert_same(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], what: str = "") -> None:
    assert ours.keys() == theirs.keys(), f"{what} {sorted(ours.keys() ^ theirs.keys())[:4]}"
    for name, tensor in ours.items():
        assert (tensor.shape, tensor.dtype) == (theirs[name].shape, theirs[name].dtype), f"shape of {what}/{name}"
        assert torch.equal(tensor, theirs[name]), f"{what}/{name}"


def run_rank(data: Path, folder: Path, job: str) -> None:
    """One of the ranks that together write the job's result to FOLDER/result.pt."""
    warnings.simplefilter("ignore")  # DeepSpeed's own
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, limit = f"file://{folder}/store", timedelta(seconds=600)
    dist.init_process_group("gloo", store, timeout=limit, rank=rank, world_size=world)
    result = JOBS[job](data)
    if rank == 0:
        torch.save(result, folder / "result.pt")
    dist.destroy_process_group()

"""Every combination of networks, engines, precisions, optimizers and options: trained, or refused with a reason.

A cell trains two steps, evaluates, saves, loads what it saved into a new engine, trains both two steps further to
equal numbers, which are those of a loop without an engine, and exports. test_matrix.py has cells in which each two
values meet.
"""

import gc
import itertools
import random
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import timm
import torch

from tests.conftest import ROOT
from tests.engine.plain import plain_loop
from tests.engine.ranks import ENGINES, assert_equal, everywhere, overrides_for, saved_by
from tests.engine.toys import PARTS, known
from tests.run.saved import position
from widemix.data.batches import Batch
from widemix.data.precision import DTYPES
from widemix.distributed.topology import Topology, mean_over_ranks, on_main, read_topology
from widemix.engine import apply_training_options, broadcasts_rank0_weights, build_engine, check_engine
from widemix.errors import InputError
from widemix.models.export import export_model
from widemix.models.registry import build_model, build_on_meta
from widemix.optim.build import build_optimizer
from widemix.recipe import check_world, load_recipe
from widemix.run import checkpoint
from widemix.training.finetune import UNUSED, freeze, unused_parameters

Cell = Mapping[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]
_COMPILING = 3  # times as long a compiled cell takes, so that few are taken
_TRIES = 60  # of cells with a pair, before it is taken for one that is always refused
BATCH, RATE = 8, 1e-2
NETWORKS = ("plain", *PARTS)
OPTIMIZERS = ("adamw", "sgd", "lamb", "muon", "schedule_free", "beta_lasso")
FACTORS: dict[str, tuple[str, ...]] = {
    "network": NETWORKS,
    "engine": tuple(ENGINES),
    "precision": ("fp32", "bf16", "fp16"),
    "optimizer": OPTIMIZERS,
    "freeze": ("", "stem.*"),
    "ema": ("", "0.9"),
    "clip": ("", "1.0"),
    "compile": ("", "true"),
    "recompute": ("", "true"),
}
_OPTIM = {
    "schedule_free": [("schedule.name", "constant"), ("schedule.min_lr", "0")],
    "beta_lasso": [("optim.weight_decay", "0"), ("optim.l1", "1e-5")],
}
_KEYS = {
    "ema": "train.ema_decay",
    "compile": "train.compile",
    "recompute": "train.activation_checkpointing",
    "precision": "train.precision",
    "optimizer": "optim.name",
}


STRUCTURED = {  # 4 tokens and 12 channels, of images of 8 pixels
    "kind": "s_mixer",
    "patch_size": "4",
    "channels": "12",
    "depth": "2",
    "permutation": "random",
    "token_weights": "kronecker",
    "channel_weights": "btt",
    "rank": "2",
}
NOT_TRIED = {("engine", "deepspeed 3"), ("compile", "true")}  # works, but stage 3's hooks break each graph: 30 s


@known()
def accepted(cell: Cell) -> bool:
    """Whether the checks before training accept a cell, on a CPU."""
    try:
        recipe = load_recipe(ROOT / "tests/engine/toy.yaml", overrides(cell))
        check_engine(recipe.engine, recipe.optim, recipe.train, Topology(0, 2, 0, 2, torch.device("cpu")))
    except InputError:
        return False
    return not cell.items() >= NOT_TRIED


def pairwise() -> tuple[list[dict[str, str]], list[Pair]]:
    """Cells in which each two values of `FACTORS` that go together meet at least once; and pairs that never do."""
    missing: dict[Pair, None] = {
        ((one, value), (other, second)): None
        for one, other in itertools.combinations(FACTORS, 2)
        for value, second in itertools.product(FACTORS[one], FACTORS[other])
    }
    numbers, cells, impossible = random.Random(0), [], []
    while missing:
        pair = next(iter(missing))
        tries = [{n: numbers.choice(v) for n, v in FACTORS.items()} | dict(pair) for _ in range(_TRIES)]
        tries.sort(key=lambda cell: -len(_pairs(cell) & missing.keys()) / (_COMPILING if cell["compile"] else 1))
        found = next(filter(accepted, tries), None)
        if found is None:
            impossible.append(pair)
            del missing[pair]
        else:
            cells.append(found)
            missing = {each: None for each in missing if each not in _pairs(found)}
    return cells, impossible


def _pairs(cell: Cell) -> set[Pair]:
    return set(itertools.combinations(cell.items(), 2))


def said(cell: Cell) -> str:
    """The cell in a line."""
    return ", ".join(f"{name} {value}" for name, value in cell.items() if value)


def overrides(cell: Cell) -> list[tuple[str, str]]:
    """The keys of a cell's recipe."""
    name = cell["network"]
    if name.startswith("timm:"):
        network = [("model.kind", "timm"), ("model.name", name.removeprefix("timm:")), ("data.image_size", "32")]
    elif name == "structured":
        network = [(f"model.{key}", value) for key, value in STRUCTURED.items()]
    else:
        network = (
            [("model.kind", "toy")] if name == "plain" else [("model.kind", "toy"), ("model.parts", f"[{name}]")]
        )
    keys = [*network, *overrides_for(cell["engine"]), ("train.global_batch", str(BATCH)), ("augment.mix_group", "1")]
    keys += [(_KEYS[name], value) for name, value in cell.items() if name in _KEYS and value]
    keys += [("optim.clip_grad", cell.get("clip") or "null"), *_OPTIM.get(cell["optimizer"], [])]
    if "freeze" in cell:
        frozen = [pattern for pattern in (cell["freeze"], "unused" if name == "unused" else "") if pattern]
        keys.append(("train.freeze", f"[{', '.join(frozen)}]"))
    return keys


@known()
def run_cell(cell: Cell) -> str:
    """Return "trained", or "refused: " and the reason. Every rank calls it. Any other fault is an exception."""
    with (
        patch.object(torch.nn.functional, "linear", torch.nn.functional.linear),  # ZeRO 3 replaces it for the process
        patch.object(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="eager")),
        patch.object(gc, "collect", lambda *_: 0),  # which DeepSpeed calls ten times while it makes an engine
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            return _Run(cell).run()
        except InputError as error:
            return f"refused: {error}" if "\n" not in str(error) else f"refused in several lines: {error}"


class _Run:
    def __init__(self, cell: Cell):
        self.topology = read_topology()
        self.recipe = load_recipe(ROOT / "tests/engine/toy.yaml", overrides(cell))
        recipe = self.recipe
        check_world(recipe, self.topology.world)
        check_engine(recipe.engine, recipe.optim, recipe.train, self.topology)

    def network(self, build: Any = build_model, plain: bool = False) -> torch.nn.Module:
        recipe = self.recipe
        torch.manual_seed(0)
        module = build(recipe.model, recipe.data.image_size, recipe.data.num_classes)
        unused = unused_parameters(module, self.batch(0).inputs) if UNUSED in recipe.train.freeze else set()
        if not plain:
            apply_training_options(module, recipe.train, self.topology.device)
        freeze(module, recipe.train.freeze, unused)
        return module

    def engine(self) -> Any:
        recipe = self.recipe
        on_meta = broadcasts_rank0_weights(recipe.engine) and not self.topology.is_main
        module = self.network(build_on_meta if on_meta else build_model)
        return build_engine(recipe.engine, module, recipe.optim, recipe.train, self.topology)

    def batch(self, step: int, rank: int | None = None) -> Batch:
        """What a rank has of a step's batch, or all of it."""
        side, numbers = self.recipe.data.image_size, torch.Generator().manual_seed(step)
        inputs = torch.randn(BATCH, 3, side, side, generator=numbers)
        targets = torch.rand(BATCH, 10, generator=numbers).softmax(-1)
        size = BATCH // self.topology.world
        rows = slice(None) if rank is None else slice(rank * size, (rank + 1) * size)
        return Batch(inputs[rows], targets[rows], np.arange(BATCH)[rows])

    def steps(self, engine: Any, steps: range) -> list[float]:
        """The losses over all ranks."""
        losses = []
        for step in steps:
            result = engine.step([self.batch(step, self.topology.rank)], RATE)
            assert result.grad_norm.isfinite()
            losses.append(result.loss)
        return mean_over_ranks(torch.stack(losses).double()).tolist()

    def plain_steps(self, steps: range) -> list[float]:
        """The losses of a loop without an engine, on the whole batches, with our optimizers and their groups."""
        model, optim = self.network(plain=True), self.recipe.optim
        batches = [(batch.inputs, batch.targets) for batch in map(self.batch, steps)]
        others = {"dtype": DTYPES[self.recipe.train.precision], "optimizers": [build_optimizer(optim, model)]}
        return plain_loop(model, batches, [RATE] * len(steps), optim=optim, **others)

    def run(self) -> str:
        engine = self.engine()
        losses = self.steps(engine, range(2))
        saved, logits = self.save(engine), self.evaluate(engine)
        other = self.engine()
        other.load(saved.load())
        assert_equal(saved.load(), everywhere(other.state()), "loaded and saved again")
        for prefix, values in self.evaluate(other).items():
            assert torch.equal(values, logits[prefix]), f"{prefix}logits of the resumed engine"
        later = self.steps(engine, range(2, 4))
        assert later == self.steps(other, range(2, 4)), "losses after resuming"
        assert_equal(everywhere(engine.state()), everywhere(other.state()), "state after resuming")
        on_main(self.topology, lambda: self.check_saved(saved, logits))
        tolerance = 1e-5 if self.recipe.train.precision == "fp32" else 0.03
        np.testing.assert_allclose(losses + later, self.plain_steps(range(4)), rtol=tolerance, err_msg="losses")
        return "trained"

    def save(self, engine: Any) -> checkpoint.Checkpoint:
        """Save as the loop does; and the shards of all ranks must be the gathered state."""
        engine.average_buffers()
        state, gathered, scalars = saved_by(engine), engine.state(), engine.scalars()

        def write() -> Path:
            assert_equal(state, gathered, "shards and gathered state")
            folder = Path(tempfile.mkdtemp(prefix="matrix-"))
            at = position(2).model_copy(update={"scalars": scalars, "recipe": self.recipe.model_dump(mode="json")})
            return checkpoint.save(folder, state, at, checkpoint.RetentionPolicy(1))

        return checkpoint.find(on_main(self.topology, write))

    @torch.no_grad()
    def evaluate(self, engine: Any) -> dict[str, torch.Tensor]:
        """The logits of each of the engine's sets of weights."""
        logits = {}
        for prefix, weights in engine.weights().items():
            with weights, engine.evaluate_mode():
                engine.module.eval()
                logits[prefix] = engine.module(self.batch(9).inputs).float()  # all of it on each rank
                engine.module.train()
            assert logits[prefix].isfinite().all()
        return logits

    @torch.no_grad()
    def check_saved(self, saved: checkpoint.Checkpoint, logits: Mapping[str, torch.Tensor]) -> None:
        """New networks with the saved weights, and what timm makes of an export, have the engine's logits."""
        recipe, state = self.recipe, saved.load()
        section, size, inputs = recipe.model, recipe.data.image_size, self.batch(9).inputs
        near = {"rtol": 1e-4, "atol": 1e-5} if recipe.train.precision == "fp32" else {"rtol": 0.1, "atol": 0.1}
        for prefix, weights in (("", state.model), *([("ema_", state.ema)] if state.ema else [])):
            model = build_model(section, size, recipe.data.num_classes).eval()
            model.load_state_dict(weights)
            plain = model(inputs)
            torch.testing.assert_close(plain, logits[prefix], **near, msg=lambda text, p=prefix: f"{p}logits: {text}")
            folder = saved.path / f"{prefix}export"
            export_model(model, section, folder, data=recipe.data, labels=[str(n) for n in range(10)])
            exported = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
            assert torch.equal(exported(inputs), plain), "an export's logits"
        shutil.rmtree(saved.path.parents[1])

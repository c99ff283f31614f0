"""Runs on random ranks, engines and accumulations, restarted at random steps, against one plain PyTorch loop.

`make test ARGS='tests/end_to_end/test_worlds.py --worlds 100'` tries a hundred of them.
"""

import json
import random
from pathlib import Path

import pytest
import torch
from timm.utils import ModelEmaV3
from torch.nn.functional import cross_entropy

from tests.conftest import ROOT, train_lines
from tests.engine.plain import plain_loop
from widemix.data.loader import EvalLoader, TrainLoader
from widemix.distributed.topology import Topology
from widemix.models.drop_path import number_drop_paths, set_drop_path_keys
from widemix.models.registry import build_model
from widemix.recipe import load_recipe
from widemix.training.schedule import build_schedule

RECIPE = "recipes/digits/rp_mixer.yaml"
EPOCHS, BATCH, STEPS_PER_EPOCH = 2, 240, 5
LAST = EPOCHS * STEPS_PER_EPOCH
FIXED = {
    "model.depth": "2",
    "model.drop_path": "0.2",
    "train.epochs": f"{EPOCHS}",
    "train.global_batch": f"{BATCH}",
    "train.ema_decay": "0.9",
    "augment.mix_group": "4",
    "schedule.warmup_epochs": "1",
    "eval.every_epochs": f"{EPOCHS}",
}
ENGINES = ["ddp", "fsdp", "deepspeed 0", "deepspeed 1", "deepspeed 2", "deepspeed 3"]
OPTIMIZERS = {"adamw": {}, "sgd": {"optim.lr": "0.1"}}
FIRST = 645  # of the worlds' numbers: the first two have FSDP2 and ZeRO on several ranks, and a restart on others


def random_world(number: int) -> tuple[str, list[tuple[int, str, int, int]]]:
    """An optimizer, and the starts of a run: ranks, engine, accumulation and the step that each one ends at."""
    chance = random.Random(number)
    restarts = sorted(chance.sample(range(1, LAST), number % 3))
    starts = []
    for stop in [*restarts, LAST]:
        ranks = chance.randint(1, 4)
        accumulation = chance.choice([k for k in range(1, 5) if 12 % (ranks * k) == 0])
        starts.append((ranks, chance.choice(ENGINES), accumulation, stop))
    return chance.choice(list(OPTIMIZERS)), starts


def pytest_generate_tests(metafunc) -> None:
    if "world" in metafunc.fixturenames:
        worlds = [random_world(FIRST + number) for number in range(metafunc.config.getoption("--worlds"))]
        names = [
            ", then ".join([optimizer, *(f"{engine} on {n} x {k} to {stop}" for n, engine, k, stop in starts)])
            for optimizer, starts in worlds
        ]
        metafunc.parametrize("world", worlds, ids=names)


@pytest.fixture(scope="module")
def expected(digits):
    """By optimizer: the plain loop's losses, and the metrics of its weights and of timm's average of them."""
    return {name: plain_run(digits, name) for name in OPTIMIZERS}


def plain_run(digits: Path, name: str) -> tuple[list[float], dict[str, float]]:
    alone = Topology(0, 1, 0, 1, torch.device("cpu"))
    options = {**FIXED, **OPTIMIZERS[name], "optim.name": name, "data.path": str(digits), "data.workers": "1"}
    recipe = load_recipe(ROOT / RECIPE, list(options.items()))
    torch.manual_seed(recipe.train.seed)
    model = build_model(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    layers = number_drop_paths(model)

    def batches():
        for epoch in range(EPOCHS):
            with TrainLoader(recipe.data, recipe.augment, recipe.train, alone).batches(epoch) as loaded:
                for batch in loaded:
                    set_drop_path_keys(layers, batch.keys)
                    yield batch.inputs, batch.targets

    schedule = build_schedule(recipe.schedule, recipe.optim.lr, STEPS_PER_EPOCH, EPOCHS)
    ema = ModelEmaV3(model, decay=0.9)
    losses = plain_loop(model, batches(), [schedule(step) for step in range(LAST)], optim=recipe.optim, ema=ema)
    metrics = {}
    with EvalLoader(recipe.data, 360, alone).batches() as loaded, torch.no_grad():
        (batch,) = loaded
        for prefix, network in (("", model), ("ema_", ema.module)):
            logits = network.eval()(batch.inputs)
            metrics[f"{prefix}loss"] = cross_entropy(logits, batch.targets).item()
            metrics[f"{prefix}top1"] = 100 * (logits.argmax(1) == batch.targets).double().mean().item()
    return losses, metrics


def test_a_run_in_any_world_has_the_plain_loops_losses(train, expected, tmp_path, world):
    optimizer, starts = world
    options = [f for pair in {**FIXED, **OPTIMIZERS[optimizer]}.items() for f in (f"--{pair[0]}", pair[1])]
    for ranks, engine, accumulation, stop in starts:
        kind, _, stage = engine.partition(" ")
        how = ["--engine.kind", kind, *(["--engine.zero_stage", stage] if stage else [])]
        how += ["--train.grad_accum_steps", f"{accumulation}", "--train.max_steps", f"{stop}"]
        code, output = train("run", *options, "--optim.name", optimizer, *how, world=ranks).wait()
        assert code == 0, output
    losses, metrics = expected[optimizer]
    lines = train_lines(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, LAST + 1))
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-5)
    done = json.loads((tmp_path / "run/done.json").read_text())
    for name, value in metrics.items():
        assert done[name] == pytest.approx(value, rel=1e-4 if "loss" in name else 0, abs=0.3), name

"""Runs of eight steps on twenty digits in the test's own process, with all that they did: half a second each.

And the tables by which every key of a section is shown to reach what it is for: see `Row`.
"""

import io
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import widemix.trainer
from tests.conftest import ROOT, System
from widemix.data.batches import Batch
from widemix.errors import RunError
from widemix.recipe import load_recipe
from widemix.training import schedule
from widemix.training.loop import Loop

MIXER = ROOT / "recipes/digits/mixer.yaml"
SMALL_MIXER = {"model.channels": "4", "model.depth": "2", "model.expansion": "1"}
# Two epochs of four steps of five digits, nothing of them mixed; evaluated on the images that it trains on.
SMALL = {
    "data.eval_split": "train",
    "data.workers": "1",
    "augment.mixup": "0",
    "augment.smoothing": "0",
    "optim.clip_grad": "null",
    "schedule.warmup_epochs": "0",
    "train.epochs": "2",
    "train.global_batch": "5",
    "engine.memory_layout": "plain",
    "eval.every_epochs": "1",
    "eval.batch_size": "20",
    "log.every": "1",
    "log.tensorboard": "false",
    "log.images": "0",
}

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass
class SmallRun:
    """What a run did."""

    folder: Path
    steps: list[list[Batch]] = field(default_factory=list)  # the micro-batches of each
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)  # the first ones, and those after each step
    evaluated_sizes: list[int] = field(default_factory=list)  # of the batches of evaluations
    settings: dict[str, Any] = field(default_factory=dict)  # those of the process in the first step
    compiled: int = 0  # calls of what torch.compile returned
    entered: int = 0  # how often the first block was begun in training, recomputed or not
    loop: Any = None
    error: str = ""  # of a run that failed

    def lines(self, split: str) -> list[dict[str, Any]]:
        text = (self.folder / "metrics.jsonl").read_text()
        return [line for line in map(json.loads, text.splitlines()) if line["split"] == split]

    def column(self, split: str, name: str) -> list[Any]:
        """A metric of every line; None where a line has none."""
        return [line.get(name) for line in self.lines(split)]

    def events(self) -> list[tuple[str, int]]:
        return [(line["event"], line["step"]) for line in self.lines("event")]

    def evaluated(self) -> list[int]:
        """The steps with evaluations."""
        return self.column("eval", "step")

    def kept(self) -> list[int]:
        """The steps of complete checkpoints."""
        return sorted(int(path.parent.name) for path in self.folder.glob("checkpoints/*/COMPLETE"))

    def samples(self) -> list[list[int]]:
        return [[number for batch in batches for number in batch.samples.tolist()] for batches in self.steps]


def _watch(loop: Loop, run: SmallRun, clock: SimpleNamespace) -> None:
    run.loop, engine, step = loop, loop.engine, loop.engine.step

    def weights() -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in engine.module.state_dict().items()}

    def watched(batches: Sequence[Batch], lr: float) -> Any:
        if not run.settings:
            run.settings |= process_settings()
        run.steps.append(list(batches))
        run.rates.append(lr)
        result = step(batches, lr)
        run.losses.append(result.loss.item())
        run.weights.append(weights())
        clock.now += 60
        return result

    def enter(part: torch.nn.Module, given: tuple[torch.Tensor]) -> None:
        run.entered += part.training
        run.evaluated_sizes += [] if part.training else [len(given[0])]

    run.weights.append(weights())
    engine.module.blocks[0].register_forward_pre_hook(enter)
    engine.step = watched


def process_settings() -> dict[str, Any]:
    """What torch is set to for the whole process."""
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    return {
        "matmul_precision": torch.get_float32_matmul_precision(),
        "tf32": torch.backends.cudnn.allow_tf32,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "nccl": os.environ.get("NCCL_ALGO"),
        "benchmark": torch.backends.cudnn.benchmark,
        "timeout_s": group.options._timeout.total_seconds(),
    }


class SmallRuns:
    """`runs(("section.key", "value"), ...)` is the run of a small recipe with these keys; each is run once.

    OTHER in a value is the folder of the run with another seed.
    """

    def __init__(self, data: Path, folder: Path):
        self._data, self._folder = data, folder
        self._known: dict[tuple, SmallRun] = {}

    def __call__(self, *overrides: tuple[str, str], recipe: Path = MIXER, patch: Patch | None = None) -> SmallRun:
        """patch: changes what this run alone sees."""
        known = recipe, overrides, patch
        if known not in self._known:
            self._known[known] = self._run(recipe, overrides, patch)
        return self._known[known]

    def _run(self, path: Path, overrides: tuple[tuple[str, str], ...], patch: Patch | None) -> SmallRun:
        keys = SMALL | (SMALL_MIXER if path == MIXER else {}) | {"data.path": str(self._data)}
        for key, value in overrides:
            keys[key] = value.replace("OTHER", str(self(("train.seed", "3")).folder)) if "OTHER" in value else value
        recipe, run = load_recipe(path, [*keys.items()]), SmallRun(self._folder / f"{len(self._known)}")
        with pytest.MonkeyPatch.context() as monkeypatch, redirect_stderr(io.StringIO()):
            isolate(monkeypatch, "RANK", "WORLD_SIZE", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")
            System(monkeypatch)({f"torch.backends.cudnn.{name}": True for name in ("benchmark", "allow_tf32")})
            _watch_loops(monkeypatch, run)
            if patch:
                patch(monkeypatch)
            try:
                widemix.train(recipe, run.folder)
            except RunError as error:
                run.error = str(error)
            finally:
                torch.use_deterministic_algorithms(False)
                torch.set_float32_matmul_precision("highest")
        return run


def isolate(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let a run find nothing of other tests in these variables, and leave nothing to them."""
    for name in names:
        monkeypatch.setenv(name, "")  # so that what the run sets is removed
        monkeypatch.delenv(name)


def _watch_loops(monkeypatch: pytest.MonkeyPatch, run: SmallRun) -> None:
    """Have `run` note what the next loop does; each step takes a minute of the clock of saves and evaluations."""
    clock = SimpleNamespace(now=0.0)
    theirs = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=time.perf_counter)
    monkeypatch.setattr(schedule, "time", theirs)

    def compiled(function: Callable, **_: Any) -> Callable:
        def counted(*arguments: Any) -> Any:
            run.compiled += 1
            return function(*arguments)

        return counted

    System(monkeypatch)({"torch.compile": compiled})

    class Watched(Loop):
        def __init__(self, *parts: Any, **others: Any) -> None:
            super().__init__(*parts, **others)
            _watch(self, run, clock)

    monkeypatch.setattr(widemix.trainer, "Loop", Watched)


def flat(tensors: Mapping[str, torch.Tensor]) -> list[float]:
    """All numbers of some tensors, by their names."""
    return [value for name in sorted(tensors) for value in tensors[name].double().flatten().tolist()]


@dataclass(frozen=True)
class Row:
    """A key's value that is not its default, and by what a run shows that it has reached what it is for.

    `seen` of the run with that value is `expected`, which is computed without the code that reads the key; of the
    run without the value it is not.
    """

    value: str
    seen: Callable[[SmallRun], Any]
    expected: Any  # or a function of the run
    others: tuple[tuple[str, str], ...] = ()  # keys that both runs have
    recipe: Path = MIXER
    patch: Patch | None = None

    def check(self, key: str, runs: SmallRuns) -> None:
        run = runs(*self.others, (key, self.value), recipe=self.recipe, patch=self.patch)
        default = runs(*self.others, recipe=self.recipe, patch=self.patch)
        expected = self.expected(run) if callable(self.expected) else self.expected
        assert self.seen(run) == expected
        assert self.seen(default) != expected


def differs(value: str, seen: Callable[[SmallRun], Any], *others: tuple[str, str]) -> Row:
    """Of a value with which a run is another one, and no more can be said."""
    return Row(value, seen, seen, others)

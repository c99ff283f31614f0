"""What the runs of a study take. Imports torch, which counts networks without a formula."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from widemix.estimate.hardware import Cluster
from widemix.estimate.recipe_tables import header_fields
from widemix.estimate.report import estimate
from widemix.models.cost import FLOAT, model_cost
from widemix.recipe import Recipe
from widemix.studies.study_run import StudyRun


@dataclass(frozen=True)
class Requirements:
    """What one run takes: hours on one GPU (None if the number of samples is not known) and bytes of checkpoints."""

    hours: float | None
    bytes: int


def requirements(study_runs: Sequence[StudyRun], gpu: str) -> dict[str, Requirements]:
    """Return what each run takes, by its name: hours from a roofline, as `widemix cost` computes them."""
    found: dict[str, Requirements] = {}
    known: dict[str, Requirements] = {}  # runs that differ only in their seed take the same
    for study_run in study_runs:
        values = study_run.recipe.model_dump(mode="json")
        values["train"]["seed"] = 0
        alike = repr(values)
        if alike not in known:
            known[alike] = Requirements(_hours(study_run, gpu), _checkpoint_bytes(study_run.recipe))
        found[study_run.name] = known[alike]
    return found


def _hours(study_run: StudyRun, gpu: str) -> float | None:
    stated = re.search(r"--samples (\d+)", header_fields(study_run.path).get("cost", ""))
    samples = int(stated[1]) if stated and not (Path(study_run.recipe.data.path) / "manifest.json").exists() else None
    rows = estimate(study_run.recipe, Cluster(1, gpu), samples)
    return next((row.value for row in rows if row.name == "hours"), None)


def _checkpoint_bytes(recipe: Recipe) -> int:
    """Bytes of the checkpoints that a run keeps: weights, optimizer states and average, in fp32."""
    cost = model_cost(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    copies = 1 + recipe.optim.spec.states + (recipe.train.ema_decay is not None)
    kept = recipe.train.keep_last + (recipe.train.keep_best is not None)
    return FLOAT * cost.parameters * copies * kept

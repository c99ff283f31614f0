"""Recipe sections that tests build from the few keys they care about."""

from typing import Any

from widemix.recipe.sections import TrainSection


def train_section(global_batch: int, grad_accum_steps: int = 1, seed: int = 0, **keys: Any) -> TrainSection:
    """A train section of one epoch in fp32, unless `keys` say otherwise."""
    return TrainSection(
        **{"epochs": 1, "global_batch": global_batch, "grad_accum_steps": grad_accum_steps, "seed": seed, **keys}
    )

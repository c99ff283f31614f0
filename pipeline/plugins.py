"""For plug-ins: modules that a recipe names in `plugins`, and that register their parts when they are imported."""

from widemix.data.augment.registry import LINEAR, SIGNED, MagnitudeMap, register_operation
from widemix.data_prep.samples import Dataset, FileSlice, Sample
from widemix.data_prep.sources import register_source
from widemix.metrics import PERCENT, Metric, register_metric
from widemix.models.families import register as register_family
from widemix.models.section import ModelSection
from widemix.optim.section import register as register_optimizer
from widemix.optim.spec import OptimizerSpec
from widemix.recipe.losses import LossSpec
from widemix.recipe.losses import register as register_loss
from widemix.section import key

__all__ = [
    "LINEAR",
    "PERCENT",
    "SIGNED",
    "Dataset",
    "FileSlice",
    "LossSpec",
    "MagnitudeMap",
    "Metric",
    "ModelSection",
    "OptimizerSpec",
    "Sample",
    "key",
    "register_family",
    "register_loss",
    "register_metric",
    "register_operation",
    "register_optimizer",
    "register_source",
]

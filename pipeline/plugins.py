"""What a plug-in needs: a module that a recipe names in `plugins`; it registers its parts when it is imported."""

from widemix.data.augment.registry import LINEAR, SIGNED, Law, register_operation
from widemix.data_prep.samples import Dataset, FileSlice, Sample
from widemix.data_prep.sources import register_source
from widemix.metrics import PERCENT, Figure, register_figure
from widemix.models.families import register as register_family
from widemix.models.section import ModelSection
from widemix.optim.registry import OptimizerSpec
from widemix.optim.registry import register as register_optimizer
from widemix.recipe.losses import LossSpec
from widemix.recipe.losses import register as register_loss
from widemix.section import key

__all__ = [
    "LINEAR",
    "PERCENT",
    "SIGNED",
    "Dataset",
    "Figure",
    "FileSlice",
    "Law",
    "LossSpec",
    "ModelSection",
    "OptimizerSpec",
    "Sample",
    "key",
    "register_family",
    "register_figure",
    "register_loss",
    "register_operation",
    "register_optimizer",
    "register_source",
]

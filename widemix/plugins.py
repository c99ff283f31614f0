"""What a plug-in needs: a module that a recipe names in `plugins`; it registers its parts when it is imported."""

from data_prep.samples import Dataset, FileSlice, Sample
from data_prep.sources import register_source
from pipeline.data.augment.registry import LINEAR, SIGNED, Law, register_operation
from pipeline.figures import PERCENT, Figure, register_figure
from pipeline.models.families import register as register_family
from pipeline.models.section import ModelSection
from pipeline.optim.registry import OptimizerSpec
from pipeline.optim.registry import register as register_optimizer
from pipeline.recipe.losses import LossSpec
from pipeline.recipe.losses import register as register_loss
from pipeline.section import key

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

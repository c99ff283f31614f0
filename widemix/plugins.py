"""What a plug-in needs: a module that a recipe names in `plugins`; it registers its parts when it is imported."""

from data_prep.samples import Dataset
from data_prep.sources import register_source
from pipeline.data.augment.registry import Law, register_operation
from pipeline.models.families import register as register_family
from pipeline.models.section import ModelSection
from pipeline.optim.registry import OptimizerSpec
from pipeline.optim.registry import register as register_optimizer
from pipeline.section import key

__all__ = [
    "Dataset",
    "Law",
    "ModelSection",
    "OptimizerSpec",
    "key",
    "register_family",
    "register_operation",
    "register_optimizer",
    "register_source",
]

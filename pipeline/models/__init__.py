"""The model family. Importing it puts its names into timm's registry."""

from pipeline.models import timm_names, timm_text
from pipeline.models.cost import ModelCost, model_cost
from pipeline.models.named import NAMED
from pipeline.models.registry import build_model

__all__ = ["NAMED", "ModelCost", "build_model", "model_cost", "timm_names", "timm_text"]

"""The model family. Importing it puts its names into timm's registry."""

from pipeline.models.cost import ModelCost, model_cost
from pipeline.models.registry import build_model

__all__ = ["ModelCost", "build_model", "model_cost"]

"""A whole recipe: one frozen section per builder; `rules` holds between them.

Validation checks and never changes a value. Every key states its unit, and its default is what stands in its section.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator
from pydantic_core import PydanticKnownError

from widemix.models.families import KINDS
from widemix.models.section import ModelSection
from widemix.optim.section import OptimSection
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import AnyDataSection
from widemix.recipe.rules import RULES
from widemix.recipe.sections import (
    EngineSection,
    EvalSection,
    FaultsSection,
    LogSection,
    ScheduleSection,
    TrainSection,
)
from widemix.section import Section


def _model_section(value: Any) -> ModelSection:
    """The model section of the family that `kind` names, with the errors of a pydantic union.

    The table of families is read here and not when this file is imported, so that others may register theirs.
    """
    if isinstance(value, ModelSection):
        return value
    if not isinstance(value, dict):
        raise PydanticKnownError("dict_type")
    if "kind" not in value:
        raise PydanticKnownError("union_tag_not_found", {"discriminator": "kind"})
    kind = value["kind"]
    if not isinstance(kind, str) or kind not in KINDS:
        context = {"discriminator": "kind", "tag": str(kind), "expected_tags": ", ".join(KINDS)}
        raise PydanticKnownError("union_tag_invalid", context)
    return KINDS[kind].model_validate(value)


class RecipeFields(Section):
    """The sections of a recipe, and the rules between them; see `Recipe`."""

    plugins: Annotated[tuple[str, ...], Field(strict=False)] = ()
    data: AnyDataSection
    model: Annotated[SerializeAsAny[ModelSection], BeforeValidator(_model_section)]
    augment: AugmentSection = AugmentSection()
    optim: OptimSection
    schedule: ScheduleSection = ScheduleSection()
    train: TrainSection
    engine: EngineSection = EngineSection()
    faults: FaultsSection = FaultsSection()
    eval: EvalSection = EvalSection()
    log: LogSection = LogSection()

    @model_validator(mode="after")
    def sections_agree(self):
        """The rules that hold between sections; ValueError names the keys that contradict each other."""
        for check in RULES:
            check(self)
        return self

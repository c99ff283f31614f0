"""What may differ between the views of an image."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from typing_extensions import TypedDict

from widemix.api.sections import jitter_strengths
from widemix.api.timm_names import ADVICE
from widemix.arguments import build_section, numbers, refuse_unknown
from widemix.errors import InputError, shown
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection
from widemix.section import plain

MOST = 1000  # views of an image


class View(TypedDict, total=False):
    """Arguments of `Loader` that are others for one view of each image. What is left out is as in the loader."""

    image_size: int
    interpolation: Literal["bilinear", "bicubic", "random"]
    scale: Sequence[float]
    ratio: Sequence[float]
    hflip: float
    auto_augment: str | None
    color_jitter: float | Sequence[float] | None
    color_jitter_prob: float
    grayscale_prob: float
    gaussian_blur_prob: float
    solarize_prob: float
    re_prob: float
    re_mode: Literal["const", "rand", "pixel"]
    re_count: int


def expand_views(views: Any) -> list[View]:
    """What is other for each view, from the loader's argument. `InputError` where it is none."""
    views = plain(views)
    if type(views) is int and 1 <= views <= MOST:
        return [View()] * views
    if isinstance(views, Sequence) and 1 <= len(views) <= MOST and all(isinstance(view, Mapping) for view in views):
        return list(views)
    raise InputError(f"views {shown(views)}: must be their number, 1 to {MOST}, or a list with a View for each")


def view_sections(
    number: int, view: View, data: DataSection, augment: AugmentSection
) -> tuple[DataSection, AugmentSection]:
    """The sections of a view: those of the loader with what `view` changes. `InputError` where it is wrong."""
    where, known = f"views[{number}]: ", View.__annotations__
    values: dict[str, Any] = dict(view)
    refuse_unknown(values, list(known), ADVICE, where)
    values |= {name: numbers(values[name]) for name in ("scale", "ratio") if name in values}
    if "color_jitter" in values:
        values["color_jitter"] = jitter_strengths(values["color_jitter"])
    of_data = {name: values.pop(name) for name in ("image_size", "interpolation") if name in values}
    return (
        build_section(DataSection, where, **data.model_dump() | of_data),
        build_section(AugmentSection, where, **augment.model_dump() | values),
    )

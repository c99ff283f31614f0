"""What happens to a training picture."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.recipe.policy import parse_policy
from pipeline.section import Fraction, Jitter, Pair, Positive, Section, key


class AugmentSection(Section):
    """What happens to a training picture, in timm's words. Evaluation sees the centre crop alone."""

    crop: Literal["resized", "padded"] = key(
        "resized", "resized: any box, resized; padded: the picture with a black border, image_size cut out of it"
    )
    padding: Annotated[int, Field(ge=0)] = key(4, "padded crop: width of the border, pixels")
    scale: Pair = key((0.08, 1.0), "random-resized crop: least and greatest share of the picture's area")
    ratio: Pair = key((3 / 4, 4 / 3), "random-resized crop: least and greatest width over height")
    hflip: Fraction = key(0.5, "probability of a horizontal flip")
    auto_augment: str | None = key(None, "timm policy such as rand-m9-mstd0.5-inc1, original, 3a or augmix, or null")
    color_jitter: Jitter = key(
        (0.0, 0.0, 0.0, 0.0),
        "greatest change of brightness, contrast, saturation, hue (up to 0.5, half a turn)",
    )
    color_jitter_prob: Fraction = key(1.0, "probability of colour jitter for each picture")
    grayscale_prob: Fraction = key(0.0, "probability of losing all colour")
    gaussian_blur_prob: Fraction = key(0.0, "probability of a Gaussian blur of 0.1 to 2 pixels")
    aug_repeats: Annotated[int, Field(ge=0)] = key(
        0, "repeated augmentation: views of each sample in a batch; an epoch of as many steps sees fewer; 0 is off"
    )
    re_prob: Fraction = key(0.0, "random erasing: probability for each picture")
    re_mode: Literal["const", "rand", "pixel"] = key(
        "pixel", "random erasing: zero, one normal colour a box, or normal noise a pixel"
    )
    re_count: Positive = key(1, "random erasing: greatest number of boxes")
    mixup: Annotated[float, Field(ge=0)] = key(0.0, "alpha of mixup; 0 is off")
    cutmix: Annotated[float, Field(ge=0)] = key(0.0, "alpha of CutMix; 0 is off")
    cutmix_minmax: Pair | None = key(
        None, "CutMix by boxes of these shares of the side, least and greatest, instead of by alpha; null is off"
    )
    mix_mode: Literal["batch", "pair", "elem"] = key(
        "batch", "one draw for a whole mix_group, one for each pair in it, or one for each picture"
    )
    mixup_prob: Fraction = key(1.0, "probability that a group (pair, picture) is mixed at all")
    mixup_switch_prob: Fraction = key(0.5, "probability of CutMix where both are on")
    mix_group: Positive = key(
        32, "pictures mixed among themselves, by one draw in mode batch, whatever the world size"
    )
    smoothing: Annotated[float, Field(ge=0, lt=1)] = key(0.0, "label smoothing")

    @field_validator("auto_augment")
    @classmethod
    def policy_is_known(cls, text: str | None):
        if text is not None:
            parse_policy(text)
        return text

    @model_validator(mode="after")
    def ranges_are_ordered(self):
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale {list(self.scale)} must rise within (0, 1]")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"ratio {list(self.ratio)} must rise and be positive")
        if self.cutmix_minmax and not 0 <= self.cutmix_minmax[0] < self.cutmix_minmax[1] <= 1:
            raise ValueError(f"cutmix_minmax {list(self.cutmix_minmax)} must rise within [0, 1]")
        if min(self.color_jitter) < 0 or self.color_jitter[3] > 0.5:
            raise ValueError(f"color_jitter {list(self.color_jitter)} must not be negative, its hue not above 0.5")
        if self.mixing and self.mix_group % 2:
            raise ValueError(f"mix_group {self.mix_group} must be even: pictures are mixed in pairs")
        return self

    @property
    def cut_alpha(self) -> float:
        """Alpha that CutMix draws by: with boxes of their own it only decides how often nothing is cut."""
        return self.cutmix if self.cutmix_minmax is None else 1.0

    @property
    def mixing(self) -> bool:
        return self.mixup > 0 or self.cut_alpha > 0

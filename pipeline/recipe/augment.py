"""The augment section: augmentation of training images."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from widemix.errors import InputError
from widemix.recipe.policy import parse_policy
from widemix.section import Amount, Fraction, Jitter, Pair, Positive, Section, key


class AugmentSection(Section):
    """Augmentation of training images, with timm's names. Evaluation uses the centre crop alone."""

    crop: Literal["resized", "padded"] = key(
        "resized",
        "resized: random-resized crop; padded: random crop of image_size, with a black border around the image",
    )
    padding: Annotated[int, Field(ge=0, le=16_384)] = key(4, "padded crop: width of the border in pixels")
    scale: Pair = key((0.08, 1.0), "random-resized crop: minimum and maximum fraction of the image's area")
    ratio: Pair = key((3 / 4, 4 / 3), "random-resized crop: minimum and maximum aspect ratio (width over height)")
    hflip: Fraction = key(0.5, "probability of a horizontal flip")
    auto_augment: str | None = key(
        None,
        "timm policy such as rand-m9-mstd0.5-inc1, original (AutoAugment's for ImageNet), 3a or augmix; cifar10 "
        "(AutoAugment's for CIFAR-10); or null",
    )
    color_jitter: Jitter = key(
        (0.0, 0.0, 0.0, 0.0),
        "maximum change of brightness, contrast, saturation and hue (hue: up to 0.5, half the colour circle)",
    )
    color_jitter_prob: Fraction = key(1.0, "probability of colour jitter")
    grayscale_prob: Fraction = key(0.0, "probability of conversion to grayscale")
    gaussian_blur_prob: Fraction = key(0.0, "probability of a Gaussian blur with a sigma of 0.1 to 2 pixels")
    solarize_prob: Fraction = key(0.0, "probability of inverting all values from 128 on, after the blur")
    aug_repeats: Annotated[int, Field(ge=0, lt=2**31)] = key(
        0,
        "repeated augmentation: views of each sample in a batch, for fewer samples in an epoch; 0 is off",
    )
    re_prob: Fraction = key(0.0, "probability of random erasing")
    re_mode: Literal["const", "rand", "pixel"] = key(
        "pixel", "random erasing: fill with zeros (const), one random colour a box (rand), or random noise (pixel)"
    )
    re_count: Annotated[int, Field(gt=0, le=1000)] = key(1, "random erasing: maximum number of boxes")
    mixup: Amount = key(0.0, "mixup alpha; 0 is off")
    cutmix: Amount = key(0.0, "CutMix alpha; 0 is off")
    cutmix_minmax: Pair | None = key(
        None,
        "CutMix: side of the box as fractions of the image's, from the first to below the second in whole pixels, as "
        "timm's; in place of alpha; null is off",
    )
    mix_mode: Literal["batch", "pair", "elem"] = key(
        "batch",
        "mixup and CutMix sampled for each mix_group (batch), each pair of images in it, or each image (elem)",
    )
    mixup_prob: Fraction = key(1.0, "probability of mixup or CutMix for each group (pair, image)")
    mixup_switch_prob: Fraction = key(0.5, "probability of CutMix instead of mixup when both are on")
    mix_group: Positive = key(
        32, "images that are mixed with each other; a fixed number, so that the world size does not matter"
    )
    smoothing: Annotated[float, Field(ge=0, lt=1)] = key(0.0, "label smoothing")

    @field_validator("auto_augment")
    @classmethod
    def policy_is_known(cls, text: str | None):
        """A wrong policy is an error of the recipe."""
        if text is not None:
            parse_policy(text)
        return text

    @model_validator(mode="after")
    def ranges_are_ordered(self):
        """Ranges rise, and mixup has pairs."""
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale {list(self.scale)} must rise within (0, 1]")
        if not 1e-3 <= self.ratio[0] <= self.ratio[1] <= 1e3:
            raise ValueError(f"ratio {list(self.ratio)} must rise within [0.001, 1000]")
        if self.cutmix_minmax and not 0 <= self.cutmix_minmax[0] < self.cutmix_minmax[1] <= 1:
            raise ValueError(f"cutmix_minmax {list(self.cutmix_minmax)} must rise within [0, 1]")
        if min(self.color_jitter) < 0 or max(self.color_jitter) > 1000 or self.color_jitter[3] > 0.5:
            raise ValueError(
                f"color_jitter {list(self.color_jitter)} must be within [0, 1000], its hue not above 0.5"
            )
        if self.mixes_images and self.mix_group % 2:
            raise ValueError(f"mix_group {self.mix_group} must be even: images are mixed in pairs")
        return self

    @property
    def cut_alpha(self) -> float:
        """CutMix alpha to sample with: 1 with cutmix_minmax, which replaces alpha."""
        return self.cutmix if self.cutmix_minmax is None else 1.0

    @property
    def mixes_images(self) -> bool:
        """Whether mixup or CutMix is on."""
        return self.mixup > 0 or self.cut_alpha > 0

    def check_image_size(self, side: int) -> None:
        """`InputError` where no box of `cutmix_minmax` has whole pixels."""
        least, greatest = self.cutmix_minmax or (0.0, 1.0)
        if int(side * least) == int(side * greatest):
            raise InputError(
                f"augment.cutmix_minmax [{least:g}, {greatest:g}] is no whole pixel of data.image_size {side}"
            )

"""Recipe sections of ResMLP and gMLP: timm's networks with blocks of any number and size."""

from typing import Any, Literal, Self

from pydantic import model_validator
from typing_extensions import override

from widemix.models.section import Expansion, PatchedSection
from widemix.section import PositiveAmount, key


class ResMlpSection(PatchedSection):
    """ResMLP (Touvron et al. 2021): a linear layer over tokens and an MLP over channels, without normalisation."""

    kind: Literal["resmlp"] = key(..., "resmlp: a linear layer over tokens, an MLP over channels, no normalisation")
    expansion: Expansion = key(4.0, "resmlp: hidden width of the channel MLP over C")
    layer_scale: PositiveAmount = key(
        1e-4, "resmlp: first value of the learnt factors of each mixing; timm's, 1e-5 for 24 blocks"
    )

    @override
    def build(self, image_size: int, num_classes: int, **timm: Any) -> Any:
        from widemix.models.timm_mlp.network import resmlp

        return resmlp(self, img_size=image_size, num_classes=num_classes, **timm)


class GmlpSection(PatchedSection):
    """gMLP (Liu et al. 2021): an MLP over channels; half of its hidden features, mixed over tokens, gate the rest."""

    kind: Literal["gmlp"] = key(..., "gmlp: an MLP over channels with a spatial gating unit")
    expansion: Expansion = key(6.0, "gmlp: hidden width of the channel MLP over C; half of it gates the other half")

    @model_validator(mode="after")
    def has_halves(self) -> Self:
        """The hidden features, as timm counts them, have two halves."""
        hidden = int(self.expansion * self.channels)
        if hidden % 2 or not hidden:
            raise ValueError(
                f"expansion {self.expansion:g}: gives {hidden} hidden features of {self.channels} channels, "
                "which have no halves"
            )
        return self

    @override
    def build(self, image_size: int, num_classes: int, **timm: Any) -> Any:
        from widemix.models.timm_mlp.network import gmlp

        return gmlp(self, img_size=image_size, num_classes=num_classes, **timm)


SECTIONS = (ResMlpSection, GmlpSection)

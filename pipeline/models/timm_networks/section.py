"""Recipe sections of timm's networks: any by its name, and ResMLP and gMLP with blocks of any number and size."""

from collections.abc import Container
from typing import Any, Literal, Self

from pydantic import field_validator, model_validator
from typing_extensions import override

from widemix.models.section import Expansion, ModelSection, PatchedSection
from widemix.models.timm_networks.names import check_name
from widemix.section import DropPath, PositiveAmount, key


class ResMlpSection(PatchedSection):
    """ResMLP (Touvron et al. 2021): a linear layer over tokens and an MLP over channels, without normalisation."""

    network = "resmlp"
    kind: Literal["resmlp"] = key(..., "resmlp: a linear layer over tokens, an MLP over channels, no normalisation")
    expansion: Expansion = key(4.0, "resmlp: hidden width of the channel MLP over C")
    layer_scale: PositiveAmount = key(
        1e-4, "resmlp: first value of the learnt factors of each mixing; timm's, 1e-5 for 24 blocks"
    )


class GmlpSection(PatchedSection):
    """gMLP (Liu et al. 2021): an MLP over channels; half of its hidden features, mixed over tokens, gate the rest."""

    network = "gmlp"
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


Argument = bool | int | float | str
# Not for `arguments`: what other keys set, and what would download or read files that a recipe names.
_ELSEWHERE = {
    "name": "is model.name",
    "num_classes": "is data.num_classes",
    "img_size": "is data.image_size",
    "drop_path_rate": "is model.drop_path",
    "in_chans": "is 3",
    "features_only": "is not for networks that classify",
}
_OF_WEIGHTS = ("pretrained", "checkpoint_path", "cache_dir", "state_dict")


class TimmSection(ModelSection):
    """Any network of timm: ResNet, ViT, ResMLP, gMLP, ... Its cost is counted."""

    kind: Literal["timm"] = key(..., "timm: a network of timm, by its name there")
    name: str = key(..., "timm's name, such as vit_small_patch16_224, resmlp_12_224 or gmlp_s16_224")
    drop_path: DropPath = key(0.0, "stochastic depth, timm's drop_path_rate")
    arguments: dict[str, Argument | list[Argument]] = key(
        {}, "what timm's network takes besides, such as {patch_size: 4, embed_dim: 80} of a ViT"
    )

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        check_name(name)
        return name

    @field_validator("arguments")
    @classmethod
    def _are_of_the_network(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        for name in arguments:
            if name in _ELSEWHERE:
                raise ValueError(f"{name} {_ELSEWHERE[name]}")
            if name.startswith(_OF_WEIGHTS):
                raise ValueError(f"{name} is not for networks that train; weights come by train.init_from")
        return arguments

    @override
    def build(self, image_size: int, num_classes: int) -> Any:
        from widemix.models.timm_networks.by_name import create_timm_model

        own = {"img_size": image_size, "drop_path_rate": self.drop_path}
        return create_timm_model(self.name, num_classes, **self.arguments | own)

    @override
    def summary(self, image_size: int) -> str:
        arguments = ", ".join(f"{name} {value}" for name, value in self.arguments.items())
        return f"timm's {self.name}" + (f" ({arguments})" if arguments else "")

    @override
    def timm_spec(self, image_size: int, own_names: Container[str]) -> tuple[str, dict[str, Any]]:
        from widemix.models.timm_networks.by_name import without_untaken

        own = {"img_size": image_size, "drop_path_rate": self.drop_path}
        return self.name, without_untaken(self.name, self.arguments | own)

    @override
    @classmethod
    def timm_kinds(cls) -> tuple[str, ...]:
        return ()  # timm has these names

    @override
    def first_layer(self) -> str | None:
        from widemix.models.timm_networks.by_name import published

        return published(self.name, "first_conv")

    @override
    def classifier(self) -> str | None:
        from widemix.models.timm_networks.by_name import published

        return published(self.name, "classifier")


SECTIONS = (ResMlpSection, GmlpSection, TimmSection)

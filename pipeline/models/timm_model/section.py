"""Recipe section of timm's networks."""

from collections.abc import Container
from typing import Any, Literal

from typing_extensions import override

from widemix.models.section import ModelSection, ModelSpec
from widemix.section import DropPath, key


class TimmSection(ModelSection):
    """Any network of timm: ResNet, ViT, ResMLP, gMLP, ... Its cost is counted."""

    kind: Literal["timm"] = key(..., "timm: a network of timm, by its name there")
    name: str = key(..., "timm's name, such as vit_small_patch16_224, resmlp_12_224 or gmlp_s16_224")
    drop_path: DropPath = key(0.0, "stochastic depth, timm's drop_path_rate")

    @override
    def model_spec(self, image_size: int) -> ModelSpec:
        from widemix.models.timm_model.network import create_timm_model

        return create_timm_model, {"name": self.name, "img_size": image_size, "drop_path_rate": self.drop_path}

    @override
    def timm_spec(self, image_size: int, own_names: Container[str]) -> tuple[str, dict[str, Any]]:
        from widemix.models.timm_model.network import takes_image_size

        size = {"img_size": image_size} if takes_image_size(self.name) else {}
        return self.name, {**size, "drop_path_rate": self.drop_path}

    @override
    @classmethod
    def timm_kinds(cls) -> tuple[str, ...]:
        return ()  # timm has these names

    @override
    def first_layer(self) -> str | None:
        from timm.models import get_pretrained_cfg_value

        return get_pretrained_cfg_value(self.name, "first_conv")

    @override
    def classifier(self) -> str | None:
        from timm.models import get_pretrained_cfg_value

        return get_pretrained_cfg_value(self.name, "classifier")


SECTIONS = (TimmSection,)

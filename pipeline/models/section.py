"""The base of the model sections of a recipe: everything that the rest of the project asks of a model family.

Nothing here and in the families' section.py imports torch, so that a recipe loads without it: `FamilySection.build`
imports the network's module when it is called.
"""

from abc import abstractmethod
from collections.abc import Callable, Container, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import Field
from typing_extensions import override

from widemix.errors import InputError
from widemix.models.layer_costs import NetworkCost
from widemix.models.structured_factors import Structure
from widemix.section import Depth, DropPath, Positive, Section, key

if TYPE_CHECKING:
    from torch import nn

Expansion = Annotated[float, Field(gt=0, le=10_000)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class ModelSection(Section):
    """A model family's section of a recipe. Subclasses declare `kind` as a Literal, their keys, and `build`.

    Everything else has a default. The network takes float images [B, 3, H, W] or, where `takes` is "text", int64
    token ids [B, T], and gives logits [B, num_classes].
    """

    kind: str

    takes: ClassVar[Literal["images", "text"]] = "images"  # the data.kind that it is for
    # The family's name in timm's registry, whose entry has the sizes of its first published network where it is given
    # no others. None: timm gets an entry named like `kind`, which needs all keys that have no default.
    timm_architecture: ClassVar[str | None] = None
    has_feature_maps: ClassVar[bool] = False  # whether timm's features_only works: the blocks' outputs lie on a grid

    @abstractmethod
    def build(self, image_size: int, num_classes: int) -> "nn.Module":
        """Return the network for square images of `image_size` pixels, which is 0 for text.

        Those of this package also take arguments of timm's networks, such as `in_chans` and `drop_rate`.
        """

    def check_image_size(self, side: int) -> None:
        """Raise ValueError if the network cannot take square images of `side` pixels. Default: it can."""

    def check_text(self, path: Path, tokens: int, vocabulary: int) -> None:
        """Raise `InputError` if the network cannot read the text in `path`. Default: it can.

        `tokens` is the length of the longest sentence pair, `vocabulary` the number of token ids.
        """

    def input_shape(self, image_size: int) -> tuple[int, ...]:
        """Shape of one sample: (3, image_size, image_size), or (T,) of a text model, which has to define it."""
        if self.takes == "text":
            raise InputError(f"model.kind {self.kind}: does not say how many tokens it takes; define input_shape")
        return 3, image_size, image_size

    def layer_costs(self, image_size: int, num_classes: int) -> NetworkCost | None:
        """Return every layer's cost by formula. Default: None, for a network that is counted on the meta device."""
        return None

    def structured_matrices(self, image_size: int) -> list[tuple[str, Structure, int, int]]:
        """Return key, structure, inputs and outputs of each structured matrix of an inner block. Default: none."""
        return []

    def summary(self, image_size: int) -> str:
        """Return the network in the papers' letters, for the table of recipes. Default: its kind."""
        return self.kind

    def depth_to_width(self) -> float | None:
        """Return p / log2 d of Navon & Bronstein 2023, p the layers of equation 3: two in a Mixer block.

        A transformer has one in a block, its attention. Default: None, there is no such ratio.
        """
        return None

    def published_note(self, image_size: int) -> str | None:
        """Return what the paper prints of this network where that contradicts its own definitions, else None."""
        return None

    @classmethod
    def named(cls) -> dict[str, tuple[Self, int]]:
        """Published networks by name: section and side of the image in pixels. Default: none."""
        return {}

    def first_layer(self) -> str | None:
        """Name of the module that reads the input, which timm adapts to another number of colour channels."""
        return None

    def classifier(self) -> str | None:
        """Name of the last linear layer, which timm leaves out of an export if `num_classes` is another."""
        return "head"

    def timm_spec(self, image_size: int, own_names: Container[str]) -> tuple[str, dict[str, Any]]:
        """Return name and arguments with which `timm.create_model` makes this network; for exports.

        The name is the network's own where `named` has it and `own_names`, those that are not timm's networks, too;
        else one of its family.
        """
        keys = self.model_dump(mode="json") | {"img_size": image_size}
        if self.timm_architecture is None:
            return self.kind, {name: value for name, value in keys.items() if name != "kind"}
        training = {"drop_path", "drop_path_rises"}  # which makes no other network
        own = self.model_dump(exclude=training)
        for name, (section, side) in self.named().items():
            if name in own_names and side == image_size and section.model_dump(exclude=training) == own:
                return name, keys
        return self.timm_architecture, keys

    @classmethod
    def from_keys(cls, keys: Mapping[str, Any], defaults: Mapping[str, Any]) -> Self:
        """Return a section of these keys, and of the defaults for others."""
        return cls.model_validate({**defaults, **keys})

    def timm_twin(self, image_size: int, num_classes: int) -> "Callable[[], nn.Module] | None":
        """Return what makes timm's own network of this size, for comparisons. Default: None, timm has none."""
        return None

    @classmethod
    def timm_kinds(cls) -> tuple[str, ...]:
        """The kinds that timm's registry gets an entry for. Default: all if `timm_architecture` is None."""
        return cls.kinds() if cls.timm_architecture is None else ()

    @classmethod
    def default_text(cls) -> Self | None:
        """Return the network that timm makes of a text family's name without arguments. Default: none."""
        return None

    @classmethod
    def kinds(cls) -> tuple[str, ...]:
        """The values of `kind` that are this family's."""
        annotation = cls.model_fields["kind"].annotation
        return get_args(annotation) if get_origin(annotation) is Literal else ()


class FamilySection(ModelSection):
    """A section of a family of this package, whose network is in the module `network` beside the section's."""

    network: ClassVar[str]  # what makes it there, of the section and arguments of timm's networks

    @override
    def build(self, image_size: int, num_classes: int, **timm: Any) -> Any:
        module = import_module(f"{type(self).__module__.rpartition('.')[0]}.network")
        sizes = {"num_classes": num_classes} | ({"img_size": image_size} if self.takes == "images" else {})
        return getattr(module, self.network)(self, **sizes, **timm)


class DropPathSection(FamilySection):
    """The keys of networks with our stochastic depth."""

    drop_path: DropPath = key(0.0, "stochastic depth: probability that a mixing is skipped")
    drop_path_rises: bool = key(
        False, "drop_path rises linearly from 0 in the first block; false: is that of all blocks"
    )


class PatchedSection(DropPathSection):
    """The keys that baselines share: patches, and blocks of one size."""

    patch_size: Positive = key(..., "P: side of a patch, pixels; must divide data.image_size")
    channels: Positive = key(..., "C: channels of a token")
    depth: Depth = key(..., "L: blocks")

    @override
    def check_image_size(self, side: int) -> None:
        check_patches(side, self.patch_size)

    @override
    def first_layer(self) -> str:
        return "stem.proj"


def check_patches(side: int, patch: int) -> int:
    """Return how many patches of `patch` pixels make a side of `side`; ValueError unless they fit."""
    if side % patch:
        fitting = ", ".join(str(d) for d in range(2, side + 1) if side % d == 0)
        raise ValueError(f"model.patch_size {patch} does not divide data.image_size {side}; {fitting} would")
    return side // patch


def hidden_width(expansion: float, size: int) -> int:
    """Return gamma * size, rounded, at least 1."""
    return max(1, round(expansion * size))

"""ResMLP and gMLP of timm's blocks, whose own functions have one number and size of blocks each."""

from functools import partial

from timm.layers import GatedMlp
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock, SpatialGatingBlock

from widemix.models.drop_path import number_drop_paths


def resmlp(*, expansion: float = 4.0, layer_scale: float = 1e-4, **outer) -> MlpMixer:
    """ResMLP (Touvron et al. 2021): float images [B, 3, H, W] -> logits [B, num_classes]."""
    block = partial(ResBlock, init_values=layer_scale)
    return _network(mlp_ratio=expansion, block_layer=block, norm_layer=Affine, **outer)


def gmlp(*, expansion: float = 6.0, **outer) -> MlpMixer:
    """gMLP (Liu et al. 2021): float images [B, 3, H, W] -> logits [B, num_classes]."""
    return _network(mlp_ratio=expansion, block_layer=SpatialGatingBlock, mlp_layer=GatedMlp, **outer)


def _network(*, channels: int, depth: int, **outer) -> MlpMixer:
    network = MlpMixer(embed_dim=channels, num_blocks=depth, **outer)
    number_drop_paths(network)  # so that theirs can differ from block to block
    return network

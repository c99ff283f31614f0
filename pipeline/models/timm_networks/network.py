"""ResMLP and gMLP of timm's blocks."""

import functools

from timm.layers import GatedMlp
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock, SpatialGatingBlock

from widemix.models.drop_path import number_drop_paths
from widemix.models.timm_networks.section import GmlpSection, ResMlpSection


def resmlp(section: ResMlpSection, **outer) -> MlpMixer:
    """ResMLP (Touvron et al. 2021): float images [B, 3, H, W] -> logits [B, num_classes]."""
    block = functools.partial(ResBlock, init_values=section.layer_scale)
    return _network(section, block_layer=block, norm_layer=Affine, **outer)


def gmlp(section: GmlpSection, **outer) -> MlpMixer:
    """gMLP (Liu et al. 2021): float images [B, 3, H, W] -> logits [B, num_classes]."""
    return _network(section, block_layer=SpatialGatingBlock, mlp_layer=GatedMlp, **outer)


def _network(section: ResMlpSection | GmlpSection, **outer) -> MlpMixer:
    network = MlpMixer(
        patch_size=section.patch_size,
        embed_dim=section.channels,
        num_blocks=section.depth,
        mlp_ratio=section.expansion,
        drop_path_rate=section.drop_path,
        **outer,
    )
    number_drop_paths(network)  # so that theirs can differ from block to block
    return network

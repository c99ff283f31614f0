"""ResMLP and gMLP of timm's blocks, whose own functions have one number and size of blocks each."""

from functools import partial

from timm.layers import GatedMlp
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock, SpatialGatingBlock

from widemix.models.drop_path import number_drop_paths
from widemix.models.timm_mlp.section import GmlpSection, ResMlpSection


def resmlp(section: ResMlpSection, **timm) -> MlpMixer:
    """ResMLP (Touvron et al. 2021): float images [B, 3, H, W] -> logits [B, num_classes]."""
    block = partial(ResBlock, init_values=section.layer_scale)
    return _network(section, block_layer=block, norm_layer=Affine, **timm)


def gmlp(section: GmlpSection, **timm) -> MlpMixer:
    """gMLP (Liu et al. 2021): float images [B, 3, H, W] -> logits [B, num_classes]."""
    return _network(section, block_layer=SpatialGatingBlock, mlp_layer=GatedMlp, **timm)


def _network(section: ResMlpSection | GmlpSection, **timm) -> MlpMixer:
    network = MlpMixer(
        patch_size=section.patch_size,
        embed_dim=section.channels,
        num_blocks=section.depth,
        mlp_ratio=section.expansion,
        drop_path_rate=section.drop_path,
        **timm,
    )
    number_drop_paths(network)  # so that theirs can differ from block to block
    return network

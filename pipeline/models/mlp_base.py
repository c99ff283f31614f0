"""Bases of the networks that have no tokens at the end: timm's interface, and images flattened to vectors."""

import torch
from timm.models import checkpoint_seq
from torch import Tensor, nn

from widemix.models.layers import init_weights


class Classifier(nn.Module):
    """A linear head on `forward_features`, [B, width] -> logits [B, num_classes]; with timm's interface."""

    def set_head(self, width: int, num_classes: int) -> None:
        """Put the first head on; 0 classes is no head."""
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = width
        self.head = nn.Linear(width, num_classes) if num_classes > 0 else nn.Identity()

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head; 0 classes is no head. timm passes `global_pool`, which vectors have no use for."""
        weight = next(self.parameters())
        self.set_head(self.num_features, num_classes)
        self.head = self.head.to(weight.device, weight.dtype).train(self.training)

    def forward_features(self, x: Tensor) -> Tensor:
        """The network's input -> features [B, width]."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """[B, width] -> logits [B, num_classes], or the features with `pre_logits`."""
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """The network's input -> logits [B, num_classes]."""
        return self.forward_head(self.forward_features(x))


class MlpClassifier(Classifier):
    """Images [B, in_chans, H, W] -> pixels [B, d] -> stem, blocks, norm [B, width] -> logits [B, num_classes]."""

    def __init__(
        self,
        stem: nn.Module,
        blocks: nn.Sequential,
        norm: nn.Module,
        *,
        width: int,
        img_size: int,
        in_chans: int,
        num_classes: int,
    ):
        super().__init__()
        self.img_size, self.in_chans = img_size, in_chans
        self.grad_checkpointing = False
        self.stem = stem
        self.blocks = blocks
        self.norm = norm
        self.set_head(width, num_classes)
        init_weights(self, self.head)

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks in the backward pass instead of saving their activations."""
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict:
        """timm's grouping of parameters by layer."""
        return {"stem": r"^stem", "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]}

    def embed(self, x: Tensor) -> Tensor:
        """Images [B, in_chans, H, W] -> the blocks' input, by the stem."""
        return self.stem(x.flatten(1))

    def forward_features(self, x: Tensor) -> Tensor:
        """[B, in_chans, H, W] -> [B, width]."""
        x = self.embed(x)
        if self.grad_checkpointing and not torch.jit.is_scripting():
            x = checkpoint_seq(self.blocks, x)
        else:
            x = self.blocks(x)
        return self.norm(x)

"""The residual MLP of "Scaling MLPs" (Bachmann et al. 2023), and its published weights.

Pixels -> m features; blocks x + W2 GELU(W1 LN(x)) of gamma m hidden features; a linear head, no norm before it.

Shapes: B batch, m features.
"""

import re
from collections.abc import Mapping

from torch import Tensor, nn

from widemix.models.bottleneck_mlp.section import BottleneckMlpSection
from widemix.models.layers import LayerNorm
from widemix.models.mlp_base import MlpClassifier
from widemix.models.section import hidden_width

# Names in the published files -> ours.
_PUBLISHED = (
    (r"linear_in\.", "stem."),
    (r"blocks\.(\d+)\.block\.0\.", r"blocks.\1.fc1."),
    (r"blocks\.(\d+)\.block\.2\.", r"blocks.\1.fc2."),
    (r"layernorms\.(\d+)\.", r"blocks.\1.norm."),
    (r"linear_out\.", "head."),
)


class BottleneckBlock(nn.Module):
    """x + W2 GELU(W1 LN(x)): [B, m] -> [B, m]."""

    def __init__(self, width: int, hidden: int, eps: float):
        super().__init__()
        self.norm = LayerNorm(width, eps=eps)
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, m] -> [B, m]."""
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


class BottleneckMlp(MlpClassifier):
    """Images [B, in_chans, H, W] -> logits [B, num_classes], by `depth` blocks of `width` features."""

    def __init__(self, section: BottleneckMlpSection, *, img_size: int, num_classes: int, in_chans: int = 3):
        width, hidden = section.width, hidden_width(section.expansion, section.width)
        super().__init__(
            nn.Linear(in_chans * img_size**2, width),
            nn.Sequential(*[BottleneckBlock(width, hidden, section.norm_eps) for _ in range(section.depth)]),
            nn.Identity(),
            width=width,
            img_size=img_size,
            in_chans=in_chans,
            num_classes=num_classes,
        )

    @staticmethod
    def from_published(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Weights under the names of the published files, under ours; others as they are."""
        if "linear_in.weight" not in weights:
            return weights
        renamed = {}
        for name, tensor in weights.items():
            for theirs, ours in _PUBLISHED:
                name = re.sub(f"^{theirs}", ours, name)
            renamed[name] = tensor
        return renamed

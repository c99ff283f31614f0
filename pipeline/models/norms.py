"""LayerNorm as all families use it."""

from functools import partial

from torch import nn

# timm's eps and the original code's; Hayase & Karakida write 1e-5 (`norm_eps` of the Mixers).
LayerNorm = partial(nn.LayerNorm, eps=1e-6)

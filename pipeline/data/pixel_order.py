"""Images with their pixels shuffled in one fixed way (Tolstikhin et al. 2021, section 3.4 and figure 4).

It is the last step before the network, after augmentation and mixup, so that nothing else is different.
"""

import numpy as np
import torch

from widemix.recipe.data import AnyDataSection, DataSection


def pixel_permutation(section: AnyDataSection, device: torch.device) -> torch.Tensor | None:
    """Return which pixel stands at each place of an image, row by row: int64 [H W]; None for the original order.

    With pixel_order `patches` the patches are permuted, and the pixels within every patch by one other permutation.
    """
    if not isinstance(section, DataSection) or section.pixel_order == "original":
        return None
    side, patch = section.image_size, section.pixel_patch
    numbers = np.random.RandomState(section.pixel_seed)  # its stream is the same in every version of NumPy
    if section.pixel_order == "all":
        order = numbers.permutation(side * side)
    else:
        across = side // patch
        places = np.arange(side * side).reshape(across, patch, across, patch).swapaxes(1, 2)
        patches = places.reshape(across**2, patch**2)
        shuffled = patches[numbers.permutation(across**2)][:, numbers.permutation(patch**2)]
        order = shuffled.reshape(across, across, patch, patch).swapaxes(1, 2).reshape(-1)
    return torch.from_numpy(order).to(device)


def permute_pixels(images: torch.Tensor, permutation: torch.Tensor | None) -> torch.Tensor:
    """Return images [B, C, H, W], channels last, with their pixels in the order of `permutation`, int64 [H W].

    With None the images themselves.
    """
    if permutation is None:
        return images
    b, c, h, w = images.shape
    pixels = images.permute(0, 2, 3, 1).reshape(b, h * w, c)
    return pixels.index_select(1, permutation).view(b, h, w, c).permute(0, 3, 1, 2)

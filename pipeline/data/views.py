"""Several views of each image, each with its own size, crop and augmentation, from one decoding.

DINO's global and local crops (Caron et al. 2021) and MoCo's pairs (He et al. 2020), for instance.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from widemix.data.images import AugmentedImages
from widemix.data.mixup import Mixture
from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection

View = tuple[DataSection, AugmentSection]


class Views:
    """A split to train on, V views of each sample. View k of a sample has the view id sample + count x k.

    It is the image of that view id that `AugmentedImages` gives with the view's sections. A batch is one flat
    tensor, which `unpack` divides.
    """

    def __init__(self, views: Sequence[View], seed: int, topology: Topology):
        first = AugmentedImages(*views[0], seed, topology)
        same = [views.index(view) for view in views]  # policies are compiled once for equal views
        opened = {k: first if k == 0 else first.of_same_file(*views[k]) for k in set(same)}
        self.views = [opened[k] for k in same]
        self.file = first.file
        self.sides = [data.image_size for data, _ in views]

    @property
    def descriptor(self) -> int:
        """The one of all views."""
        return self.views[0].descriptor

    def read(self, view_ids: np.ndarray, step_view_ids: np.ndarray, epoch: int) -> tuple[torch.Tensor, np.ndarray]:
        """All views of these samples on the host: uint8 [B x V x H x W x 3], with an H for each view; and the ids."""
        first = self.views[0]
        flat = first.empty(self.host_bytes(len(view_ids)))
        images = [part.numpy() for part in self._divide(flat, len(view_ids))]
        ids = self._ids(view_ids)
        boxes = np.stack([view.boxes(each, epoch) for view, each in zip(self.views, ids, strict=True)], axis=1)
        cubic = np.stack([view.cubic(each, epoch) for view, each in zip(self.views, ids, strict=True)], axis=1)
        damaged = first.decoder.try_read_views(view_ids, boxes, cubic, images, first.threads)
        for b, reason in damaged.items():
            raise InputError(first.decoder.describe_damage(int(view_ids[b]), reason))
        for view, each, part in zip(self.views, ids, images, strict=True):
            view.augmentation(part, each, view.seed, epoch, view.threads)
        return flat, view_ids

    def labels(self, view_ids: np.ndarray) -> torch.Tensor:
        """As `Images.labels`: the views of a sample have its label."""
        return self.views[0].labels(view_ids)

    def finish(
        self,
        host: torch.Tensor,
        view_ids: np.ndarray,
        epoch: int,
        dtype: torch.dtype = torch.float32,
        mixture: Mixture | None = None,
    ) -> torch.Tensor:
        """What `read` returned, normalised, erased and rounded, on the device, as flat; views are not mixed."""
        flat = torch.empty(host.shape, dtype=torch.float32, device=self.views[0].device)
        parts = (self._divide(tensor, len(view_ids)) for tensor in (host, flat))
        for view, ids, pixels, images in zip(self.views, self._ids(view_ids), *parts, strict=True):
            view.finish(pixels, ids, epoch, to=images)
        return flat.to(dtype)

    def unpack(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The views of a flat batch, by size, in the order of the first view of each: [B, n, 3, H, W] each.

        A batch of one view, `[:, k]`, is channels last in memory.
        """
        groups = self._by_size(flat, len(flat) // self.host_bytes(1))
        return [group.permute(1, 0, 4, 2, 3) for group in groups.values()]

    def host_bytes(self, count: int) -> int:
        """Host memory of the decoded views of `count` samples, which is also how many values they have."""
        return count * sum(3 * side**2 for side in self.sides)

    def _ids(self, view_ids: np.ndarray) -> list[np.ndarray]:
        return [view_ids + len(self.file) * k for k in range(len(self.views))]

    def _by_size(self, flat: torch.Tensor, count: int) -> dict[int, torch.Tensor]:
        """A flat batch of `count` samples as one [n, B, H, H, 3] for each H."""
        sizes = Counter(self.sides)
        parts = flat.split([3 * n * count * side**2 for side, n in sizes.items()])
        pairs = zip(sizes.items(), parts, strict=True)
        return {side: part.view(n, count, side, side, 3) for (side, n), part in pairs}

    def _divide(self, flat: torch.Tensor, count: int) -> list[torch.Tensor]:
        """A flat batch as one [B, H, H, 3] for each view."""
        groups = {side: iter(group) for side, group in self._by_size(flat, count).items()}
        return [next(groups[side]) for side in self.sides]

"""widemix's pixels, augmentation and order in FFCV's `Loader`, for betons and training scripts that are FFCV's.

    loader = ffcv.Loader(path, batch_size, order=widemix.ffcv.Order(seed=0), pipelines={
        "image": [RandomResizedCrop(224), RandAugment("rand-m9-mstd0.5-inc1"), Normalize(device=device),
                  RandomErasing(0.25)],
        "label": [IntDecoder(), ToTensor(), Squeeze(), ToDevice(device)],
    })

Batches equal those of `widemix.Loader`, bit for bit, for the same seed, epoch and rank. FFCV's own operations may
stand between these. A file of `widemix prep` has a third field, which `"segments": None` leaves out. What FFCV makes
impossible: an error within a batch cannot reach the training loop, which would wait for ever, so a damaged image
is black, with a warning; batches are overwritten after some more, so copy those that you keep; and there is no mixup
or CutMix, because an operation does not know the step.

FFCV must be installed: `pip install 'widemix[ffcv]'`.
"""

try:
    import ffcv  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"widemix.ffcv: FFCV cannot be imported ({error}); install it: as root `apt-get install g++ pkg-config "
        "libopencv-dev libturbojpeg0-dev python3-dev`, then `pip install 'widemix[ffcv]'`"
    ) from None

from widemix.ffcv.operations import CenterCrop, ColorJitter, Normalize, RandAugment, RandomErasing, RandomResizedCrop
from widemix.ffcv.order import Order, resume

__all__ = [
    "CenterCrop",
    "ColorJitter",
    "Normalize",
    "Order",
    "RandAugment",
    "RandomErasing",
    "RandomResizedCrop",
    "resume",
]

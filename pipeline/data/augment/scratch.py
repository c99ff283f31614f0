"""Work space of the operations, allocated once for many images."""

from typing import NamedTuple

import numpy as np

from widemix.data.augment.smooth import REACH
from widemix.data.compiled import jit


class Scratch(NamedTuple):
    """Work space for images [H, W, 3]. No operation relies on what another has left there."""

    counts: np.ndarray  # int32 [3, 256]: a histogram a channel
    tables: np.ndarray  # uint8 [3, 256]: one table a channel
    seen: np.ndarray  # int32 [256]
    table: np.ndarray  # uint8 [256]
    rows: np.ndarray  # uint8 [2, 3 W]
    columns: np.ndarray  # uint16 [9 W + 224]: sums of three values
    sums: np.ndarray  # uint32 [3 W]
    weighted: np.ndarray  # float32 [3 W]
    wide: np.ndarray  # float32 [3 (W + 22)]: a row with mirrored ends
    taps: np.ndarray  # float32 [23]
    copy: np.ndarray  # uint8 [H, 3 W]: for filters that work over rows
    original: np.ndarray  # uint8 [H, W, 3]: the image before AugMix
    mixed: np.ndarray  # float32 [H, W, 3]: the sum of AugMix's chains, rows of the blur


@jit
def scratch_for(height, width):
    """Work space for images of this size; arrays that are not used take no memory."""
    return Scratch(
        np.empty((3, 256), np.int32),
        np.empty((3, 256), np.uint8),
        np.empty(256, np.int32),
        np.empty(256, np.uint8),
        np.empty((2, 3 * width), np.uint8),
        np.empty(9 * width + 224, np.uint16),
        np.empty(3 * width, np.uint32),
        np.empty(3 * width, np.float32),
        np.empty(3 * (width + 2 * REACH), np.float32),
        np.empty(2 * REACH + 1, np.float32),
        np.empty((height, 3 * width), np.uint8),
        np.empty((height, width, 3), np.uint8),
        np.empty((height, width, 3), np.float32),
    )

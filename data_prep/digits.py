"""scikit-learn's 1,797 handwritten digits, 8 x 8 pixels (UCI optical recognition; no download)."""

import numpy as np
from sklearn.datasets import load_digits

from widemix.data_prep.samples import Dataset, PixelArrays


def read(origin: None) -> Dataset:
    """1,437 training and 360 test images: every fifth image of each digit, in scikit-learn's order, is for the test.

    `origin` is not used.
    """
    scans = load_digits()
    grey = np.rint(scans.images * (255 / 16)).astype(np.uint8)
    pixels = np.repeat(grey[..., None], 3, axis=3)
    test = np.zeros(len(grey), bool)
    test[np.argsort(scans.target, kind="stable")[::5]] = True
    splits = {
        name: PixelArrays(name, pixels[chosen], scans.target[chosen])
        for name, chosen in (("train", ~test), ("test", test))
    }
    return Dataset(tuple("0123456789"), splits)

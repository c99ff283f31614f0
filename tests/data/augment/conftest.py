"""Images that operations are held against Pillow on: of several sizes, smooth, noisy, flat and extreme."""

import numpy as np
import pytest
from PIL import Image

SIZES = [(8, 8), (32, 32), (224, 224), (97, 131), (131, 97)]  # height, width


def images_of(height: int, width: int) -> list[np.ndarray]:
    """uint8 [height, width, 3] each."""
    numbers = np.random.RandomState(height * 1000 + width)
    coarse = numbers.randint(0, 256, (6, 6, 3)).astype(np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    photo = (smooth + numbers.randint(-8, 9, smooth.shape)).clip(0, 255)
    rows, columns = np.mgrid[0:height, 0:width]
    found = [
        photo,
        photo // 3 + 70,  # of little contrast
        numbers.randint(0, 256, photo.shape),
        np.full_like(photo, 77),
        np.zeros_like(photo),
        numbers.randint(0, 2, photo.shape) * 255,
        np.stack([columns % 256, rows % 256, np.full_like(rows, 40)], axis=-1),
    ]
    return [image.astype(np.uint8) for image in found]


@pytest.fixture(params=SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def images(request) -> list[np.ndarray]:
    return images_of(*request.param)

"""Compiles what prepares batches into numba's cache, so that no run waits for it; set-up does it.

`python -m widemix.api.compile_ahead`. What a process needs that is not there yet, it compiles itself.
"""

import io
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

from widemix.api.loader import Loader
from widemix.api.prep import prepare
from widemix.terminal import print

# What recipes use: each compiles functions of its own.
USES: tuple[dict[str, Any], ...] = (
    {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 1.0, "mixup": 0.2, "cutmix": 1.0, "mix_group": 2},
    {"color_jitter": (0.2, 0.2, 0.2, 0.1), "smoothing": 0.1},
    {"is_training": False},
)


def compile_ahead() -> None:
    """Load a batch of two small images, as pixels and as JPEGs, with each of the uses."""
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((48, 40, 3), np.uint8)).save(buffer, "JPEG")
    with TemporaryDirectory() as folder:
        prepare([(buffer.getvalue(), 0), (buffer.getvalue(), 1)], Path(folder, "jpeg"), processes=1)
        prepare("digits", Path(folder, "pixels"), processes=1)
        for name in ("jpeg", "pixels"):
            for use in USES:
                loader = Loader(Path(folder, name), "train", 2, 32, device="cpu", num_workers=1, **use)
                next(iter(loader))


if __name__ == "__main__":
    compile_ahead()
    print("compiled")

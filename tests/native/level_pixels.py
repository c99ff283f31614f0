"""What the C library alone computes with the code that WIDEMIX_NATIVE names, as one line of JSON.

NUMBA_DISABLE_JIT=1 python -P tests/native/level_pixels.py FOLDER: as `level_results.py`, without what numba compiles,
which takes hours where a processor is emulated: the SHA-256 of prepared files and of decoded and resized boxes,
checksums, and numbers of a Mixer's block.
"""

import hashlib
import json
import runpy
import sys
import warnings
from pathlib import Path

import numpy as np

import widemix
from widemix.data.decode import Decoder
from widemix.formats.beton import open_beton
from widemix.formats.checksums import crc32c_bands
from widemix.native.library import description


def boxes_of(height: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Boxes of all sizes, some flipped: int64 [images, 5]."""
    rng = np.random.default_rng(1)
    h, w = rng.integers(1, height + 1), rng.integers(1, width + 1)
    return np.stack(
        [rng.integers(0, height - h + 1), rng.integers(0, width - w + 1), h, w, rng.integers(0, 2, len(h))], 1
    )


def main() -> None:
    """Print the results."""
    folder, results = Path(sys.argv[1]), {}
    helpers = runpy.run_path(str(Path(__file__).with_name("level_results.py")))
    for name, settings in {
        "jpeg": {"max_size": 256},
        "coefficients": {"max_size": 256, "encoding": "coefficients"},
    }.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            widemix.prepare(list(helpers["images"]()), folder / name, processes=1, **settings)
        path = folder / name / "train.beton"
        results[f"{name}, prepared"] = hashlib.sha256(path.read_bytes()).hexdigest()
        beton = open_beton(path)
        digest, samples = hashlib.sha256(), np.arange(len(beton))
        for side in (7, 32, 224):
            images = np.zeros((len(beton), side, side, 3), np.uint8)
            for bicubic in (False, True):
                boxes = boxes_of(beton.height[samples].astype(np.int64), beton.width[samples].astype(np.int64))
                Decoder(beton).read(samples, boxes, np.full(len(beton), bicubic), images, 1)
                digest.update(images.tobytes())
        results[f"{name}, decoded"] = digest.hexdigest()
    data = np.random.default_rng(2).integers(0, 256, 100_003, np.uint8)
    results["crc32c"] = crc32c_bands(data, 4096).tolist()
    print(json.dumps({"exact": results, "block": helpers["block"](), "code": description()}))


if __name__ == "__main__":
    main()

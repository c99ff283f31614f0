"""What the package computes with the compiled code that WIDEMIX_NATIVE names, as one line of JSON.

python -P tests/native/level_results.py FOLDER: the SHA-256 of prepared files and of a loader's batches; numbers of a
Mixer's block, which a processor without FMA rounds more often; and which code it was.
"""

import hashlib
import io
import json
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import widemix


def images(count: int = 12):
    """JPEGs of several kinds, one of them large and one progressive, with their labels."""
    rng = np.random.default_rng(0)
    for index in range(count):
        coarse = rng.integers(0, 256, (7 + index, 9, 3), np.uint8)
        size = (900, 700) if index == 3 else (120 + 11 * index, 97 + 5 * index)
        image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
        file = io.BytesIO()
        subsampling = (0, 1, 2)[index % 3]
        image.convert("L" if index == 5 else "RGB").save(
            file, "JPEG", quality=70 + index, subsampling=subsampling, progressive=index == 4
        )
        yield file.getvalue(), index % 3


def loaded(folder: Path, **settings) -> str:
    """The SHA-256 of two epochs of batches."""
    loader = widemix.Loader(folder, "train", 6, 64, device="cpu", num_workers=1, **settings)
    digest = hashlib.sha256()
    for _ in range(2):
        for batch, targets in loader:
            digest.update(batch.numpy().tobytes() + targets.numpy().tobytes())
    return digest.hexdigest()


def block() -> list[float]:
    """Numbers of a step of a Mixer with random permutations."""
    from widemix.models.mixer.blocks import MixerBlock
    from widemix.models.mixer.section import MixerSection

    torch.manual_seed(0)
    sizes = {"patch_size": 1, "channels": 31, "depth": 1, "project_tokens": 10}
    section = MixerSection(kind="s_mixer", permutation="random", permuted_skips=True, **sizes)
    module = MixerBlock(section, 0, 10)
    x = torch.randn(37, 10, 31, requires_grad=True)
    from widemix.models.batch_last import by_c

    y = by_c.forward(module, x) if by_c.takes(module, x) else module(x)
    y.square().mean().backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
    return torch.cat([y.flatten()[::97], x.grad.flatten()[::97], gradients[::41]]).tolist()


def main() -> None:
    """Print the results."""
    folder, results = Path(sys.argv[1]), {}
    kinds = {
        "jpeg": {"max_size": 256},
        "coefficients": {"max_size": 256, "encoding": "coefficients"},
        "pixels": {"raw": True, "max_size": 64},
    }
    for name, settings in kinds.items():
        place = folder / f"{name}-{os.environ['WIDEMIX_NATIVE']}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            widemix.prepare(list(images()), place, processes=1, **settings)
        for file in sorted(place.iterdir()):
            if file.name != "manifest.json":  # which has the folder's name
                results[f"{name}/{file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
        results[f"{name}, augmented"] = loaded(
            place, auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.5, color_jitter=0.3
        )
        results[f"{name}, evaluated"] = loaded(place, is_training=False)
    from widemix.native.library import description

    print(json.dumps({"exact": results, "block": block(), "code": description()}))


if __name__ == "__main__":
    main()

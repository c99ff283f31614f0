"""The loaders of `widemix bench loader`, each timed in a process of its own: crop to 224, resize, flip, of JPEGs.

`python -m widemix.bench.loading NAME FOLDER THREADS` prints {"images", "seconds", "cpu_seconds"} of an epoch, after
one that is not counted. FOLDER has the files under `images/train`, and what is prepared of them beside it.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from widemix.bench.timing import Contestant, Epochs, data_of, training_loader
from widemix.data.decode import Decoder, cubic, random_boxes
from widemix.formats.beton import open_beton
from widemix.formats.checksums import open_checksums
from widemix.processes import children_cpu_seconds
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import IMAGENET_MEAN, IMAGENET_STD
from widemix.terminal import print

SIDE, BATCH = 224, 50
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
WHOLE = {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.25}  # of ImageNet's recipe


@dataclass(frozen=True)
class Method:
    """A way to load an epoch from a folder, with so many threads or processes of a DataLoader."""

    build: Callable[[Path, int], Contestant]
    package: str | None = None  # which it needs, of those that need not be installed
    decodes: str | None = None  # what is prepared, if it is our decoder alone


def _count(batches: Iterable[Any]) -> int:
    """Return the number of images in batches, each a sequence or tensor of them."""
    return sum(len(batch) for batch in batches)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("images/train/*/*"))


def decoder(
    folder: Path, threads: int, checked: bool = True, then: Callable[[np.ndarray], object] = lambda images: None
) -> Contestant:
    """Images as they are, uint8, by our decoder alone; without reading checksums if not `checked`.

    then: what is done with each batch, [N, 224, 224, 3].
    """
    beton = open_beton(folder / "train.beton")
    decoder = Decoder(beton, open_checksums(beton) if checked else None)
    images = np.empty((BATCH, SIDE, SIDE, 3), np.uint8)

    def process(number: int) -> int:
        order = np.random.RandomState(number).permutation(len(beton))
        for start in range(0, len(order), BATCH):
            samples = order[start : start + BATCH]
            boxes = random_boxes(samples, beton.height, beton.width, 0, number, SCALE, RATIO, 0.5)
            decoder.read(samples, boxes, cubic(samples, "bilinear", 0, number), images[: len(samples)], threads)
            then(images[: len(samples)])
        return len(order)

    return process


def _loader(folder: Path, threads: int, **augment: Any) -> Epochs:
    return Epochs([training_loader(data_of(folder, SIDE, threads), AugmentSection(**augment), BATCH)])


def _ffcv(folder: Path, threads: int) -> Contestant:
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor

    pipelines = {
        "image": [RandomResizedCropRGBImageDecoder((SIDE, SIDE), SCALE, RATIO), RandomHorizontalFlip(), ToTensor()],
        "label": [IntDecoder(), ToTensor()],
    }
    options: dict[str, Any] = {"os_cache": True, "order": OrderOption.RANDOM, "drop_last": False}
    loader = Loader(str(folder / "train.beton"), BATCH, num_workers=threads, pipelines=pipelines, **options)
    return lambda number: _count(images for images, _ in loader)


def _processes(threads: int) -> int:
    """Of a DataLoader: one thread is the main process itself."""
    return 0 if threads == 1 else threads


def _timm(folder: Path, threads: int) -> Contestant:
    from timm.data import create_dataset, create_loader

    loader = create_loader(
        create_dataset("", str(folder / "images" / "train"), is_training=True),
        SIDE,
        BATCH,
        is_training=True,
        color_jitter=0.0,
        interpolation="bilinear",
        num_workers=_processes(threads),
        persistent_workers=False,
        use_prefetcher=False,
        device=torch.device("cpu"),
    )
    return lambda number: _count(images for images, _ in loader)


def _torchcodec(folder: Path, threads: int) -> Contestant:
    from torchcodec.decoders import decode_jpeg

    return _transformed(folder, threads, decode_jpeg)


def _simplejpeg(folder: Path, threads: int) -> Contestant:
    from simplejpeg import decode_jpeg

    def decode(file: Path) -> torch.Tensor:
        return torch.from_numpy(decode_jpeg(file.read_bytes())).permute(2, 0, 1)

    return _transformed(folder, threads, decode)


def _transformed(folder: Path, threads: int, decode: Callable[[Path], torch.Tensor]) -> Contestant:
    """torchvision's transforms of images that `decode` reads, uint8 [3, H, W]."""
    from torchvision.transforms import v2

    files = _files(folder)
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(SIDE, SCALE, RATIO, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )

    class Images(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(files)

        def __getitem__(self, index: int) -> torch.Tensor:
            return transform(decode(files[index]))

    loader = torch.utils.data.DataLoader(Images(), BATCH, shuffle=True, num_workers=_processes(threads))
    return lambda number: _count(loader)


def _spdl(folder: Path, threads: int) -> Contestant:
    """FFmpeg decodes whole files, and its filters crop, resize and flip."""
    import spdl.io

    files = _files(folder)
    shapes = []
    for file in files:
        with Image.open(file) as image:
            shapes.append(image.size)
    widths, heights = (np.array(sides, np.int64) for sides in zip(*shapes, strict=True))

    def read(sample: int, box: list[int]) -> np.ndarray:
        top, left, height, width, flip = box
        crop = f"crop=w={width}:h={height}:x={left}:y={top}:exact=1,scale={SIDE}:{SIDE}:flags=bilinear"
        description = f"{crop},{'hflip,' if flip else ''}format=pix_fmts=rgb24"
        frames = spdl.io.decode_packets(spdl.io.demux_image(str(files[sample])), filter_desc=description)
        return spdl.io.to_numpy(spdl.io.convert_frames(frames))

    def process(number: int) -> int:
        order = np.random.RandomState(number).permutation(len(files))
        count = 0
        with ThreadPoolExecutor(threads) as pool:
            for start in range(0, len(order), BATCH):
                samples = order[start : start + BATCH]
                boxes = random_boxes(samples, heights, widths, 0, number, SCALE, RATIO, 0.5).tolist()
                count += len(np.stack(list(pool.map(read, samples.tolist(), boxes))))
        return count

    return process


def _dali(folder: Path, threads: int) -> Contestant:
    from nvidia.dali import fn, pipeline_def, types

    files = [str(file) for file in _files(folder)]

    @pipeline_def(batch_size=BATCH, num_threads=threads, device_id=None, prefetch_queue_depth=1)
    def pipeline():
        data, _ = fn.readers.file(files=files, random_shuffle=True)
        images = fn.decoders.image_random_crop(data, device="cpu", random_area=SCALE, random_aspect_ratio=RATIO)
        images = fn.resize(images, size=[SIDE, SIDE], interp_type=types.INTERP_LINEAR, antialias=True)
        return fn.flip(images, horizontal=fn.random.coin_flip())

    built = pipeline()
    built.build()
    return lambda number: _count(built.run()[0] for _ in range(len(files) // BATCH))


def _our_decoder(kind: str) -> Method:
    return Method(lambda folder, threads: decoder(folder / kind, threads), decodes=kind)


def _our_loader(kind: str, **augment: Any) -> Method:
    return Method(lambda folder, threads: _loader(folder / kind, threads, **augment))


# What `widemix prep` makes beside the files, each in its folder.
PREPARED = {
    "original": "--no-restart-markers",
    "segments": "--restart-markers",
    "coefficients": "--encoding=coefficients",
    "raw": "--raw",
}
FFCV, TIMM = "FFCV, original bytes, uint8", "timm's create_loader, original files"
# The folders, by what rows say of them; a loader gets no pixels.
_STORED = {"original bytes": "original", "restart markers": "segments", "coefficients": "coefficients"}
METHODS: dict[str, Method] = {
    FFCV: Method(lambda folder, threads: _ffcv(folder / "original", threads), "ffcv"),
    **{f"ours, {name}, uint8": _our_decoder(kind) for name, kind in (_STORED | {"pixels": "raw"}).items()},
    TIMM: Method(_timm),
    **{f"ours, {name}": _our_loader(kind) for name, kind in _STORED.items()},
    **{f"ours, {name}, RandAugment and erasing": _our_loader(kind, **WHOLE) for name, kind in _STORED.items()},
    "torchcodec and torchvision v2, original files": Method(_torchcodec, "torchcodec"),
    "simplejpeg and torchvision v2, original files": Method(_simplejpeg, "simplejpeg"),
    "SPDL, original files, uint8": Method(_spdl, "spdl.io"),
    "DALI's CPU pipeline, original files, uint8": Method(_dali, "nvidia.dali"),
}


def time_epoch(name: str, folder: Path, threads: int) -> dict[str, float]:
    """Images, seconds and CPU seconds of an epoch by a method, after one that is not counted."""
    torch.set_num_threads(threads)
    epoch = METHODS[name].build(folder, threads)
    epoch(0)  # compiles, and opens files
    began, used = time.perf_counter(), time.process_time() + children_cpu_seconds()
    images = epoch(1)
    seconds = time.perf_counter() - began
    return {"images": images, "seconds": seconds, "cpu_seconds": time.process_time() + children_cpu_seconds() - used}


if __name__ == "__main__":
    print(json.dumps(time_epoch(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))

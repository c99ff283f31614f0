"""Loading without an augmentation policy, ours against other libraries: crop to 224, resize, flip.

Real ImageNet JPEGs, each under several names, in whole epochs on one decoding thread. Rows with "uint8" leave the
images as they are; the others normalise to float32. simplejpeg, SPDL and DALI take part if they are installed.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from widemix.bench.sample import link_repeatedly, prepare
from widemix.bench.timing import Contestant, compare_loaders, percent_longer
from widemix.data.decode import Decoder, cubic, random_boxes
from widemix.data.loader import TrainLoader
from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.formats.beton import open_beton
from widemix.formats.checksums import open_checksums
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import IMAGENET_MEAN, IMAGENET_STD, DataSection
from widemix.recipe.train import TrainSection

VERSIONS = ("torch", "torchvision", "timm", "pillow", "ffcv", "numba", "numpy")
SIDE, BATCH = 224, 50
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
FFCV = "FFCV, original bytes, uint8"


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of `widemix bench loader`."""
    files = sorted((arguments.origin / "train").glob("*/*.JPEG"))
    if not files:
        raise InputError(f"--from {arguments.origin}: has no training JPEGs (train/<class>/*.JPEG)")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        links = link_repeatedly(files, folder / "images", arguments.samples)
        for kind, option in (
            ("original", "--no-restart-markers"),
            ("segments", "--restart-markers"),
            ("raw", "--raw"),
        ):
            prepare("imagenet", folder / "images", folder / kind, "--max-size=0", option)
        decoders = {
            "ours, original bytes, uint8": folder / "original",
            "ours, restart markers, uint8": folder / "segments",
            "ours, pixels, uint8": folder / "raw",
        }
        contestants = _contestants(links, folder, {name: _decoder(where) for name, where in decoders.items()})
        rows = compare_loaders(contestants, arguments.rounds, peer=FFCV)
        for row in rows:
            where = decoders.get(row["name"])
            row["checksums_percent"] = None if where is None else _price(where, arguments.rounds)
        return rows


def _price(folder: Path, rounds: int) -> float:
    """By how many percent a decoder takes longer than one without checksums."""
    return round(percent_longer(_decoder(folder), _decoder(folder, checked=False), rounds), 2)


def _contestants(links: Sequence[Path], folder: Path, decoders: dict[str, Contestant]) -> dict[str, Contestant]:
    original, segments = folder / "original", folder / "segments"
    contestants = {
        FFCV: _ffcv(original / "train.beton"),
        **decoders,
        "timm's create_loader, original files": _timm(folder / "images" / "train"),
        "torchvision v2 and its decoder, original files": _torchvision(links),
        "ours, original bytes": _loader(original),
        "ours, restart markers": _loader(segments),
    }
    peers: dict[str, tuple[str, Callable[[Sequence[Path]], Contestant]]] = {
        "simplejpeg": ("simplejpeg and torchvision v2, original files", _simplejpeg),
        "spdl": ("SPDL, original files, uint8", _spdl),
        "nvidia.dali": ("DALI's CPU pipeline, original files, uint8", _dali),
    }
    for module, (name, contestant) in peers.items():
        try:
            import_module(module)
            contestants[name] = contestant(links)
        except (ImportError, RuntimeError) as error:  # SPDL's, without FFmpeg's libraries
            reason = str(error).partition(",")[0]
            print(f"{name}: left out ({reason}); pip install 'widemix[bench]'", file=sys.stderr)
    return contestants


def _count(batches: Iterable[Any]) -> int:
    """Return the number of images in batches, each a sequence or tensor of them."""
    return sum(len(batch) for batch in batches)


def _decoder(folder: Path, checked: bool = True) -> Contestant:
    beton = open_beton(folder / "train.beton")
    decoder = Decoder(beton, open_checksums(beton) if checked else None)
    images = np.empty((BATCH, SIDE, SIDE, 3), np.uint8)

    def process(number: int) -> int:
        order = np.random.RandomState(number).permutation(len(beton))
        for start in range(0, len(order), BATCH):
            samples = order[start : start + BATCH]
            boxes = random_boxes(samples, beton.height, beton.width, 0, number, SCALE, RATIO, 0.5)
            decoder.read(samples, boxes, cubic(samples, "bilinear", 0, number), images[: len(samples)], threads=1)
        return len(order)

    return process


def _loader(folder: Path) -> Contestant:
    """The training loader itself, prefetch thread and soft targets included."""
    data = DataSection(path=str(folder), num_classes=1000, image_size=SIDE, workers=1)
    train = TrainSection(epochs=1, global_batch=BATCH)
    loader = TrainLoader(data, AugmentSection(), train, Topology(0, 1, 0, 1, torch.device("cpu")))

    def process(number: int) -> int:
        with loader.batches(number) as batches:
            return _count(batches)

    return process


def _ffcv(path: Path) -> Contestant:
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor

    pipelines = {
        "image": [RandomResizedCropRGBImageDecoder((SIDE, SIDE), SCALE, RATIO), RandomHorizontalFlip(), ToTensor()],
        "label": [IntDecoder(), ToTensor()],
    }
    loader = Loader(
        str(path), BATCH, num_workers=1, os_cache=True, order=OrderOption.RANDOM, drop_last=False, pipelines=pipelines
    )
    return lambda number: _count(images for images, _ in loader)


def _timm(folder: Path) -> Contestant:
    from timm.data import create_dataset, create_loader

    loader = create_loader(
        create_dataset("", str(folder), is_training=True),
        SIDE,
        BATCH,
        is_training=True,
        color_jitter=0.0,
        interpolation="bilinear",
        num_workers=0,
        persistent_workers=False,
        use_prefetcher=False,
        device=torch.device("cpu"),
    )
    return lambda number: _count(images for images, _ in loader)


def _torchvision(files: Sequence[Path]) -> Contestant:
    from torchvision.io import ImageReadMode, decode_jpeg, read_file

    return _transformed(files, lambda file: decode_jpeg(read_file(str(file)), ImageReadMode.RGB))


def _simplejpeg(files: Sequence[Path]) -> Contestant:
    from simplejpeg import decode_jpeg

    return _transformed(files, lambda file: torch.from_numpy(decode_jpeg(file.read_bytes())).permute(2, 0, 1))


def _transformed(files: Sequence[Path], decode: Callable[[Path], torch.Tensor]) -> Contestant:
    """torchvision's transforms of images that `decode` reads, uint8 [3, H, W]."""
    from torchvision.transforms import v2

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

    loader = torch.utils.data.DataLoader(Images(), BATCH, shuffle=True)
    return lambda number: _count(loader)


def _spdl(files: Sequence[Path]) -> Contestant:
    """FFmpeg decodes whole files, and its filters crop, resize and flip."""
    import spdl.io

    shapes = [Image.open(file).size for file in files]
    widths, heights = (np.array(sides, np.int64) for sides in zip(*shapes, strict=True))

    def read(file: Path, box: Sequence[int]) -> np.ndarray:
        top, left, height, width, flip = box
        crop = f"crop=w={width}:h={height}:x={left}:y={top}:exact=1,scale={SIDE}:{SIDE}:flags=bilinear"
        description = f"{crop},{'hflip,' if flip else ''}format=pix_fmts=rgb24"
        frames = spdl.io.decode_packets(spdl.io.demux_image(str(file)), filter_desc=description)
        return spdl.io.to_numpy(spdl.io.convert_frames(frames))

    def process(number: int) -> int:
        order = np.random.RandomState(number).permutation(len(files))
        count = 0
        for start in range(0, len(order), BATCH):
            samples = order[start : start + BATCH]
            boxes = random_boxes(samples, heights, widths, 0, number, SCALE, RATIO, 0.5).tolist()
            pairs = zip(samples.tolist(), boxes, strict=True)
            count += len(np.stack([read(files[sample], box) for sample, box in pairs]))
        return count

    read(files[0], (0, 0, 8, 8, 0))  # without FFmpeg's libraries it fails here, not in a round
    return process


def _dali(files: Sequence[Path]) -> Contestant:
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, prefetch_queue_depth=1)
    def pipeline():
        data, _ = fn.readers.file(files=[str(file) for file in files], random_shuffle=True)
        images = fn.decoders.image_random_crop(data, device="cpu", random_area=SCALE, random_aspect_ratio=RATIO)
        images = fn.resize(images, size=[SIDE, SIDE], interp_type=types.INTERP_LINEAR, antialias=True)
        return fn.flip(images, horizontal=fn.random.coin_flip())

    built = pipeline()
    built.build()
    return lambda number: _count(built.run()[0] for _ in range(len(files) // BATCH))

"""widemix's operations in FFCV's own Loader, on betons that FFCV wrote: the batches of `widemix.Loader`."""

import inspect
import runpy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import widemix
from tests.data.plain_batches import permuted, stream_of
from tests.data_prep.conftest import uncompiled  # noqa: F401 - a fixture
from tests.library.spied import same
from widemix.data.order import shuffled
from widemix.data.random import ORDER, key
from widemix.data_prep.adopt import adopt
from widemix.formats.beton import JPEG, open_beton

pytestmark = pytest.mark.filterwarnings("ignore")  # numba's and FFCV's own, about FFCV's code
EXAMPLE = Path(__file__).parents[2] / "examples/ffcv_loader.py"
COUNT, SIDE, SEED = 41, 24, 3
JITTER: dict[str, Any] = {"color_jitter": (0.4, 0.4, 0.2, 0.1), "color_jitter_prob": 0.8}
JITTER |= {"grayscale_prob": 0.2, "gaussian_blur_prob": 0.4, "solarize_prob": 0.3}
ERASING: dict[str, Any] = {"re_prob": 0.5, "re_mode": "rand", "re_count": 3}
CROP: dict[str, Any] = {"scale": (0.3, 0.9), "ratio": (0.6, 1.5), "hflip": 0.2, "interpolation": "random"}
NORMAL: dict[str, Any] = {"mean": (0.1, 0.5, 0.8), "std": (0.2, 0.3, 0.4)}
POLICY: dict[str, Any] = {"auto_augment": "rand-m9-mstd0.5-inc1", **JITTER, **ERASING, **CROP, **NORMAL}


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """FFCV, with the first test that needs it: it compiles for seconds, in each process that collects tests."""
    global DatasetWriter, IntDecoder, IntField, Loader, OrderOption, RGBImageField, Squeeze, State, ToTensor, ffcv
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("ffcv", reason="FFCV is not installed")
        from ffcv.fields import IntField, RGBImageField
        from ffcv.fields.decoders import IntDecoder
        from ffcv.loader import Loader, OrderOption
        from ffcv.pipeline.state import State
        from ffcv.transforms import Squeeze, ToTensor
        from ffcv.writer import DatasetWriter

        from widemix import ffcv


class Scenes(torch.utils.data.Dataset):
    """Soft images of many sizes."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        numbers = np.random.RandomState(index)
        soft = Image.fromarray(numbers.randint(0, 256, (4, 5, 3)).astype(np.uint8))
        return soft.resize((int(numbers.randint(9, 90)), int(numbers.randint(9, 90))), 3), index % 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A beton by FFCV's writer, half JPEG and half pixels, and the folder that `widemix adopt` makes of it."""
    path, to = tmp_path_factory.mktemp("ffcv") / "train.beton", tmp_path_factory.mktemp("adopted")
    fields = {"image": RGBImageField(write_mode="proportion", compress_probability=0.5), "label": IntField()}
    np.random.seed(1)
    DatasetWriter(str(path), fields, num_workers=1).from_indexed_dataset(Scenes())
    adopt({"train": path}, to)
    return to


def ffcv_loader(folder: Path, *operations: Any, batch_size: int = 8, workers: int = 1, **keys: Any) -> Any:
    decoder = ffcv.RandomResizedCrop(SIDE, **CROP)
    pipelines = {"image": [decoder, *operations], "label": [IntDecoder(), ToTensor(), Squeeze((1,))]}
    keys = {"order": ffcv.Order(SEED), **keys}
    return Loader(str(folder / "train.beton"), batch_size, num_workers=workers, pipelines=pipelines, **keys)


def augmentations() -> list[Any]:
    policy = ffcv.RandAugment(POLICY["auto_augment"], NORMAL["mean"], interpolation="random")
    return [policy, ffcv.ColorJitter(**JITTER), ffcv.Normalize(**NORMAL), ffcv.RandomErasing(**ERASING)]


def copies(batches: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(images.clone(), labels.clone()) for images, labels in batches]


def ours(folder: Path, batch_size: int = 8, **keys: Any) -> widemix.Loader:
    return widemix.Loader(folder, "train", batch_size, SIDE, seed=SEED, device="cpu", num_workers=1, **POLICY, **keys)


def test_each_loader_has_an_order_of_its_indices():
    """Of rank 1 of 2: the later half of each step, of the permutation that seed and epoch give."""

    def loader(drop_last: bool) -> SimpleNamespace:
        reader = SimpleNamespace(metadata=np.zeros(3))
        return SimpleNamespace(reader=reader, indices=100 + np.arange(11), batch_size=2, drop_last=drop_last)

    order, loaders = ffcv.Order(5, 1, 2), [loader(True), loader(False)]
    one, other = map(order, loaders)
    epoch = [100 + permuted(place, 11, stream_of(5, 3, 11, ORDER)) for place in range(11)]
    assert one.sample_order(3).tolist() == [*epoch[2:4], *epoch[6:8]]
    assert other.sample_order(3).tolist() == [*epoch[2:4], *epoch[6:8], *epoch[9:]]
    other.sample_order(7)
    assert (one.epoch.tolist(), other.epoch.tolist(), order.epoch.tolist()) == ([3], [7], [0])


def test_normalised_images_are_on_the_device_asked_for():
    step, given = ffcv.Normalize(device="meta"), State(True, torch.device("cpu"), (5, 7, 3), np.dtype("u1"))
    state, memory = step.declare_state_and_memory(given)
    assert state == State(False, torch.device("meta"), (3, 5, 7), torch.float32)
    assert (memory.shape, memory.dtype, memory.device) == ((5, 7, 3), torch.float32, torch.device("meta"))
    assert step.mean.device == step.std.device == torch.device("meta")


@pytest.mark.parametrize("wrong", [0, -0.1, 1.001])
def test_a_centre_crop_is_of_no_more_than_the_image(wrong: float):
    assert ffcv.CenterCrop(8, crop_pct=1).crop_pct == 1
    with pytest.raises(widemix.InputError, match=rf"crop_pct {wrong}: Input should be"):
        ffcv.CenterCrop(8, crop_pct=wrong)


def test_images_are_decoded_on_the_threads_of_ffcvs_loader():
    """FFCV compiles as parallel code what says that it is."""
    for decoder in (ffcv.RandomResizedCrop(8), ffcv.CenterCrop(8)):
        decoder.order, decoder.memory_read = SimpleNamespace(seed=0, epoch=np.zeros(1, np.int64)), None
        assert decoder.generate_code().is_parallel


def test_an_operation_is_given_threads_seed_and_epoch():
    given: list[Any] = []
    for operation in (ffcv.RandAugment("rand-m9"), ffcv.ColorJitter(0.4)):
        operation.augmentation = lambda *arguments: given.append(arguments)
        loader = SimpleNamespace(num_workers=4)
        operation.order = SimpleNamespace(loader=loader, seed=5, epoch=np.array([3]))
        images, indices = np.zeros((2, 8, 8, 3), np.uint8), np.array([7, 2], np.uint64)
        assert operation.generate_code()(images, None, indices) is images
        found, view_ids, *numbers = given.pop()
        assert found is images
        assert (view_ids.dtype, view_ids.tolist(), numbers) == (np.int64, [7, 2], [5, 3, 4])


def test_what_is_not_given_is_as_in_our_loader():
    """But for a policy's interpolation: that of the loader's crops is not known to an operation."""
    theirs = inspect.signature(widemix.Loader).parameters
    operations = (ffcv.RandomResizedCrop, ffcv.CenterCrop, ffcv.RandAugment, ffcv.Normalize, ffcv.RandomErasing)
    for operation in (*operations, ffcv.Order):
        for name, parameter in inspect.signature(operation).parameters.items():
            if parameter.default is not inspect.Parameter.empty and name != "device":
                assert parameter.default == theirs[name].default, (operation, name)
    assert not ffcv.ColorJitter().augmentation.color_jitter.is_on
    jitter = ffcv.ColorJitter(0.4).augmentation.color_jitter
    assert (jitter.jitter.tolist(), jitter.jitter_prob) == ([0.4, 0.4, 0.4, 0.0], 1.0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("os_cache", [True, False])
def test_batches_are_those_of_our_loader(folder: Path, os_cache: bool) -> None:
    """Of several epochs, with pages that FFCV maps and that it reads itself, on one thread and on two."""
    theirs = ffcv_loader(folder, *augmentations(), os_cache=os_cache, workers=1 if os_cache else 2)
    loader = ours(folder)
    for _ in range(3):
        assert same(copies(theirs), copies(loader))


def test_ranks_share_the_batches_of_our_loader(folder: Path) -> None:
    keys: dict[str, Any] = {"batch_size": 6, "drop_last": False}
    for rank in range(2):
        theirs = ffcv_loader(folder, *augmentations(), order=ffcv.Order(SEED, rank, 2), **keys)
        assert same(copies(theirs), copies(ours(folder, 6, rank=rank, world=2, drop_last=False)))


def test_an_epoch_is_resumed(folder: Path) -> None:
    loader, theirs = ours(folder), ffcv_loader(folder, *augmentations())
    _, whole, after = (copies(loader) for _ in range(3))
    ffcv.resume(theirs, 1, 2)
    assert same(copies(theirs), whole[2:])
    assert same(copies(theirs), after), "the epoch after is whole"
    assert len(theirs) == 5
    with pytest.raises(widemix.InputError, match=r"widemix\.ffcv\.resume: the loader has no widemix\.ffcv\.Order"):
        ffcv.resume(type("Loader", (), {"traversal_order": None}), 0, 1)


def test_the_example(folder: Path, images: Path) -> None:
    open_loader = runpy.run_path(str(EXAMPLE))["open_loader"]
    keys: dict[str, Any] = {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.25, "num_workers": 1}
    for path in (folder, images):
        theirs = open_loader(path / "train.beton", 8, SIDE, workers=1)
        assert same(copies(theirs), copies(widemix.Loader(path, "train", 8, SIDE, device="cpu", **keys)))


def test_damage_is_black_and_told(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    beton = open_beton(folder / "train.beton")
    sample = int(np.flatnonzero(beton.mode == JPEG)[0])
    data = bytearray((folder / "train.beton").read_bytes())
    data[beton.offset[sample] : beton.offset[sample] + 20] = bytes(20)
    (tmp_path / "train.beton").write_bytes(data)
    images = torch.cat([images for images, _ in copies(ffcv_loader(tmp_path, ToTensor(), drop_last=False))])
    assert f"sample {sample} is damaged" in capfd.readouterr().err
    place = shuffled(np.arange(COUNT), COUNT, key(SEED, 0, COUNT, ORDER)).tolist().index(sample)
    assert [b for b in range(COUNT) if not images[b].any()] == [place]


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "random"])
def test_centre_crops_are_our_evaluations(folder: Path, interpolation: str) -> None:
    crop = {"bilinear": {"crop_pct": 0.04}, "bicubic": {"crop_pct": 0.6}, "random": {}}[interpolation]  # a pixel
    pipelines = {
        "image": [ffcv.CenterCrop(SIDE, interpolation=interpolation, **crop), ffcv.Normalize()],
        "label": [IntDecoder(), ToTensor(), Squeeze((1,))],
    }
    keys: dict[str, Any] = {"order": OrderOption.SEQUENTIAL, "drop_last": False, "pipelines": pipelines}
    theirs = Loader(str(folder / "train.beton"), 8, num_workers=1, **keys)
    shared: dict[str, Any] = {"interpolation": interpolation, "device": "cpu", "num_workers": 1, **crop}
    loader = widemix.Loader(folder, "train", 8, SIDE, is_training=False, **shared)
    assert same(copies(theirs), copies(loader))


def test_random_operations_want_our_order(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"RandomResizedCrop is random by epoch: give the loader order=widemix\.ffcv\.Order"
    ):
        ffcv_loader(folder, ToTensor(), order=OrderOption.RANDOM)
    with pytest.raises(ValueError, match="place it after Normalize"):
        ffcv_loader(folder, ffcv.RandomErasing(0.1))


def test_decoders_want_the_compiled_code(uncompiled) -> None:  # noqa: F811
    for decoder in (ffcv.CenterCrop, ffcv.RandomResizedCrop):
        with pytest.raises(
            widemix.InputError, match=r"widemix\.ffcv needs the C library; `python -m widemix\.native`"
        ):
            decoder(8)


def test_the_scale_is_ours() -> None:
    """FFCV's own operation has its arguments in 0 to 255; white is the largest of both here."""
    assert torch.equal(ffcv.Normalize(mean=(1, 0, 0), std=(1, 1, 1)).mean.flatten(), torch.tensor([255.0, 0, 0]))
    for wrong in ({"mean": (0, 0, 1.01)}, {"std": (1.01, 1, 1)}):
        with pytest.raises(widemix.InputError, match=r"1\.01: is not on a scale of 0 to 1; divide it by 255"):
            ffcv.Normalize(**wrong)

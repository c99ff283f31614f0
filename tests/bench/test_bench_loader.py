"""`widemix bench loader`: every method loads every image, in a process of its own, and the table is the samples'."""

import importlib
import io
import json
import re
import statistics
import sys
from argparse import Namespace
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import timm.data
import torch
from PIL import Image
from torchvision.transforms import v2

from tests.bench.conftest import Clock, Processes
from tests.conftest import ROOT, System
from widemix.bench import loader, loading
from widemix.bench.loader import is_installed, powers_of_two, time_in_process
from widemix.bench.sample import jpegs, link_repeatedly, prepare
from widemix.cgroups import usable_cpus
from widemix.data.decode import random_boxes
from widemix.errors import InputError, RunError
from widemix.formats.beton import open_beton
from widemix.recipe import load_recipe
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import IMAGENET_MEAN, IMAGENET_STD

OURS = [name for name in loading.METHODS if name.startswith("ours, ")]
SECTION = AugmentSection()  # what all crop and flip by
CROP = ((0.08, 1.0), (3 / 4, 4 / 3))
GOLDEN = ROOT / "tests/bench/other_loaders.txt"
# How `widemix prep` is to store what the names say.
STORED = {
    "original bytes": ("original", "--no-restart-markers"),
    "restart markers": ("segments", "--restart-markers"),
    "coefficients": ("coefficients", "--encoding=coefficients"),
    "pixels": ("raw", "--raw"),
}


def test_images_of_any_folder(images, tmp_path):
    files = jpegs(images)
    assert len(files) == 12
    links = link_repeatedly(files, tmp_path, 30)
    assert len(links) == 30
    assert sorted(link.read_bytes() for link in links) == sorted(files[i % 12].read_bytes() for i in range(30))
    assert {link.parent.name for link in links} == {"a", "c"}  # the class that each file was in
    assert len({*links}) == 30
    assert links == sorted(links)


def test_of_a_data_set_the_training_images_are_taken(tmp_path):
    for name in (
        "train/a/1.JPEG",
        "train/a/b/2.jpg",
        "train/c/3.JPG",
        "train/c/4.jpeg",
        "train/c/5.png",
        "val/a/6.jpg",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "train/folder.jpg").mkdir()
    found = [str(file.relative_to(tmp_path / "train")) for file in jpegs(tmp_path)]
    assert found == ["a/1.JPEG", "a/b/2.jpg", "c/3.JPG", "c/4.jpeg"]


def test_data_are_prepared_in_order_and_a_failure_is_told(tmp_path, system: System):
    commands, ended = [], [(0, ""), (0, ""), (2, "warning\nerror: no space\n"), (1, "")]

    def run(command, **options):
        commands.append(command)
        code, said = ended.pop(0)
        return SimpleNamespace(returncode=code, stderr=said)

    system({"subprocess.run": run})
    prepare("image-folder", tmp_path / "from", tmp_path / "to", "--raw", "--max-size=0")
    prepare("digits", None, tmp_path / "to")
    start, to = [sys.executable, "-m", "widemix", "prep"], ["--to", str(tmp_path / "to"), "--no-shuffle"]
    assert commands[0] == [*start, "image-folder", "--from", str(tmp_path / "from"), *to, "--raw", "--max-size=0"]
    assert commands[1] == [*start, "digits", *to]
    for reason in ("error: no space", "failed"):
        with pytest.raises(RunError, match=f"^widemix prep digits: {reason}$"):
            prepare("digits", None, tmp_path)


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError"])
def test_what_does_not_load_is_left_out_with_a_line(error, tmp_path, monkeypatch, capsys):
    name = "SPDL, original files, uint8"
    assert is_installed("ours, pixels, uint8")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "spdl").mkdir()
    for text, works in ((f"raise {error}('no libx.so, which\\nit needs')", False), ("", True)):
        importlib.invalidate_caches()
        for module in ("spdl", "spdl.io"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        (tmp_path / "spdl/io.py").write_text(text)
        (tmp_path / "spdl/__init__.py").touch()
        assert is_installed(name) == works
        said = "" if works else f"{name}: left out (no libx.so); pip install '{ROOT}[bench]'\n"
        assert capsys.readouterr().err == said


@pytest.mark.long
def test_a_method_is_timed_in_a_process_of_its_own(images, tmp_path):
    link_repeatedly(jpegs(images), tmp_path / "images", 100)
    prepare("image-folder", tmp_path / "images", tmp_path / "segments", "--max-size=0")
    timing = time_in_process("ours, restart markers, uint8", tmp_path, 1)
    assert timing["images"] == 100
    assert min(timing["cpu_seconds"], timing["seconds"]) > 0
    with pytest.raises(RunError, match="cats, 1 threads: KeyError: 'cats'"):
        time_in_process("cats", tmp_path, 1)


def test_spdl_crops_every_image_anew_in_each_epoch(images, tmp_path, monkeypatch):
    """With a module in its place, as it is not installed where the tests run."""
    read = []

    def decode_packets(path, filter_desc):
        read.append((path, filter_desc))
        width, height, x, y = map(
            int, re.match(r"crop=w=(\d+):h=(\d+):x=(\d+):y=(\d+):exact=1,", filter_desc).groups()
        )
        with Image.open(path) as image:
            assert 0 < width <= image.width - x
            assert 0 < height <= image.height - y
        return np.zeros((*map(int, re.search(r"scale=(\d+):(\d+)", filter_desc).groups()), 3), np.uint8)

    functions = {"demux_image": str, "decode_packets": decode_packets, "convert_frames": np.copy, "to_numpy": np.copy}
    package, module = ModuleType("spdl"), ModuleType("spdl.io")
    module.__dict__.update(functions)
    package.io = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spdl", package)
    monkeypatch.setitem(sys.modules, "spdl.io", module)
    files = sorted(map(str, link_repeatedly(jpegs(images), tmp_path / "images", 60)))
    epoch = loading.METHODS["SPDL, original files, uint8"].build(tmp_path, 2)
    for number in range(2):
        assert epoch(number) == 60
        assert sorted(path for path, _ in read[60 * number :]) == files
    assert not {*read[:60]} & {*read[60:]}


@pytest.mark.parametrize("peer", [loading.FFCV, loading.TIMM])
def test_rows_are_the_medians_of_samples_in_random_order(peer, images, processes: Processes, system, monkeypatch):
    """Compared with FFCV's, or without it timm's; what checksums cost is known of decoders on one thread alone."""
    timed = []
    monkeypatch.setitem(sys.modules, "ffcv", ModuleType("ffcv") if peer == loading.FFCV else None)

    def run(command, **_):
        name, threads = command[3], int(command[5])
        timed.append((name, threads))
        speed = {peer: 100, "ours, pixels, uint8": 400}.get(name, 200) * threads
        row = {"images": 10, "seconds": 10 / speed * len(timed), "cpu_seconds": 10 / speed}
        return SimpleNamespace(returncode=0, stdout=json.dumps(row))

    processes.other = run
    system({"os.sched_getaffinity": lambda _: {0, 1, 2}, "torch.set_num_threads": lambda _: None})
    counts = powers_of_two(usable_cpus())
    rows = loader.run(Namespace(origin=images, threads=None, samples=12, rounds=3))
    names = {row["name"] for row in rows}
    assert {row["threads"] for row in rows} == {*counts}
    assert len(rows) == len(counts) * len(names)
    orders = [timed[start : start + len(rows)] for start in range(0, len(timed), len(rows))]
    assert len(orders) == 3
    assert {tuple(sorted(order)) for order in orders} == {tuple(sorted(orders[0]))}
    assert len({tuple(order) for order in orders}) == 3
    for row in rows:
        speeds = [sample["images"] / sample["seconds"] for sample in row["samples"]]
        assert row["images_per_s"] == pytest.approx(statistics.median(speeds), abs=0.1)
        expected = {peer: 1, "ours, pixels, uint8": 4}.get(row["name"], 2)
        assert row["cpu_ratio"] == expected
        assert row["images_per_cpu_s"] == 100 * expected * row["threads"]
        decoder = loading.METHODS[row["name"]].decodes and row["threads"] == 1
        assert (row["checksums_percent"] is None) == (not decoder)
    assert {folder.name: options for folder, options in processes.prepared.items()} == {
        folder: ("--max-size=0", option) for folder, option in STORED.values()
    }


def test_threads_double_up_to_all():
    assert [powers_of_two(most) for most in (1, 2, 3, 4, 6)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6]]
    assert powers_of_two(usable_cpus())[-1] == usable_cpus()


@pytest.mark.parametrize("name", OURS)
def test_our_rows_read_what_was_prepared_as_their_names_say(name, images, processes, reads, tmp_path):
    """The loader crops and flips alone; the decoder reads uint8 in another order each epoch, by crops of its own."""
    link_repeatedly(jpegs(images), tmp_path / "images", 51)
    folder, option = STORED[name.split(", ")[1]]
    assert loading.PREPARED[folder] == option
    prepare("image-folder", tmp_path / "images", tmp_path / folder, "--max-size=0", option)
    epoch = loading.METHODS[name].build(tmp_path, 3)
    assert loading.METHODS[name].decodes == (folder if "uint8" in name else None)
    recipe = load_recipe(ROOT / "recipes/imagenet/mixer_b16.yaml").augment
    whole = AugmentSection(auto_augment=recipe.auto_augment, re_prob=recipe.re_prob)
    augment = whole if name.endswith("RandAugment and erasing") else SECTION
    if "uint8" not in name:
        [own] = epoch.loaders
        assert (own.data.workers, own.data.image_size, own.data.num_classes) == (3, 224, 1000)
        assert (own.augment, own.train.global_batch, own.topology.world) == (augment, 50, 1)
        assert epoch(0) == 50
        return
    beton, orders = open_beton(tmp_path / folder / "train.beton"), []
    for number in (0, 1, 0):
        reads.clear()
        assert epoch(number) == 51
        for samples, boxes, cubic, pixels, threads in reads:
            crops = (SECTION.scale, SECTION.ratio, SECTION.hflip)
            np.testing.assert_array_equal(boxes, random_boxes(samples, beton.height, beton.width, 0, number, *crops))
            assert (pixels.shape, pixels.dtype, threads) == ((len(samples), 224, 224, 3), np.uint8, 3)
            assert not cubic.any()
        orders.append([sample for samples, *_ in reads for sample in samples])
        assert [len(samples) for samples, *_ in reads] == [50, 1]
    assert sorted(orders[0]) == sorted(orders[1]) == [*range(51)]
    assert orders[0] == orders[2] != orders[1]


def test_our_decoder_reads_checksums_unless_told_not_to(images, processes, tmp_path):
    link_repeatedly(jpegs(images), tmp_path / "images", 12)
    prepare("image-folder", tmp_path / "images", tmp_path / "data", "--raw")
    assert loading.decoder(tmp_path / "data", 1)(0) == 12
    file = tmp_path / "data/train.beton"
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1  # of a pixel
    file.write_bytes(data)
    assert loading.decoder(tmp_path / "data", 1, checked=False)(0) == 12
    with pytest.raises(InputError):
        loading.decoder(tmp_path / "data", 1)(0)


def test_the_second_epoch_is_timed_by_threads_and_processes(tmp_path, clock: Clock, monkeypatch, system: System):
    children, threads = [11.0], []

    def build(folder, count):
        def epoch(number):
            clock.takes(2 if number else 1000)
            children[0] += 4 if number else 1000
            return 10 * count

        assert folder == tmp_path
        return epoch

    monkeypatch.setitem(loading.METHODS, "ours", loading.Method(build))
    times = {"os.times": lambda: SimpleNamespace(children_user=children[0], children_system=1.0)}
    system(times | {"torch.set_num_threads": threads.append})
    assert loading.time_epoch("ours", tmp_path, 3) == {"images": 30, "seconds": 2, "cpu_seconds": 6}
    assert threads == [3]


@pytest.fixture
def others(monkeypatch):
    """Modules in place of those that are not installed, and what they were given."""
    given = MagicMock()

    def pipeline_def(**options):
        return lambda pipeline: lambda: given.pipeline(pipeline(), **options)

    given.fn.readers.file.return_value = ("bytes", "labels")
    given.pipeline.return_value.run = lambda: [range(50)]
    given.Loader.return_value = [(range(50), "labels"), (range(10), "labels")]
    modules = {
        "torchcodec.decoders": {"decode_jpeg": lambda file: pixels(file.read_bytes())},
        "simplejpeg": {"decode_jpeg": lambda data: pixels(data).permute(1, 2, 0).numpy()},
        "nvidia.dali": {"fn": given.fn, "types": given.types, "pipeline_def": pipeline_def},
        "ffcv.fields.decoders": {"IntDecoder": str, "RandomResizedCropRGBImageDecoder": given.decoder},
        "ffcv.loader": {"Loader": given.Loader, "OrderOption": SimpleNamespace(RANDOM="random")},
        "ffcv.transforms": {"RandomHorizontalFlip": given.flipped, "ToTensor": str},
    }
    for name, functions in modules.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].__dict__.update(functions)
    return given


def pixels(data: bytes) -> torch.Tensor:
    """The colour of the first pixel of a JPEG everywhere, uint8 [3, 10, 20]."""
    colour = torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGB"))[0, 0])
    return colour[:, None, None].expand(3, 10, 20).clone()


@pytest.mark.parametrize("library", ["torchcodec", "simplejpeg"])
def test_torchvision_changes_what_another_library_decodes(library, images, others, tmp_path, system: System):
    """It crops, flips and normalises."""
    files, batches, crops = link_repeatedly(jpegs(images), tmp_path / "images", 60), [], []
    crop, load = v2.RandomResizedCrop, torch.utils.data.DataLoader.__iter__

    def kept(loader):
        for batch in load(loader):
            batches.append(batch)
            yield batch

    system({
        "torchvision.transforms.v2.RandomResizedCrop": lambda *own, **more: (
            crops.append(crop(*own, **more)) or crops[0]
        ),
        "torch.utils.data.DataLoader.__iter__": kept,
    })  # fmt: skip
    [method] = [method for name, method in loading.METHODS.items() if name.startswith(library)]
    assert method.package == library
    assert method.build(tmp_path, 1)(0) == 60
    assert [tuple(batch.shape) for batch in batches] == [(50, 3, 224, 224), (10, 3, 224, 224)]
    assert [(*each.size, each.scale, each.ratio, each.antialias) for each in crops] == [(224, 224, *CROP, True)]
    mean, std = (torch.tensor(each)[:, None, None] for each in (IMAGENET_MEAN, IMAGENET_STD))
    expected = [((pixels(file.read_bytes()) / 255 - mean) / std)[:, 0, 0] for file in files]
    colours = torch.cat(batches)[:, :, 0, 0]
    torch.testing.assert_close(torch.cat(batches), colours[:, :, None, None].expand(60, 3, 224, 224))
    order = [min(range(60), key=lambda k: (colours[j] - expected[k]).abs().sum()) for j in range(60)]
    torch.testing.assert_close(colours, torch.stack([expected[k] for k in order]))
    assert order[:12] != [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]  # shuffled


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on fewer CPUs
def test_timm_loads_crops_and_flips_alone(images, tmp_path, system: System):
    link_repeatedly(jpegs(images), tmp_path / "images", 60)
    made, create = [], timm.data.create_loader
    system({"timm.data.create_loader": lambda *given, **own: made.append(create(*given, **own)) or []})
    for threads, processes in ((1, 0), (2, 2), (3, 3)):
        loading.METHODS["timm's create_loader, original files"].build(tmp_path, threads)
        loader = made.pop()
        assert (loader.num_workers, loader.persistent_workers, loader.batch_size) == (processes, False, 50)
        assert len(loader.dataset) == 60
        crop, flip, jitter, *others = loader.dataset.transform.transforms
        assert (crop.size, crop.scale, flip.p) == ((224, 224), SECTION.scale, SECTION.hflip)
        assert (crop.ratio, crop.interpolation.value) == (pytest.approx(SECTION.ratio, abs=1e-4), "bilinear")
        assert {jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue} == {None}
        assert [type(each).__name__ for each in others] == ["MaybeToTensor", "Normalize"]
        assert isinstance(loader.sampler, torch.utils.data.RandomSampler)


def test_dali_and_ffcv_are_called_as_golden_has_it(images, others, tmp_path, request):
    """They crop and flip alone, on as many threads."""
    files = link_repeatedly(jpegs(images), tmp_path / "images", 160)
    dali = loading.METHODS["DALI's CPU pipeline, original files, uint8"].build(tmp_path, 3)
    assert dali(0) == 150  # of whole batches
    assert loading.METHODS[loading.FFCV].build(tmp_path, 3)(0) == 60
    said = "".join(f"{each}\n".removeprefix("call.") for each in others.mock_calls)
    said = said.replace(str([str(file) for file in files]), "FILES").replace(str(tmp_path), "FOLDER")
    said = re.sub(r" id='\d+'", "", said)
    if request.config.option.regenerate:
        GOLDEN.write_text(said)
    assert said == GOLDEN.read_text()


def test_a_method_has_its_process_whose_failure_is_named(tmp_path, system: System):
    commands, ended = [], [SimpleNamespace(returncode=0, stdout='compiling\n{"images": 3}\n')]
    for error in ("Traceback\nKeyError: cats\n", ""):
        ended.append(SimpleNamespace(returncode=1, stdout="", stderr=error))

    def run(command, **options):
        commands.append((command, options))
        return ended.pop(0)

    system({"subprocess.run": run})
    assert time_in_process("ours", tmp_path, 2) == {"images": 3}
    words = [sys.executable, "-m", "widemix.bench.loading", "ours", str(tmp_path), "2"]
    assert commands == [(words, {"capture_output": True, "text": True})]
    for reason in ("KeyError: cats", "failed"):
        with pytest.raises(RunError, match=f"^ours, 2 threads: {reason}$"):
            time_in_process("ours", tmp_path, 2)

"""`widemix bench loader`: every method loads every image, in a process of its own, and the table is the samples'."""

import io
import json
import re
import statistics
import subprocess
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import timm.data
import torch
from PIL import Image
from torchvision.transforms import v2

from tests.clone import CLONE
from tests.conftest import System
from widemix.bench import loader, loading, sample
from widemix.bench.loader import powers_of_two
from widemix.bench.sample import jpegs, link_repeatedly
from widemix.cgroups import usable_cpus
from widemix.data.decode import random_boxes
from widemix.errors import InputError, RunError
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import IMAGENET_MEAN, IMAGENET_STD


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Twelve JPEGs at two depths, two with the same name, and what is none."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(12):
        file = folder / ("a" if number % 2 else "b/c") / f"{number // 2}.{'jpg' if number % 3 else 'JPEG'}"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(256, size=(40 + number, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file, "JPEG")
    (folder / "notes.txt").write_text("none")
    return folder


def test_images_of_any_folder(images, tmp_path):
    files = jpegs(images)
    assert len(files) == 12
    links = link_repeatedly(files, tmp_path, 30)
    assert len(links) == 30
    assert sorted(link.read_bytes() for link in links) == sorted(files[i % 12].read_bytes() for i in range(30))
    assert {link.parent.name for link in links} == {"a", "c"}  # the class that each file was in
    assert len({*links}) == 30
    assert links == sorted(links)
    with pytest.raises(InputError, match="has no JPEGs"):
        jpegs(tmp_path / "none")


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
    sample.prepare("image-folder", tmp_path / "from", tmp_path / "to", "--raw", "--max-size=0")
    sample.prepare("digits", None, tmp_path / "to")
    start, to = [sys.executable, "-m", "widemix", "prep"], ["--to", str(tmp_path / "to"), "--no-shuffle"]
    assert commands[0] == [*start, "image-folder", "--from", str(tmp_path / "from"), *to, "--raw", "--max-size=0"]
    assert commands[1] == [*start, "digits", *to]
    for reason in ("error: no space", "failed"):
        with pytest.raises(RunError, match=f"^widemix prep digits: {reason}$"):
            sample.prepare("digits", None, tmp_path)


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError])
def test_what_is_not_installed_or_does_not_load_is_left_out_with_a_line(error, monkeypatch, capsys):
    def fails(package):
        asked.append(package)
        raise error("no libx.so, which\nit needs")

    asked: list[str] = []
    monkeypatch.setattr(loader, "import_module", fails)
    assert loader._installed("ours, pixels, uint8")
    assert asked == []
    name = "SPDL, original files, uint8"
    assert not loader._installed(name)
    assert asked == ["spdl.io"]
    assert capsys.readouterr().err == f"{name}: left out (no libx.so); pip install 'widemix[bench]'\n"
    monkeypatch.setattr(loader, "import_module", lambda package: None)
    assert loader._installed(name)


@pytest.mark.long
def test_our_methods_load_every_image(images, tmp_path):
    (tmp_path / "images").mkdir()
    link_repeatedly(jpegs(images), tmp_path / "images", 100)
    for kind, option in loading.PREPARED.items():
        loader.prepare("image-folder", tmp_path / "images", tmp_path / kind, "--max-size=0", option)
    for name, method in loading.METHODS.items():
        if name.startswith("ours"):  # FFCV compiles for long, others are not installed where the tests run
            epoch = method.build(tmp_path, 1)
            assert epoch(0) == 100, name
            assert epoch(1) == 100, name
    name = "ours, restart markers, uint8"
    words = [sys.executable, "-m", "widemix.bench.loading", name, str(tmp_path), "1"]
    done = subprocess.run(words, cwd=CLONE, capture_output=True, text=True, check=True)
    timing = json.loads(done.stdout)
    assert timing["images"] == 100
    assert timing["cpu_seconds"] > 0
    assert timing["seconds"] > 0
    with pytest.raises(RunError, match="cats, 1 threads: KeyError: 'cats'"):
        loader._time("cats", tmp_path, 1)


def test_spdl_crops_every_image_within_its_borders_anew_in_each_epoch(images, tmp_path, monkeypatch):
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

    io = {"demux_image": str, "decode_packets": decode_packets, "convert_frames": np.copy, "to_numpy": np.copy}
    package, module = ModuleType("spdl"), ModuleType("spdl.io")
    module.__dict__.update(io)
    package.io = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spdl", package)
    monkeypatch.setitem(sys.modules, "spdl.io", module)
    files = sorted(map(str, link_repeatedly(jpegs(images), tmp_path / "images", 60)))
    epoch = loading.METHODS["SPDL, original files, uint8"].build(tmp_path, 2)
    for number in range(2):
        assert epoch(number) == 60
        assert sorted(path for path, _ in read[60 * number :]) == files
    assert not {*read[:60]} & {*read[60:]}


def test_rows_are_the_medians_of_samples_in_random_order(images, monkeypatch):
    timed = []

    def time(name, folder, threads):
        timed.append((name, threads))
        speed = {loading.PEER: 100, "ours, pixels, uint8": 400}.get(name, 200) * threads
        return {"images": 10, "seconds": 10 / speed * len(timed), "cpu_seconds": 10 / speed}

    monkeypatch.setattr(loader, "_time", time)
    monkeypatch.setattr(loader, "_price", lambda folder, rounds: {"raw": 3.0}.get(folder.name, 1.0))
    monkeypatch.setattr(loader, "usable_cpus", lambda: 3)
    monkeypatch.setattr(loader, "prepare", lambda *arguments: None)
    rows = loader.run(SimpleNamespace(origin=images, threads=None, samples=12, rounds=3))
    names = {row["name"] for row in rows}
    assert {row["threads"] for row in rows} == {1, 2, 3}
    assert len(rows) == 3 * len(names)
    orders = [timed[start : start + len(rows)] for start in range(0, len(timed), len(rows))]
    assert len(orders) == 3
    assert {tuple(sorted(order)) for order in orders} == {tuple(sorted(orders[0]))}
    assert len({tuple(order) for order in orders}) == 3
    for row in rows:
        speeds = [sample["images"] / sample["seconds"] for sample in row["samples"]]
        assert row["images_per_s"] == pytest.approx(statistics.median(speeds), abs=0.1)
        expected = {loading.PEER: 1, "ours, pixels, uint8": 4}.get(row["name"], 2)
        assert row["cpu_ratio"] == expected
        assert row["images_per_cpu_s"] == 100 * expected * row["threads"]
        decoder = loading.METHODS[row["name"]].decodes and row["threads"] == 1
        assert row["checksums_percent"] == ((3 if "pixels" in row["name"] else 1) if decoder else None)
    with pytest.raises(InputError, match="--threads 4: this process may use 3 CPUs"):
        loader.run(SimpleNamespace(origin=images, threads=[1, 4], samples=12, rounds=3))


def test_threads_double_up_to_all():
    assert [powers_of_two(most) for most in (1, 2, 3, 4, 6)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6]]
    assert powers_of_two(usable_cpus())[-1] == usable_cpus()


def test_our_rows_read_what_was_prepared_as_their_names_say(tmp_path, monkeypatch):
    calls = []
    for way in ("decoder", "_loader"):
        monkeypatch.setattr(loading, way, lambda folder, threads, way=way: calls.append((way, folder.name, threads)))
    options = {
        "original bytes": "--no-restart-markers",
        "restart markers": "--restart-markers",
        "coefficients": "--encoding=coefficients",
        "pixels": "--raw",
    }
    seen = []
    for name, method in loading.METHODS.items():
        if name.startswith("ours, "):
            method.build(tmp_path, 3)
            [(way, folder, threads)] = calls
            calls.clear()
            stored = name.split(", ")[1]
            assert (loading.PREPARED[folder], threads) == (options[stored], 3)
            assert (way, method.decodes) == (("decoder", folder) if "uint8" in name else ("_loader", None))
            seen.append((way, stored))
    assert len(set(seen)) == len(seen) == 7
    monkeypatch.setattr(loading, "_ffcv", lambda folder, threads: (folder, threads))
    assert loading.METHODS[loading.PEER].build(tmp_path, 3) == (tmp_path / "original", 3)


def test_our_decoder_reads_every_image_in_another_order_each_epoch(tmp_path, monkeypatch):
    """By the crops and flips of a recipe's defaults; two at a time, and at last one."""
    height, width, reads, opened = np.arange(100, 105), np.arange(300, 305), [], []
    beton = type("Beton", (SimpleNamespace,), {"__len__": lambda self: 5})(height=height, width=width)

    def read(samples, boxes, cubic, images, threads):
        expected = random_boxes(samples, height, width, 0, epoch, section.scale, section.ratio, section.hflip)
        np.testing.assert_array_equal(boxes, expected)
        assert (images.shape, images.dtype, threads) == ((len(samples), 224, 224, 3), np.uint8, 3)
        assert cubic.tolist() == [False] * len(samples)
        reads.append(samples.tolist())

    monkeypatch.setattr(loading, "BATCH", 2)
    monkeypatch.setattr(loading, "open_beton", lambda path: opened.append(path) or beton)
    monkeypatch.setattr(loading, "open_checksums", lambda beton: "checksums")
    monkeypatch.setattr(loading, "Decoder", lambda *given: opened.append(given) or SimpleNamespace(read=read))
    section, orders = AugmentSection(), []
    for checked in ({}, {"checked": False}):
        process = loading.decoder(tmp_path, 3, **checked)
        assert opened == [tmp_path / "train.beton", (beton, None if checked else "checksums")]
        opened.clear()
        for epoch in range(2):
            assert process(epoch) == 5
            assert [len(samples) for samples in reads] == [2, 2, 1]
            orders.append([sample for samples in reads for sample in samples])
            reads.clear()
    assert [sorted(order) for order in orders] == [[0, 1, 2, 3, 4]] * 4
    assert orders[0] != orders[1]
    assert orders[:2] == orders[2:]


def test_our_loader_crops_and_flips_alone_on_as_many_threads(tmp_path, monkeypatch):
    class Loader:
        def __init__(self, *given):
            self.given = given

        @contextmanager
        def batches(self, epoch):
            made.append((epoch, *self.given))
            yield [range(50), range(3)]

    made: list = []
    monkeypatch.setattr(loading, "TrainLoader", Loader)
    assert loading._loader(tmp_path, 3)(4) == 53
    [(epoch, data, section, train, topology)] = made
    assert (epoch, data.path, data.image_size, data.workers) == (4, str(tmp_path), 224, 3)
    assert (section, train.global_batch, data.num_classes) == (AugmentSection(), 50, 1000)
    assert (topology.rank, topology.world, topology.local_rank, topology.local_world) == (0, 1, 0, 1)


def test_the_second_epoch_is_timed_by_threads_and_processes(tmp_path, monkeypatch, system: System):
    clocks = {"wall": 5.0, "cpu": 7.0, "children": 11.0}

    def build(folder, threads):
        def epoch(number):
            for name, seconds in {"wall": 1, "cpu": 2, "children": 4}.items():
                clocks[name] += seconds if number else 1000
            return 10 * threads

        assert folder == tmp_path
        return epoch

    threads: list[int] = []
    monkeypatch.setitem(loading.METHODS, "ours", loading.Method(build))
    monkeypatch.setattr(loading, "children_cpu_seconds", lambda: clocks["children"])
    reads = {"time.perf_counter": lambda: clocks["wall"], "time.process_time": lambda: clocks["cpu"]}
    system(reads | {"torch.set_num_threads": threads.append})
    assert loading._time("ours", tmp_path, 3) == {"images": 30, "seconds": 1, "cpu_seconds": 6}
    assert threads == [3]


def test_checksums_cost_what_a_decoder_takes_longer_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "decoder", lambda folder, threads, checked=True: (folder, threads, checked))

    def percent_longer(one, other, rounds):
        assert (one, other, rounds) == ((tmp_path, 1, True), (tmp_path, 1, False), 7)
        return 3.14159

    monkeypatch.setattr(loader, "percent_longer", percent_longer)
    assert loader._price(tmp_path, 7) == 3.14


@pytest.fixture
def others(monkeypatch):
    """Modules in place of those that are not installed, and what they were given."""
    given = MagicMock()

    def pipeline_def(**options):
        return lambda pipeline: lambda: given.pipeline(pipeline(), **options)

    given.file.return_value = ("bytes", "labels")
    given.pipeline.return_value.run = lambda: [range(50)]
    given.Loader.return_value = [(range(50), "labels"), (range(10), "labels")]
    dali = {
        "fn": SimpleNamespace(
            readers=SimpleNamespace(file=given.file),
            decoders=SimpleNamespace(image_random_crop=given.crop),
            resize=given.resize,
            flip=given.flip,
            random=given.random,
        ),
        "types": given.types,
        "pipeline_def": pipeline_def,
    }
    modules = {
        "torchcodec.decoders": {"decode_jpeg": lambda file: pixels(file.read_bytes())},
        "simplejpeg": {"decode_jpeg": lambda data: pixels(data).permute(1, 2, 0).numpy()},
        "nvidia.dali": dali,
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


SECTION = AugmentSection()  # what all crop and flip by
CROP = ((0.08, 1.0), (3 / 4, 4 / 3))


@pytest.mark.parametrize("library", ["torchcodec", "simplejpeg"])
def test_torchvision_crops_flips_and_normalises_what_another_library_decodes(
    library, images, others, tmp_path, monkeypatch
):
    files, batches, crops = link_repeatedly(jpegs(images), tmp_path / "images", 60), [], []
    crop = v2.RandomResizedCrop
    monkeypatch.setattr(
        v2, "RandomResizedCrop", lambda *given, **options: crops.append(crop(*given, **options)) or crops[0]
    )
    monkeypatch.setattr(loading, "_count", lambda found: batches.extend(found) or 60)
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
def test_timm_loads_crops_and_flips_alone(images, tmp_path, monkeypatch):
    link_repeatedly(jpegs(images), tmp_path / "images", 60)
    made, create = [], timm.data.create_loader
    monkeypatch.setattr(timm.data, "create_loader", lambda *given, **own: made.append(create(*given, **own)) or [])
    for threads, processes in ((1, 0), (2, 2), (3, 3)):
        loading._timm(tmp_path, threads)
        loader = made.pop()
        assert (loader.num_workers, loader.persistent_workers, loader.batch_size) == (processes, False, 50)
        assert len(loader.dataset) == 60
        crop, flip, jitter, *others = loader.dataset.transform.transforms
        assert (crop.size, crop.scale, flip.p) == ((224, 224), SECTION.scale, SECTION.hflip)
        assert (crop.ratio, crop.interpolation.value) == (pytest.approx(SECTION.ratio, abs=1e-4), "bilinear")
        assert {jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue} == {None}
        assert [type(each).__name__ for each in others] == ["MaybeToTensor", "Normalize"]
        assert isinstance(loader.sampler, torch.utils.data.RandomSampler)


def test_dali_and_ffcv_crop_and_flip_as_many_on_as_many_threads(images, others, tmp_path):
    files = link_repeatedly(jpegs(images), tmp_path / "images", 160)
    assert loading._dali(tmp_path, 3)(0) == 150  # of whole batches
    others.pipeline.assert_called_once_with(
        others.flip.return_value, batch_size=50, num_threads=3, device_id=None, prefetch_queue_depth=1
    )
    others.pipeline.return_value.build.assert_called_once_with()
    others.file.assert_called_once_with(files=[str(file) for file in files], random_shuffle=True)
    scale, ratio = CROP
    others.crop.assert_called_once_with("bytes", device="cpu", random_area=scale, random_aspect_ratio=ratio)
    linear = {"interp_type": others.types.INTERP_LINEAR, "antialias": True}
    others.resize.assert_called_once_with(others.crop.return_value, size=[224, 224], **linear)
    others.flip.assert_called_once_with(others.resize.return_value, horizontal=others.random.coin_flip.return_value)

    assert loading._ffcv(tmp_path, 3)(0) == 60
    others.decoder.assert_called_once_with((224, 224), scale, ratio)
    steps = {"image": [others.decoder.return_value, others.flipped.return_value, ""], "label": ["", ""]}
    options = {"num_workers": 3, "pipelines": steps, "os_cache": True, "order": "random", "drop_last": False}
    others.Loader.assert_called_once_with(str(tmp_path / "train.beton"), 50, **options)


def test_a_method_has_its_process_whose_failure_is_named(tmp_path, system: System):
    commands, ended = [], [SimpleNamespace(returncode=0, stdout='compiling\n{"images": 3}\n')]
    for error in ("Traceback\nKeyError: cats\n", ""):
        ended.append(SimpleNamespace(returncode=1, stdout="", stderr=error))

    def run(command, **options):
        commands.append((command, options))
        return ended.pop(0)

    system({"subprocess.run": run})
    assert loader._time("ours", tmp_path, 2) == {"images": 3}
    words = [sys.executable, "-m", "widemix.bench.loading", "ours", str(tmp_path), "2"]
    assert commands == [(words, {"capture_output": True, "text": True})]
    for reason in ("KeyError: cats", "failed"):
        with pytest.raises(RunError, match=f"^ours, 2 threads: {reason}$"):
            loader._time("ours", tmp_path, 2)

"""Batches: the same samples for every world size, thread count and restart; unreadable samples are named."""

import gc
import itertools
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data import transforms

from tests.cli.test_arguments import arguments_of
from tests.data.loading import (
    DAMAGED,
    FULL,
    PLAIN,
    SMOOTH,
    damage,
    no_thread_is_left,
    place,
    read,
    same,
    section,
    steps,
    text_section,
    train_loader,
)
from tests.data.plain_batches import CROP, FLIP, crop_numbers, stream_of, uniform
from tests.layouts import two_classes
from tests.sections import train_section
from widemix.data.batches import StepPart
from widemix.data.decode import Decoder, centre_boxes, random_boxes, read_with_pillow
from widemix.data.images import ATTEMPTS
from widemix.data.loader import EvalLoader, stored_by_class
from widemix.data.order import FileOrder, RandomOrder, rank_slices
from widemix.data.paged import PagedOrder
from widemix.data.split import open_split
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.verify import verify
from widemix.distributed.topology import Topology, share_cpus
from widemix.errors import InputError
from widemix.formats.beton import open_beton
from widemix.formats.checksums import open_checksums
from widemix.formats.manifest import manifest_json, read_manifest
from widemix.recipe.augment import AugmentSection

PAGED = {"order": "paged", "shuffle_window_mib": 1}
LOADED: dict[str, tuple[str, Callable, dict[str, Any], AugmentSection]] = {
    "random": ("images", section, {}, FULL),
    "paged": ("images", section, PAGED, FULL),
    "repeats": ("images", section, {}, FULL.model_copy(update={"aug_repeats": 3})),
    "sampled": ("images", section, {"sampling": {"class0": 3}}, FULL),
    "sampled pages": ("images", section, PAGED | {"sampling": "sqrt"}, FULL.model_copy(update={"aug_repeats": 3})),
    "replaced": ("damaged", section, {"on_corrupt": "replace"}, FULL),
    "text": ("pairs", text_section, {}, SMOOTH),
    "paged text": ("pairs", text_section, PAGED, SMOOTH),
}


@pytest.mark.parametrize("kind", LOADED)
def test_steps_are_the_same_however_they_are_loaded(kind, request, capsys):
    """By any number of ranks, micro-batches, threads and batches ahead, and from any step on."""
    folder, make, keys, augment = LOADED[kind]
    make_section = lambda **other: make(request.getfixturevalue(folder), **keys, **other)  # noqa: E731
    expected = steps(make_section(), augment)
    assert len(expected) == 2
    if folder == "images":  # stored as coefficients they are the same
        assert same(steps(section(request.getfixturevalue("coefficients"), **keys), augment), expected)
    if folder == "damaged":
        other = section(request.getfixturevalue("damaged_coefficients"), **keys)
        assert same(steps(other, augment), expected)
    assert not torch.equal(expected[0]["samples"], expected[1]["samples"])

    @settings(max_examples=6)
    @given(
        *(st.sampled_from(of) for of in ([(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 3), (3, 4)], [0, 0, 1, 2])),
        st.fixed_dictionaries({"workers": st.integers(1, 3), "prefetch_batches": st.integers(1, 4)}),
    )
    def check(ranks, first, read_by):
        if make is text_section:
            read_by.pop("workers")
        assert same(steps(make_section(**read_by), augment, *ranks, (1, first)), expected[first:])

    check()
    assert ("replaced by sample" in capsys.readouterr().err) == (kind == "replaced")


@pytest.mark.parametrize(
    ("order", "shuffle", "memory", "kind"),
    [
        ("random", True, 0.1, RandomOrder),
        ("paged", True, 9, PagedOrder),
        ("random", False, 9, FileOrder),
        ("paged", False, 9, FileOrder),
        ("auto", True, 1.01, RandomOrder),
        ("auto", True, 0.99, PagedOrder),
    ],
)
def test_an_order_is_built_from_the_recipe(images, order, shuffle, memory, kind):
    """With its batch, seed and repeats; memory: of the file's size."""
    memory *= (images / "train.beton").stat().st_size / 2**30
    data, augment = section(images, order=order, memory_gib=memory), AugmentSection(aug_repeats=3)
    found = train_loader(data, augment, train=train_section(24, seed=9), shuffle=shuffle).order
    assert type(found) is kind
    assert (found.count, found.seed, found.repeats) == (53, 9, 3)
    assert len(found.step(0, 0)) == 24
    assert len(set(found.step(0, 0) % 53)) < 24


@pytest.mark.parametrize(("mib", "ahead"), [(1, 1), (4, 1), (5, 2), (6, 2), (7, 3), (1024, 3)])
@pytest.mark.parametrize("kind", ["training", "evaluation"])
def test_batches_ahead_are_bounded_in_bytes(images, kind, mib, ahead):
    """A micro-batch of 16 images of 224 pixels, of the step's 64, has 2.3 MiB."""
    data = section(images, image_size=224, prefetch_mib=mib)
    if kind == "training":
        loader = train_loader(data, PLAIN, place(1, 2), train_section(64, 2), drop_last=False)
    else:
        loader = EvalLoader(data, 16, place(1, 2))
    assert arguments_of(lambda: loader.batches(0), "data.batches.Prefetch")["ahead"] == ahead


@pytest.mark.parametrize("views", [0, 2])
def test_a_rank_requests_what_it_reads_from_the_disk(images, views, system):
    """In the first step that it reads also what it reads at once; of the file that it reads."""
    data = section(images, order="paged")
    train = train_section(16, 2, 7)
    loader = train_loader(data, PLAIN, place(1, 2), train, views=[(data, PLAIN)] * views)
    requested: list[tuple[int, ...]] = []
    system({"os.posix_fadvise": lambda *request: requested.append(request)})
    read(loader, 4, 1)
    parts = rank_slices(16, 1, 2, 2)
    ranges = [loader.order.prefetch_ranges(4, step, step == 1, parts).tolist() for step in (1, 2)]
    assert any(ranges)
    expected = [(loader.source.descriptor, a, b - a, os.POSIX_FADV_WILLNEED) for step in ranges for a, b in step]
    assert requested == expected
    assert os.path.samestat(os.fstat(loader.source.descriptor), os.stat(images / "train.beton"))


@pytest.mark.parametrize("workers", [3, 40, 0])
def test_threads_are_those_asked_for_or_the_ranks_share(images, workers):
    topology = Topology(2, 4, 0, 2, torch.device("cpu"))
    source = EvalLoader(section(images, workers=workers), 4, topology).source
    assert source.threads == (workers or share_cpus(topology))
    ids = np.arange(4)
    assert (
        arguments_of(lambda: source.read(StepPart(ids)), "data.compiled.run_on_threads")["threads"] == source.threads
    )


@pytest.mark.parametrize("views", [0, 2])
@pytest.mark.parametrize(
    "augment", [{"auto_augment": "rand-m9"}, {"color_jitter": (0.2,) * 4}], ids=["policy", "jitter"]
)
def test_images_are_augmented_on_the_same_threads(images, augment, views):
    data, section_of = section(images, workers=3), AugmentSection(**augment)
    source = train_loader(data, PLAIN if views else section_of, views=[(data, section_of)] * views).source
    ids, pixels = np.arange(4), np.zeros((4, 8, 8, 3), np.uint8)
    called = arguments_of(lambda: source.read(StepPart(ids)), "data.augment.batch.Augmentation.__call__")
    assert called["threads"] == 3
    augmentation = (source.views[0] if views else source).augmentation
    called = arguments_of(lambda: augmentation(pixels, ids, 0, 0, 5), "data.compiled.run_on_threads")
    assert called["threads"] == 5


@pytest.mark.parametrize("world", [1, 2, 3, 20])
@pytest.mark.parametrize("samples", [None, np.array([16, 3, 5, 0, 9])], ids=["all", "some"])
@pytest.mark.parametrize("first", [0, 1])
def test_evaluation_deals_samples_to_ranks_in_turns(images, world, samples, first):
    label, chosen = open_beton(images / "val.beton").label, np.arange(17) if samples is None else samples
    for rank in range(world):
        loader = EvalLoader(section(images), 4, place(rank, world), samples=samples)
        own = chosen[rank::world]
        expected = [own[at : at + 4] for at in range(4 * first, -(-len(chosen) // world), 4)]
        found = read(loader, first)
        assert len(loader) == len(chosen)
        assert [batch.samples.tolist() for batch in found] == [part.tolist() for part in expected]
        assert [batch.targets.tolist() for batch in found] == [label[part].tolist() for part in expected]
        assert [batch.inputs.shape for batch in found] == [(len(part), 3, 24, 24) for part in expected]


SIZES = [(30, 400), (400, 30), (17, 90), (90, 17), (31, 30), (200, 333), (5, 7), (300, 400)]


@pytest.mark.parametrize(
    ("sizes", "scale", "ratio", "fallbacks"),
    [
        (SIZES, (0.1, 1.0), (0.6, 1.25), range(100, 200)),  # of 240: many of the others at a late attempt
        (SIZES, (0.25, 0.5), (3 / 4, 4 / 3), range(100, 241)),
        (
            [(10, 1000), (100, 70), (70, 80)],
            (1.0, 1.0),
            (0.6, 1.25),
            range(61),
        ),  # one too wide, and all of the others
        ([(9, 12)], (49 / 108, 49 / 108), (1.0, 1.0), range(1)),  # squares of 7 pixels
    ],
)
def test_random_crops_are_timms(sizes, scale, ratio, fallbacks, system):
    """Most attempts fail in long images, and after ten the largest crop that the ratio allows is the centre."""
    height, width = np.array(sizes).T
    ids = np.arange(60 * len(sizes))
    boxes, late = random_boxes(ids, height, width, 1, 2, scale, ratio, 0.3).tolist(), 0
    for view_id, (*box, flip) in zip(ids.tolist(), boxes, strict=True):
        h, w = sizes[view_id % len(sizes)]
        system({"timm.data.transforms.random": crop_numbers(stream_of(1, 2, view_id, CROP))})
        expected = transforms.RandomResizedCropAndInterpolation.get_params(Image.new("L", (w, h)), scale, ratio)
        assert box == list(expected), (view_id, h, w)
        assert flip == (uniform(stream_of(1, 2, view_id, FLIP), 0) < 0.3)
        late += (h, w) in SIZES[:4] and (box[2] == h or box[3] == w)
    assert late in fallbacks


def test_a_crop_has_at_least_one_pixel():
    """Of an image of 2 x 3 pixels and a scale that rounds to none; where no attempt gives any, the whole image."""
    boxes = random_boxes(np.arange(50), np.array([2]), np.array([3]), 1, 2, (0.01, 0.2), (0.3, 3.0), 0.0)
    assert boxes[:, 2:4].min() == 1
    none = random_boxes(np.arange(5), np.array([2]), np.array([3]), 1, 2, (0.001, 0.002), (0.5, 2.0), 0.0)
    assert none.tolist() == [[0, 0, 2, 3, 0]] * 5


@pytest.mark.parametrize(
    ("height", "width", "fraction", "box"),
    [
        (100, 60, 0.5, [35, 15, 30, 30, 0]),
        (40, 80, 0.5, [10, 30, 20, 20, 0]),
        (3, 4, 0.3, [1, 1, 1, 1, 0]),
        (9, 20, 0.875, [1, 6, 7, 7, 0]),  # cut off
    ],
)
def test_centre_boxes_are_the_middle_square(height, width, fraction, box):
    assert centre_boxes(np.array([1]), np.array([9, height]), np.array([9, width]), fraction).tolist() == [box]


@pytest.mark.parametrize(("size", "side", "least"), [((40, 20), 24, 2), ((20, 40), 24, 2), ((40, 21), 24, 2)])
def test_the_smallest_side_of_any_image_decides_on_the_padding(tmp_path, size, side, least):
    for number, each in enumerate(((40, 40), size, (50, 40))):
        path = tmp_path / f"source/train/class{number % 2}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", each).save(path)
    prepare("image-folder", tmp_path / "source", tmp_path / "out", PrepSettings(), processes=1)
    load = lambda **keys: train_loader(  # noqa: E731
        section(tmp_path / "out", image_size=side), AugmentSection(**keys), train=train_section(2)
    )
    words = rf"padding {least - 1}: .* image of {min(size)} pixels.* take a padding of at least {least}$"
    with pytest.raises(InputError, match=words):
        load(crop="padded", padding=least - 1)
    load(crop="padded", padding=least)
    load(padding=0)  # without such crops


@pytest.mark.parametrize(
    ("name", "checksums", "reason"),
    [
        ("damaged", True, "its bytes differ from its checksum"),
        ("damaged", False, "Not a JPEG file"),  # by the decoder alone
        ("damaged_coefficients", True, "its bytes differ from its checksum"),
        ("damaged_coefficients", False, ".*damaged"),
    ],
)
def test_a_damaged_image_is_named(name, checksums, reason, request):
    folder, reason = request.getfixturevalue(name), rf" \(\w+/class\d/\d+\.jpg\) cannot be read: {reason}"
    with pytest.raises(InputError, match=rf"train\.beton: sample (11|30|31){reason}.*; --data.on_corrupt replace"):
        read(train_loader(section(folder, checksums=checksums)))
    for on_corrupt in ("error", "replace"):
        with pytest.raises(InputError, match=rf"val\.beton: sample 5{reason}"):
            read(EvalLoader(section(folder, checksums=checksums, on_corrupt=on_corrupt), 4, place()))
    named = {int(sample) for line in verify(folder) for sample in re.findall(r"sample (\d+) \(", line)}
    assert named == {5, *DAMAGED}


def test_replacements_change_no_other_image(images, damaged, capsys):
    seen: dict[int, int] = {}
    for epoch in range(3):
        loaders = [train_loader(section(folder, on_corrupt="replace")) for folder in (images, damaged)]
        for before, after in zip(*(read(loader, epoch) for loader in loaders), strict=True):
            bad = np.isin(before.samples, DAMAGED)
            assert after.replaced == bad.sum() == (before.samples != after.samples).sum()
            assert torch.equal(before.inputs[~bad], after.inputs[~bad])
            label = loaders[1].source.file.label[after.samples]
            assert torch.equal(after.targets.argmax(1), torch.from_numpy(label))
            seen |= zip(before.samples[bad].tolist(), after.samples[bad].tolist(), strict=True)
    warnings = capsys.readouterr().err
    assert set(seen) == set(DAMAGED)
    for sample, other in seen.items():
        line = next(line for line in warnings.splitlines() if f"train.beton: sample {sample} (" in line)
        assert "cannot be read: its bytes differ from its checksum" in line
        assert f"replaced by sample {other}" in warnings


@pytest.mark.parametrize("readable", [50, 6])
def test_replacements_are_the_first_readable_samples_of_their_stream(images, damaged, readable, tmp_path):
    """Each view of a damaged sample is that view of another, with its crop, flip and augmentation."""
    folder, bad = damaged, set(DAMAGED)
    if readable == 6:
        folder, bad = Path(shutil.copytree(images, tmp_path / "few")), set(range(53)) - {3, 8, 20, 33, 40, 52}
        damage(folder, *bad)
    source = train_loader(section(folder, on_corrupt="replace"), FULL).source
    outcomes = set()
    for epoch, view in np.ndindex(3, 9):
        view_id = sorted(bad)[view % 3] + 53 * (view // 3)
        stream = stream_of(7, epoch, view_id, 11)
        samples = [int(53 * uniform(stream, attempt)) for attempt in range(ATTEMPTS)]
        expected = next((sample + 53 * (view // 3) for sample in samples if sample not in bad), None)
        outcomes.add(expected is None)
        ids = np.array([view_id])
        if expected is None:
            words = rf"sample {view_id % 53} .*; 10 other samples that could replace it cannot be read either"
            with pytest.raises(InputError, match=words):
                source.read(StepPart(ids, epoch))
            continue
        found = source.read(StepPart(ids, epoch))
        assert found.view_ids.tolist() == [expected]
        assert torch.equal(found.inputs, source.read(StepPart(found.view_ids, epoch)).inputs)
    assert outcomes == ({False} if readable == 50 else {False, True})


@pytest.mark.parametrize("raw", [False, True])
def test_checksums_are_compared_without_compiled_code_too(tmp_path, raw):
    """Also those of the table of segments, and of pixels that no crop shows."""
    two_classes(tmp_path / "jpegs")
    prepare("image-folder", tmp_path / "jpegs", tmp_path / "data", PrepSettings(raw=raw, splits="val"), processes=1)
    path = tmp_path / "data/val.beton"
    beton, data = open_beton(path), np.memmap(path, np.uint8, "r+")
    data[beton.offset[5] + beton.size[5] - 1 if raw else beton.segments[5]] ^= 4
    samples, pixels = np.arange(17), np.empty((17, 24, 24, 3), np.uint8)
    boxes = centre_boxes(samples, beton.height, beton.width, 0.5)
    decoder = Decoder(beton, open_checksums(beton), read_with_pillow)
    assert decoder.try_read(samples, boxes, samples, pixels, 2) == {5: "its bytes differ from its checksum"}


def test_early_exits_leave_no_thread_and_no_memory(images):
    """Half of them closed, half dropped as they are, most with the queue full and a batch in hand."""
    loader = train_loader(section(images, image_size=64, workers=2), train=train_section(16, seed=7))
    process = psutil.Process()

    def leave(epochs: range) -> None:
        for number in epochs:
            batches = loader.batches(number)
            next(batches)
            if number % 2:
                batches.__exit__()
            del batches

    leave(range(100))  # the decoding threads and their scratch are there to stay
    gc.collect()
    with no_thread_is_left():
        memory = process.memory_info().rss
        leave(range(100, 400))
        assert process.memory_info().rss - memory < 10 * 2**20


@pytest.mark.parametrize("order", ["paged", "auto"])
def test_pages_are_dealt_in_whole_batches_only(images, order):
    data = section(images, order=order, memory_gib=1e-6)
    with pytest.raises(InputError, match=r"drop_last False: data\.order paged deals whole batches only"):
        train_loader(data, drop_last=False)
    assert train_loader(data, drop_last=False, shuffle=False).steps == 3


@pytest.mark.parametrize(
    ("name", "rank", "order", "told"),
    [
        ("images", 0, "paged", True),
        ("images", 2, "paged", False),  # the first of its node
        ("images", 0, "random", False),
        ("digits", 0, "paged", False),
    ],
)
def test_rank_0_warns_of_classes_that_pages_do_not_mix(name, rank, order, told, request, capsys):
    folder = request.getfixturevalue(name)
    train_loader(section(folder, order=order, num_classes=10), PLAIN, place(rank, 4))
    words = "is stored class by class, which order paged mixes badly; prepare it with --shuffle"
    assert capsys.readouterr().err == (f"warning: {folder}/train.beton: {words}\n" if told else "")


@pytest.mark.parametrize(
    ("labels", "by_class"),
    [([0, 0, 1, 1], True), ([0, 1], True), ([0, 1, 0, 1], False), ([1, 1, 1], False), ([1, 0], False), ([3], False)],
)
def test_labels_that_only_rise_are_class_by_class(labels, by_class):
    assert stored_by_class(np.array(labels)) is by_class


def test_samples_without_a_class_are_refused(images, tmp_path):
    """As FFCV's files may have some, with the label -1, which manifests do not count."""
    beton, manifest = open_beton(images / "val.beton"), read_manifest(images)
    label = beton.label.copy()
    counts = list(manifest.splits["val"].per_class)
    counts[label[4]] -= 1
    label[4] = -1
    splits = manifest.splits | {"val": manifest.splits["val"].model_copy(update={"per_class": tuple(counts)})}
    other = Path(shutil.copytree(images, tmp_path / "other"))
    (other / "manifest.json").write_text(manifest_json(manifest.model_copy(update={"splits": splits})))
    for data, words in (
        (other, "labels reach 1, data.num_classes is 2"),
        (images, rf"holds \d+ samples of class {beton.label[4]}, the manifest says \d+"),
    ):
        with pytest.raises(InputError, match=rf"val\.beton: {words}"):
            open_split(section(data), "val", lambda path: replace(open_beton(path), label=label))


def test_the_folder_may_have_fewer_classes_than_the_recipe(images):
    assert train_loader(section(images, num_classes=3)).steps == 2


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_that_changes_while_it_is_opened_is_refused(images, tmp_path, change):
    path = Path(shutil.copy(images / "val.beton", tmp_path))
    beton, descriptors = open_beton(path), len(os.listdir("/proc/self/fd"))
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(InputError, match=r"val\.beton: was changed while it was opened"):
        Decoder(beton)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


CUT = "the file ends before it; it was cut short"


def cut(folder: Path) -> None:
    os.truncate(folder / "train.beton", 0)


def overwrite(folder: Path) -> None:
    """In place, with other numbers."""
    size = (folder / "train.beton").stat().st_size
    with (folder / "train.beton").open("r+b") as file:
        file.write(os.urandom(size))


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, rf"train\.beton: sample \d+ \(train/.*\) cannot be read: {CUT}; `widemix verify .*cut`"),
    "overwritten": (overwrite, r"train\.beton: sample \d+ \(train/.*\) cannot be read: .*; `widemix verify"),
    "text": (cut, rf"train\.beton: sample \d+ \(train\.tsv:\d+\) cannot be read: {CUT}; `widemix verify"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_damaged_while_it_is_read_is_named(name, images, pairs, tmp_path):
    """None of these faults ends the process."""
    fault, words = FAULTS[name]
    folder = Path(shutil.copytree(pairs if name == "text" else images, tmp_path / name))
    data = text_section(folder) if name == "text" else section(folder, workers=2)
    loader = train_loader(data, train=train_section(8))
    with loader.batches(0) as batches:
        for _ in range(3):
            next(batches)
        fault(folder)
        with pytest.raises(InputError, match=words):
            list(itertools.chain(batches, *(read(loader, epoch) for epoch in (1, 2, 3))))


def test_a_training_run_ends_with_one_line(digits, train, tmp_path):
    shutil.copytree(digits, tmp_path / "data")
    command = train("run", "--data.path", str(tmp_path / "data"), "--train.epochs", "1000")
    command.wait_for_step(tmp_path / "run", 2)
    cut(tmp_path / "data")
    code, output = command.wait(timeout=600)
    assert code == 2, output
    assert re.search(rf"train\.beton: sample \d+ \(.*\) cannot be read: {CUT}", output.splitlines()[-1])
    assert "Traceback" not in output

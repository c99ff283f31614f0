"""`widemix.Loader`: the trainer's batches, in anybody's loop, resumed at any step on any number of ranks."""

import os
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import widemix
import widemix.data.decode
from tests.sections import train_section
from widemix.api.sections import jitter_strengths, process_topology
from widemix.api.views import expand_views, view_sections
from widemix.data.loader import EvalLoader, TrainLoader
from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.formats.beton import open_beton
from widemix.formats.manifest import manifest_json, read_manifest
from widemix.pillow_support import older_pillow
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection

MIXED: dict[str, Any] = {
    "auto_augment": "rand-m9-mstd0.5-inc1",
    "color_jitter": (0.4, 0.4, 0.4, 0.1),
    "re_prob": 0.25,
    "mixup": 0.8,
    "cutmix": 1.0,
    "mix_group": 4,
    "smoothing": 0.1,
}
Step = tuple[torch.Tensor, torch.Tensor]


def loader(folder: Path, batch_size: int = 8, *, split: str = "train", **keys: Any) -> widemix.Loader:
    return widemix.Loader(folder, split, batch_size, 24, **{"seed": 7, "device": "cpu", "num_workers": 1, **keys})


def joined(loaders: list[widemix.Loader], steps: int | None = None) -> list[Step]:
    """The batches of all ranks put together."""
    ranks = zip(*(islice(each, steps) for each in loaders), strict=True)
    return [(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])) for batches in ranks]


def same(one: list[Step], other: list[Step]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) for step, twin in pairs for a, b in zip(step, twin, strict=True))


def test_what_prep_holds_out_is_evaluated_on(tmp_path: Path) -> None:
    widemix.prepare("digits", tmp_path / "digits", processes=1, holdout=0.1)
    labels = torch.cat([labels for _, labels in loader(tmp_path / "digits", 64, split="holdout")])
    assert labels.tolist() == open_beton(tmp_path / "digits/holdout.beton").label.tolist()
    assert loader(tmp_path / "digits", 64).is_training


EVALUATED = ("val", "valid", "validation", "dev", "eval", "test", "holdout")


@pytest.mark.parametrize("split", ["train", *EVALUATED, "Valid", "extra", "training"])
def test_a_split_is_trained_on_by_its_name(images: Path, tmp_path: Path, split: str) -> None:
    """And then shuffled, in whole batches; if not, there is all of it, in order. `valid` was trained on."""
    for path in images.iterdir():
        (tmp_path / path.name).symlink_to(path)
    manifest = read_manifest(images)
    renamed = manifest.model_copy(update={"splits": {split: manifest.splits["train"]}})
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").write_text(manifest_json(renamed))
    if split not in ("train", *EVALUATED):
        with pytest.raises(InputError, match=f"split '{split}': set is_training=True"):
            loader(tmp_path, 12, split=split)
    choices = {None: split == "train"} if split in ("train", *EVALUATED) else {True: True, False: False}
    for given, trained in choices.items():
        found = loader(tmp_path, 12, split=split, is_training=given)
        labels = torch.cat([targets for _, targets in found]).tolist()
        assert found.is_training is trained
        assert (len(found), len(labels)) == ((4, 48) if trained else (5, 53))
        assert (labels == labels_of(images)[: len(labels)].tolist()) is not trained


def test_a_field_of_classes_may_be_named_targets(images: Path, tmp_path: Path) -> None:
    """As in a file of FFCV's, where names are free."""
    for path in images.iterdir():
        (tmp_path / path.name).symlink_to(path)
    manifest = read_manifest(images)
    split = manifest.splits["train"]
    renamed = split.model_copy(update={"fields": split.fields | {"targets": split.fields["label"]}})
    (tmp_path / "manifest.json").unlink()
    text = manifest_json(manifest.model_copy(update={"splits": manifest.splits | {"train": renamed}}))
    (tmp_path / "manifest.json").write_text(text)
    assert same(list(loader(tmp_path)), list(loader(images)))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_images_to_evaluate_have_the_type_that_is_asked_for(images: Path, kind: torch.dtype) -> None:
    plain, found = (next(iter(loader(images, split="val", img_dtype=each)))[0] for each in (torch.float32, kind))
    assert found.dtype == kind
    torch.testing.assert_close(found.float(), plain, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("world", [1, 2])
def test_training_batches_are_the_trainers(images: Path, world: int) -> None:
    data = DataSection(path=str(images), num_classes=2, image_size=24, workers=1)
    for rank in range(world):
        topology = Topology(rank, world, 0, 1, torch.device("cpu"))
        theirs = TrainLoader(data, AugmentSection(**MIXED), train_section(8 * world, seed=7), topology)
        ours = loader(images, rank=rank, world=world, **MIXED)
        for epoch in range(2):
            with theirs.batches(epoch) as batches:
                assert same(list(ours), [(batch.inputs, batch.targets) for batch in batches])


@pytest.mark.parametrize("world", [1, 3])
def test_evaluation_batches_are_the_trainers(images: Path, world: int) -> None:
    data = DataSection(path=str(images), num_classes=2, image_size=24, workers=1)
    for rank in range(world):
        theirs = EvalLoader(data, 5, Topology(rank, world, 0, 1, torch.device("cpu")))
        ours = loader(images, 5, split="val", rank=rank, world=world)
        with theirs.batches() as batches:
            assert same(list(ours), [(batch.inputs, batch.targets) for batch in batches])
        assert len(ours) == len(list(ours)) == 4 // world + (world == 3)


def test_labels_are_numbers_unless_they_are_mixed_or_smoothed(images: Path) -> None:
    (_, hard), (_, soft) = (next(iter(loader(images, smoothing=smoothing))) for smoothing in (0.0, 0.1))
    assert hard.dtype == torch.int64
    assert torch.equal(soft, torch.where(torch.eye(2, dtype=torch.bool)[hard], 0.95, 0.05))


def test_an_epoch_is_resumed_in_its_middle_on_another_world_size(images: Path) -> None:
    whole = joined([loader(images, 24, **MIXED)])
    before = [loader(images, 12, rank=rank, world=2, **MIXED) for rank in range(2)]
    first = joined(before, steps=1)
    states = [each.state_dict() for each in before]
    assert states[0] == states[1]
    after = [loader(images, 8, rank=rank, world=3, **MIXED) for rank in range(3)]
    for each in after:
        each.load_state_dict(states[0])
        each.set_epoch(0)  # as loops do at the start of each epoch
    assert same(first + joined(after), whole)
    assert same(joined(after), joined([continued(loader(images, 24, **MIXED))])), "the epoch after"


def continued(one: widemix.Loader) -> widemix.Loader:
    one.set_epoch(1)
    return one


def test_an_evaluation_is_resumed_at_its_step(images: Path) -> None:
    one, other = (loader(images, 5, split="val") for _ in range(2))
    whole = list(one)
    other.load_state_dict(one.state_dict() | {"epoch": 0, "step": 1})
    assert len(whole) == 4
    assert same(list(other), whole[1:])


def test_each_iteration_is_another_epoch(images: Path) -> None:
    one, other = loader(images), loader(images)
    first, second = list(one), list(one)
    assert not same(first, second)
    next(iter(other))  # left at once, and yet an epoch
    assert same(second, list(other))
    other.set_epoch(0)
    assert same(first, list(other))
    assert one.state_dict() == {"epoch": 1, "step": 6, "seed": 7, "global_batch": 8, "samples": 53}
    other.load_state_dict(one.state_dict())
    assert other.state_dict()["epoch"] == 2


@pytest.mark.parametrize("world", [1, 2, 3])
def test_without_shuffle_and_drop_last_there_is_every_sample_in_the_files_order(images: Path, world: int) -> None:
    ranks = [loader(images, 12 // world, rank=r, world=world, shuffle=False, drop_last=False) for r in range(world)]
    labels = torch.cat([targets for _, targets in joined(ranks)])
    assert np.array_equal(labels.numpy(), open_beton(images / "train.beton").label)
    assert len(ranks[0]) == 5


def test_shuffled_without_drop_last_there_is_every_sample_once(images: Path) -> None:
    sampled: list[int] = []
    for epoch in range(2):
        one = loader(images, 12, drop_last=False)
        one.set_epoch(epoch)
        sampled.append(sum(len(targets) for _, targets in one))
    assert sampled == [53, 53]
    view_ids = np.concatenate([one._loader.order.step(1, step) for step in range(5)])  # type: ignore[union-attr]
    assert sorted(view_ids) == list(range(53))


# DINO's augmentation (Caron et al. 2021) in small: two global crops that differ, then local ones of another size.
JITTERED: dict[str, Any] = {"color_jitter": (0.4, 0.4, 0.2, 0.1), "color_jitter_prob": 0.8, "grayscale_prob": 0.2}
DINO = [
    widemix.View(scale=(0.4, 1), gaussian_blur_prob=1.0),
    widemix.View(image_size=12, scale=(0.05, 0.4), gaussian_blur_prob=0.5, interpolation="bicubic"),
    widemix.View(scale=(0.4, 1), solarize_prob=0.5, auto_augment="rand-m9-inc1", re_prob=0.5, interpolation="random"),
    widemix.View(image_size=12, scale=(0.05, 0.4), gaussian_blur_prob=0.5, interpolation="bicubic"),
]


def single_view(folder: Path, view: widemix.View, number: int, samples: np.ndarray, epoch: int) -> torch.Tensor:
    """What a loader with this view's arguments alone makes with the view ids of view `number`."""
    keys = {**JITTERED, **view}
    side = keys.pop("image_size", 24)
    one = widemix.Loader(folder, "train", 8, side, seed=7, device="cpu", num_workers=1, **keys)
    source, view_ids = one._loader.source, samples + 53 * number
    return source.finish(source.read(view_ids, view_ids, epoch)[0], view_ids, epoch)  # type: ignore[arg-type]


BY_PILLOW = pytest.mark.skipif(bool(older_pillow()), reason="older ones do not resize as the compiled code")


@pytest.mark.parametrize("way", ["compiled", pytest.param("pillow", marks=BY_PILLOW)])
@pytest.mark.parametrize("world", [1, 2])
def test_every_view_is_what_a_loader_of_that_view_makes(images, monkeypatch, way: str, world: int) -> None:
    if way == "pillow":
        monkeypatch.setattr(widemix.data.decode, "_compiled_reader", lambda: None)
    ranks = [loader(images, 8 // world, rank=r, world=world, views=DINO, **JITTERED) for r in range(world)]
    monkeypatch.undo()
    for epoch in range(2):
        seen = list(zip(*ranks, strict=True))
        for step in (0, 3):
            samples = ranks[0]._loader.order.step(epoch, step)  # type: ignore[union-attr]
            large, small = (torch.cat([batch[size] for batch, _ in seen[step]]) for size in range(2))
            assert large.shape == (8, 2, 3, 24, 24)
            assert small.shape == (8, 2, 3, 12, 12)
            for number, batch in enumerate((large[:, 0], small[:, 0], large[:, 1], small[:, 1])):
                assert torch.equal(batch, single_view(images, DINO[number], number, samples, epoch)), number
            assert torch.equal(torch.cat([labels for _, labels in seen[step]]), labels_of(images)[samples])
    assert seen[0][0][0][0][:, 0].is_contiguous(memory_format=torch.channels_last)


def labels_of(folder: Path) -> torch.Tensor:
    return torch.from_numpy(open_beton(folder / "train.beton").label.astype(np.int64))


@pytest.mark.parametrize("world", [1, 2])
def test_a_number_of_views_repeats_the_loaders_own(images: Path, world: int) -> None:
    """The first is the image that there is without views; the others have crops and policies of their own."""
    keys = {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.25, "smoothing": 0.1}
    plain = joined([loader(images, **keys)])
    viewed = joined([loader(images, 8 // world, rank=rank, world=world, views=3, **keys) for rank in range(world)])
    assert viewed[0][0].shape == (8, 3, 3, 24, 24)
    assert same([(batch[:, 0], labels) for batch, labels in viewed], plain)
    assert not any(torch.equal(batch[:, 1], batch[:, other]) for batch, _ in viewed for other in (0, 2))
    assert same(joined([loader(images, views=3 * [widemix.View()], **keys)]), viewed)


@pytest.mark.parametrize("views", [1, 2])
def test_pages_are_requested_of_the_file_that_is_read(images: Path, views: int) -> None:
    source = loader(images, views=views)._loader.source
    assert os.path.samestat(os.fstat(source.descriptor), os.stat(images / "train.beton"))


def test_views_go_with_one_repeat_of_each_image(images: Path) -> None:
    assert same(*(list(loader(images, views=2, num_aug_repeats=repeats)) for repeats in (0, 1)))


@pytest.mark.parametrize("views", [1, 2])
def test_a_rank_without_a_sample_of_the_last_step_has_an_empty_batch(images: Path, views: int) -> None:
    """Of the 5 samples that are left 12 ranks have one or none."""
    keys: dict[str, Any] = {"auto_augment": "rand-m9-mstd0.5-inc1", "color_jitter": 0.4, "re_prob": 0.5}
    keys |= {"views": views, "smoothing": 0.1, "drop_last": False}
    ranks = [loader(images, 1, rank=rank, world=12, **keys) for rank in range(12)]
    assert same(joined(ranks), list(loader(images, 12, **keys)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_views_are_rounded_to_the_type_asked_for(images: Path, dtype: torch.dtype) -> None:
    exact, rounded = (next(iter(loader(images, views=DINO, img_dtype=kind)))[0] for kind in (torch.float32, dtype))
    assert len(exact) == 2
    for one, other in zip(exact, rounded, strict=True):
        assert other.dtype == dtype
        assert torch.equal(one.to(dtype), other)


def test_a_damaged_image_of_views_is_named(images: Path, tmp_path: Path) -> None:
    for path in images.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    beton = open_beton(tmp_path / "train.beton")
    with open(tmp_path / "train.beton", "r+b") as file:
        file.seek(int(beton.offset[17]) + int(beton.size[17]) // 2)
        file.write(b"damage")
    with pytest.raises(widemix.InputError, match="sample 17"):
        list(loader(tmp_path, views=DINO))


def test_drop_last_in_evaluation(images: Path) -> None:
    assert [len(y) for _, y in loader(images, 5, split="val", drop_last=True)] == [5, 5, 5]


def test_a_loader_that_is_left_ends_its_threads(images: Path) -> None:
    before = set(threading.enumerate())  # some of which may end by themselves
    for _ in loader(images):
        assert set(threading.enumerate()) - before
        break
    assert set(threading.enumerate()) <= before


def test_torchs_dataloader_passes_the_batches_on(images: Path) -> None:
    assert same([tuple(batch) for batch in DataLoader(loader(images), batch_size=None)], list(loader(images)))
    with pytest.raises(ValueError, match="give DataLoader num_workers=0"):
        next(iter(DataLoader(loader(images), batch_size=None, num_workers=1)))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"batch_size": 0}, "batch_size 0: Input should be greater than or equal to 1"),
        ({"batch_size": "8"}, "batch_size '8': Input should be a valid integer"),
        ({"batch_size": 54}, "batch_size 54 x 1 ranks exceeds the 53 samples of split 'train'; set drop_last=False"),
        ({"split": "vla"}, "no split 'vla'; it has train, val"),
        ({"split": "val", "shuffle": True}, "is_training=True shuffles"),
        ({"mixup": 0.2, "batch_size": 12}, "mix_group 32 does not divide batch_size 12; 2, 4, 6, 12 would"),
        ({"mixup": 0.2, "mix_group": 4, "drop_last": False}, "drop_last False: mixup and CutMix take whole batches"),
        ({"views": 2, "mixup": 0.2, "mix_group": 4}, "views: mixup, CutMix"),
        ({"views": 2, "num_aug_repeats": 2}, "views: .*repeated augmentation"),
        ({"views": 2, "on_corrupt": "replace"}, "views: .*on_corrupt replace do not go"),
        ({"views": 0}, "views 0: must be their number, 1 to 1000, or a list with a View for each"),
        ({"views": []}, r"views \[\]: must be their number, 1 to 1000, or a list"),
        ({"views": 2.5}, "views 2.5: must be their number"),
        ({"views": {"scale": (0.4, 1)}}, "views {'scale': .*}: must be their number"),
        ({"views": "ab"}, "views 'ab': must be their number"),
        ({"views": [2]}, r"views \[2\]: must be their number"),
        ({"cutmix_minmax": (0.5, 0.51), "mix_group": 4}, r"cutmix_minmax \[0.5, 0.51\] is no whole pixel of .* 24"),
        ({"device": "gpu"}, "device 'gpu': Expected one of cpu, cuda"),
        ({"device": "cuda:99"}, "device 'cuda:99': "),
        ({"rank": "0", "world": "2"}, "rank '0': Input should be a valid integer"),
        ({"views": [{}, {"imagesize": 9}]}, r"views\[1\]: no argument 'imagesize'; did you mean image_size\?"),
        ({"views": [{"scale": (0.4, 2)}]}, r"views\[0\]: scale \[0.4, 2.0\] must rise"),
        ({"views": [{"ratio": 2}]}, r"views\[0\]: ratio 2: Input should be a valid tuple"),
        ({"views": [{"hflip": 1.0}], "split": "val"}, "views 1: an evaluation has one view of each image"),
        ({"views": 2, "split": "val"}, "an evaluation has one view of each image"),
        ({"rank": 2, "world": 2}, "rank 2, world 2: ranks are numbered from 0"),
        ({"rank": 1}, "rank 1, world None: give both, or neither"),
        ({"num_classes": 1}, "num_classes 1: .* has 2 classes, of which labels go up to 1"),
        ({"num_workers": -1}, "num_workers -1: Input should be greater than or equal to 0"),
        ({"auto_augment": "rnd-m9"}, "auto_augment 'rnd-m9': .*rand"),
        ({"mean": 0.5}, "mean 0.5: Input should be an* instance of Sequence"),
        ({"mean": (0.5, 0.5)}, r"mean \(0.5, 0.5\): is too short"),
        ({"scale": 0.5}, "scale 0.5: Input should be an* instance of Sequence"),
        ({"img_dtype": torch.float64}, "img_dtype torch.float64: must be one of torch.float32"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(images: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(widemix.InputError, match=message):
        loader(images, **keys)


def test_a_state_of_another_batch_is_refused(images: Path) -> None:
    with pytest.raises(ValueError, match="saved with global_batch 8, here it is 16: batch_size 8 x 2"):
        loader(images, rank=0, world=2).load_state_dict(loader(images).state_dict())
    state = loader(images).state_dict()
    for name, value in (("seed", 8), ("samples", 54)):
        with pytest.raises(ValueError, match=f"saved with {name} {value}, here it is {state[name]}$"):
            loader(images).load_state_dict(state | {name: value})
    with pytest.raises(
        widemix.InputError, match="the loader's state lacks step, seed, samples; give what state_dict"
    ):
        loader(images).load_state_dict({"epoch": 1, "global_batch": 8})


@pytest.mark.parametrize("kind", [np.int64, np.int32])
def test_numbers_of_numpy_are_numbers(images: Path, kind: type) -> None:
    expected = list(loader(images, views=2, color_jitter=0.5))
    assert same(list(loader(images, kind(8), views=kind(2), color_jitter=np.float32(0.5))), expected)


def test_a_position_is_loaded_up_to_the_end_of_its_epoch(images: Path) -> None:
    """Of 53 samples there are 6 whole batches of 8, and 7 with the last one, of a loader that keeps it."""
    state = loader(images).state_dict()
    for drop_last, step, position in ((True, 5, (2, 5)), (True, 6, (3, 0)), (True, 7, (3, 0)), (False, 6, (2, 6))):
        one = loader(images, drop_last=drop_last)
        one.load_state_dict(state | {"epoch": 2, "step": step})
        assert (one.state_dict()["epoch"], one.state_dict()["step"]) == position
        assert len(list(one)) == len(one) - position[1]
        assert (one.state_dict()["epoch"], one.state_dict()["step"]) == (position[0], len(one))
    with pytest.raises(widemix.InputError, match="step 8: an epoch has 7 steps"):
        loader(images).load_state_dict(state | {"step": 8})


def test_setting_another_epoch_forgets_the_step_that_was_loaded(images: Path) -> None:
    one, other = loader(images), loader(images)
    one.load_state_dict(one.state_dict() | {"epoch": 2, "step": 4})
    one.set_epoch(3)
    other.set_epoch(3)
    expected = list(other)
    assert same(list(one), expected)
    one.load_state_dict(one.state_dict() | {"epoch": 4, "step": 4})
    one.set_epoch(3)  # an earlier one
    assert same(list(one), expected)
    one.set_epoch(3)  # once more, after it was iterated over
    assert same(list(one), expected)


def test_a_batch_may_be_the_whole_split(images: Path) -> None:
    assert [len(y) for _, y in loader(images, 53)] == [53]
    with pytest.raises(widemix.InputError, match=r"batch_size 27 x 2 ranks exceeds the 53 samples"):
        loader(images, 27, rank=0, world=2)
    assert [len(y) for _, y in loader(images, 54, drop_last=False)] == [53]
    with pytest.raises(widemix.InputError, match="mix_group 4 does not divide batch_size 9; take an even batch_size"):
        loader(images, 9, cutmix=1.0, mix_group=4)


@pytest.mark.parametrize(
    ("given", "strengths"),
    [
        (None, (0, 0, 0, 0)),
        (0.4, (0.4, 0.4, 0.4, 0)),
        ((0.4,), (0.4, 0, 0, 0)),
        ((0.1, 0.2), (0.1, 0.2, 0, 0)),
        ([0.1, 0.2, 0.3], (0.1, 0.2, 0.3, 0)),
        (np.array([0.1, 0.2, 0.3, 0.4]), (0.1, 0.2, 0.3, 0.4)),
    ],
    ids=str,
)
def test_strengths_of_jitter_are_those_of_brightness_contrast_saturation_and_hue(given: Any, strengths: Any) -> None:
    assert jitter_strengths(given) == strengths


def test_ranks_are_those_that_are_given_or_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    found = process_topology(None, None, "cpu")
    assert (found.rank, found.world, found.local_rank, found.local_world) == (3, 8, 1, 2)
    assert found.device == torch.device("cpu")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    found = process_topology(None, None, "meta")
    assert (found.rank, found.world, found.device) == (2, 4, torch.device("meta"))
    given = process_topology(0, 5, None)
    assert (given.rank, given.world, given.local_rank) == (0, 5, 1)
    for rank, world in ((1, None), (None, 2), (5, 5)):
        with pytest.raises(widemix.InputError, match=f"^rank {rank}, world {world}: "):
            process_topology(rank, world, None)


def test_an_image_has_up_to_a_thousand_views() -> None:
    assert expand_views(1000) == 1000 * [{}]
    assert expand_views([{}] * 1000) == 1000 * [{}]
    assert expand_views(({"hflip": 1.0}, {})) == [{"hflip": 1.0}, {}]
    for wrong in (1001, [{}] * 1001):
        with pytest.raises(widemix.InputError, match="1 to 1000"):
            expand_views(wrong)


def test_a_view_changes_what_it_says_and_nothing_else() -> None:
    data = DataSection(path="a", image_size=30, interpolation="bicubic", crop_pct=0.5, workers=3)
    augment = AugmentSection(hflip=0.25, color_jitter=(0.1, 0.2, 0.3, 0.4), re_prob=0.5, scale=(0.3, 0.4))
    assert view_sections(0, {}, data, augment) == (data, augment)
    view = widemix.View(color_jitter=0.4, ratio=np.array([0.5, 2.0]), image_size=9, re_mode="const")
    size, other = view_sections(0, view, data, augment)
    assert size == data.model_copy(update={"image_size": 9})
    changed = {"color_jitter": (0.4, 0.4, 0.4, 0.0), "ratio": (0.5, 2.0), "re_mode": "const"}
    assert other == augment.model_copy(update=changed)
    size, other = view_sections(0, widemix.View(interpolation="random", color_jitter=None), data, augment)
    assert size == data.model_copy(update={"interpolation": "random"})
    assert other == augment.model_copy(update={"color_jitter": (0.0,) * 4})
    with pytest.raises(widemix.InputError, match=r"^views\[3\]: hflip 2"):
        view_sections(3, {"hflip": 2}, data, augment)
    for name in ("crop_pct", "mixup", "smoothing", "num_aug_repeats"):  # of all views
        with pytest.raises(widemix.InputError, match=rf"^views\[0\]: no argument '{name}'"):
            view_sections(0, {name: 0.5}, data, augment)  # type: ignore[misc]


def test_no_jitter_is_none_as_in_timm(images: Path) -> None:
    assert same(list(loader(images, color_jitter=None)), list(loader(images)))

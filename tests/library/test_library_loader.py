"""`widemix.Loader`: the trainer's batches, in anybody's loop, resumed at any step on any number of ranks."""

import functools
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch.utils.data import DataLoader

import widemix
from tests.data.loading import damage, place, read, section, train_loader
from tests.library.spied import same
from tests.sections import train_section
from widemix.api.loader_arguments import jitter_strengths, process_topology, view_sections
from widemix.data.batches import StepPart
from widemix.data.loader import EvalLoader
from widemix.data.order import RandomOrder
from widemix.errors import InputError
from widemix.formats.beton import open_beton
from widemix.formats.manifest import manifest_json, read_manifest
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection

POLICY: dict[str, Any] = {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.25, "smoothing": 0.1}
MIXED: dict[str, Any] = POLICY | {"color_jitter": (0.4, 0.4, 0.4, 0.1), "mixup": 0.8, "cutmix": 1.0, "mix_group": 2}
Step = tuple[torch.Tensor, torch.Tensor]


def loader(folder: Path, batch_size: int = 8, *, split: str = "train", **keys: Any) -> widemix.Loader:
    return widemix.Loader(folder, split, batch_size, 24, **{"seed": 7, "device": "cpu", "num_workers": 1, **keys})


def ranks_of(folder: Path, batch_size: int, world: int, **keys: Any) -> list[widemix.Loader]:
    return [loader(folder, batch_size // world, rank=rank, world=world, **keys) for rank in range(world)]


def joined(loaders: list[widemix.Loader], steps: int | None = None) -> list[Step]:
    """The batches of all ranks put together."""
    ranks = zip(*(islice(each, steps) for each in loaders), strict=True)
    return [(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])) for batches in ranks]


def labels_of(folder: Path) -> torch.Tensor:
    return torch.from_numpy(open_beton(folder / "train.beton").label.astype(np.int64))


@functools.cache
def of_trainer(folder: Path, mode: str, epoch: int) -> list[Step]:
    """The batches of 12 of an epoch, or of an evaluation, by the trainer's own loaders."""
    if mode == "evaluation":
        batches = read(EvalLoader(section(folder), 12, place()))
    else:
        keys = MIXED if mode == "training" else POLICY
        train = train_section(12, seed=7)
        batches = read(
            train_loader(section(folder), AugmentSection(**keys), train=train, drop_last=mode == "training"), epoch
        )
    return [(batch.inputs, batch.targets) for batch in batches]


class Positions(RuleBasedStateMachine):
    """Loaders that are iterated over, left, saved and loaded, against positions kept as plain pairs of numbers."""

    images: Path

    @initialize(mode=st.sampled_from(["training", "every sample", "evaluation"]), world=st.sampled_from([1, 2, 3]))
    def begin(self, mode: str, world: int) -> None:
        self.mode, self.position, self.saved = mode, (0, 0), list[dict[str, int]]()
        self.next: tuple[int, int] | None = (0, 0)
        self.open(world)

    def open(self, world: int) -> None:
        keys = {"training": MIXED, "every sample": POLICY | {"drop_last": False}, "evaluation": {"split": "val"}}
        world = 1 if self.mode == "evaluation" else world
        self.ranks = ranks_of(self.images, 12, world, **keys[self.mode])

    @rule(steps=st.integers(1, 6))
    def iterate(self, steps: int) -> None:
        epoch, first = self.next or (self.position[0] + 1, 0)
        expected = of_trainer(self.images, self.mode, epoch)
        found = joined(self.ranks, steps)
        assert same(found, expected[first : first + steps])
        assert len(self.ranks[0]) == len(expected)
        self.position, self.next = (epoch, first + len(found)), None

    @rule(epoch=st.integers(0, 3))
    def set_epoch(self, epoch: int) -> None:
        for each in self.ranks:
            each.set_epoch(epoch)
        if self.next is None or self.next[0] != epoch:
            self.next = epoch, 0

    @rule()
    def save(self) -> None:
        states = [each.state_dict() for each in self.ranks]
        samples = 17 if self.mode == "evaluation" else 53
        identity = {"seed": 7, "global_batch": 12, "samples": samples}
        assert states == [{"epoch": self.position[0], "step": self.position[1]} | identity] * len(states)
        self.saved.append(states[0])

    @rule(world=st.sampled_from([1, 2, 3]), number=st.integers(0, 20), step=st.integers(0, 5))
    def load(self, world: int, number: int, step: int) -> None:
        """On another number of ranks, also what a loader that keeps the last samples has saved."""
        if not self.saved:
            return
        self.open(world)
        length, state = len(self.ranks[0]), self.saved[number % len(self.saved)]
        if number % 2:
            state = state | {"step": min(step, -(-state["samples"] // 12))}
        for each in self.ranks:
            each.load_state_dict(state)
        epoch, step = state["epoch"], state["step"]
        self.position = self.next = (epoch, step) if step < length else (epoch + 1, 0)


def test_batches_are_the_trainers_from_any_position_on(images: Path) -> None:
    machine = type("OfImages", (Positions,), {"images": images})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=9, deadline=None))


@pytest.mark.parametrize("world", [1, 3])
def test_evaluation_batches_are_the_trainers(images: Path, world: int) -> None:
    for rank in range(world):
        theirs = read(EvalLoader(section(images), 5, place(rank, world)))
        ours = loader(images, 5, split="val", rank=rank, world=world)
        assert same(list(ours), [(batch.inputs, batch.targets) for batch in theirs])
        assert len(ours) == len(theirs) == 4 // world + (world == 3)


def with_manifest(images: Path, folder: Path, **splits: Any) -> Path:
    """The images with a manifest of these splits."""
    for path in images.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "manifest.json").unlink()
    changed = read_manifest(images).model_copy(update={"splits": splits})
    (folder / "manifest.json").write_text(manifest_json(changed))
    return folder


EVALUATED = ("val", "valid", "validation", "dev", "eval", "test", "holdout")


@pytest.mark.parametrize("split", ["train", *EVALUATED, "Valid", "extra", "training"])
def test_a_split_is_trained_on_by_its_name(images: Path, tmp_path: Path, split: str) -> None:
    folder = with_manifest(images, tmp_path, **{split: read_manifest(images).splits["train"]})
    choices: dict[bool | None, bool] = {None: split == "train"}
    if split not in ("train", *EVALUATED):
        choices = {True: True, False: False}
        with pytest.raises(InputError, match=f"split '{split}': set is_training=True"):
            loader(folder, 12, split=split)
    for given, trained in choices.items():
        found = loader(folder, 12, split=split, is_training=given)
        labels = torch.cat([targets for _, targets in found]).tolist()
        assert found.is_training is trained
        assert (len(found), len(labels)) == ((4, 48) if trained else (5, 53))
        assert (labels == labels_of(images)[: len(labels)].tolist()) is not trained


def test_a_field_of_classes_may_be_named_targets(images: Path, tmp_path: Path) -> None:
    """As in a file of FFCV's, where names are free."""
    train = read_manifest(images).splits["train"]
    renamed = train.model_copy(update={"fields": train.fields | {"targets": train.fields["label"]}})
    assert same(list(loader(with_manifest(images, tmp_path, train=renamed))), list(loader(images)))


def test_labels_are_numbers_unless_they_are_mixed_or_smoothed(images: Path) -> None:
    (_, hard), (_, soft) = (next(iter(loader(images, smoothing=smoothing))) for smoothing in (0.0, 0.1))
    assert hard.dtype == torch.int64
    assert torch.equal(soft, torch.where(torch.eye(2, dtype=torch.bool)[hard], 0.95, 0.05))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_without_shuffle_samples_are_in_the_files_order(images: Path, world: int) -> None:
    ranks = ranks_of(images, 12, world, shuffle=False, drop_last=False)
    assert torch.equal(torch.cat([targets for _, targets in joined(ranks)]), labels_of(images))
    assert len(ranks[0]) == 5


# DINO's augmentation (Caron et al. 2021) in small: two global crops that differ, then local ones of another size.
JITTERED: dict[str, Any] = {"color_jitter": (0.4, 0.4, 0.2, 0.1), "color_jitter_prob": 0.8, "grayscale_prob": 0.2}
DINO = [
    widemix.View(scale=(0.4, 1), gaussian_blur_prob=1.0),
    widemix.View(image_size=12, scale=(0.05, 0.4), gaussian_blur_prob=0.5, interpolation="bicubic"),
    widemix.View(scale=(0.4, 1), solarize_prob=0.5, auto_augment="rand-m9-inc1", re_prob=0.5, interpolation="random"),
    widemix.View(image_size=12, scale=(0.05, 0.4), gaussian_blur_prob=0.5, interpolation="bicubic"),
]


@pytest.mark.parametrize("world", [1, 2])
def test_every_view_is_what_a_loader_of_that_view_makes(images: Path, world: int) -> None:
    ranks = ranks_of(images, 8, world, views=DINO, **JITTERED)
    for epoch in range(2):
        seen = list(zip(*ranks, strict=True))
        for step in (0, 3):
            samples = RandomOrder(53, 8, 7).step(epoch, step)
            large, small = (torch.cat([batch[size] for batch, _ in seen[step]]) for size in range(2))
            assert (large.shape, small.shape) == ((8, 2, 3, 24, 24), (8, 2, 3, 12, 12))
            for number, batch in enumerate((large[:, 0], small[:, 0], large[:, 1], small[:, 1])):
                sections = view_sections(number, DINO[number], section(images), AugmentSection(**JITTERED))
                source, ids = train_loader(*sections).source, samples + 53 * number
                expected = source.to_device(source.read(StepPart(ids, epoch)))
                assert torch.equal(batch, expected), number
            assert torch.equal(torch.cat([labels for _, labels in seen[step]]), labels_of(images)[samples])
    assert seen[0][0][0][0][:, 0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("world", [1, 2])
def test_a_number_of_views_repeats_the_loaders_own(images: Path, world: int) -> None:
    """The first is the image that there is without views; the others have crops and policies of their own."""
    plain, viewed = list(loader(images, **POLICY)), joined(ranks_of(images, 8, world, views=3, **POLICY))
    assert viewed[0][0].shape == (8, 3, 3, 24, 24)
    assert same([(batch[:, 0], labels) for batch, labels in viewed], plain)
    assert not any(torch.equal(batch[:, 1], batch[:, other]) for batch, _ in viewed for other in (0, 2))
    assert same(list(loader(images, views=3 * [widemix.View()], num_aug_repeats=1, **POLICY)), viewed)


@pytest.mark.parametrize("views", [1, 2])
def test_a_rank_without_a_sample_has_an_empty_batch(images: Path, views: int) -> None:
    """Of the 5 samples that are left for the last step 12 ranks have one or none."""
    keys: dict[str, Any] = POLICY | {"color_jitter": 0.4, "views": views, "drop_last": False}
    assert same(joined(ranks_of(images, 12, 12, **keys)), list(loader(images, 12, **keys)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_images_are_rounded_to_the_type_asked_for(images: Path, dtype: torch.dtype) -> None:
    for keys in ({"views": DINO}, {"split": "val"}):
        exact, rounded = (next(iter(loader(images, img_dtype=kind, **keys)))[0] for kind in (torch.float32, dtype))
        for one, other in zip(exact, rounded, strict=True):
            assert other.dtype == dtype
            assert torch.equal(one.to(dtype), other)


def test_a_damaged_image_of_views_is_named(images: Path, tmp_path: Path) -> None:
    for path in images.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage(tmp_path, 17)
    with pytest.raises(widemix.InputError, match="sample 17"):
        list(loader(tmp_path, views=DINO))


def test_drop_last_in_evaluation(images: Path) -> None:
    assert [len(y) for _, y in loader(images, 5, split="val", drop_last=True)] == [5, 5, 5]


def test_torchs_dataloader_passes_the_batches_on(images: Path) -> None:
    assert same([tuple(batch) for batch in DataLoader(loader(images), batch_size=None)], list(loader(images)))
    with pytest.raises(ValueError, match="give DataLoader num_workers=0"):
        next(iter(DataLoader(loader(images), batch_size=None, num_workers=1)))


def test_a_batch_may_be_the_whole_split(images: Path) -> None:
    assert [len(y) for _, y in loader(images, 53)] == [53]
    assert [len(y) for _, y in loader(images, 54, drop_last=False)] == [53]


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
def test_strengths_of_jitter_are_four(given: Any, strengths: Any) -> None:
    assert jitter_strengths(given) == strengths


def test_ranks_are_those_that_are_given_or_the_launchers(monkeypatch: pytest.MonkeyPatch, system) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    found = process_topology(None, None, "cpu")
    assert (found.rank, found.world, found.local_rank, found.local_world) == (3, 8, 1, 2)
    assert found.device == torch.device("cpu")
    answers = {"is_initialized": True, "get_rank": 2, "get_world_size": 4}
    system({f"torch.distributed.{name}": lambda answer=answer: answer for name, answer in answers.items()})
    found = process_topology(None, None, "meta")
    assert (found.rank, found.world, found.device) == (2, 4, torch.device("meta"))
    given = process_topology(0, 5, None)
    assert (given.rank, given.world, given.local_rank) == (0, 5, 1)
    for rank, world in ((1, None), (None, 2), (5, 5)):
        with pytest.raises(widemix.InputError, match=f"^rank {rank}, world {world}: "):
            process_topology(rank, world, None)


@pytest.mark.parametrize(
    ("view", "of_data", "of_augment"),
    [
        ({}, {}, {}),
        (
            {"color_jitter": 0.4, "ratio": np.array([0.5, 2.0]), "image_size": 9, "re_mode": "const"},
            {"image_size": 9},
            {"color_jitter": (0.4, 0.4, 0.4, 0.0), "ratio": (0.5, 2.0), "re_mode": "const"},
        ),
        (
            {"interpolation": "random", "color_jitter": None},
            {"interpolation": "random"},
            {"color_jitter": (0.0,) * 4},
        ),
    ],
)
def test_a_view_changes_what_it_says_and_nothing_else(view: Any, of_data: dict, of_augment: dict) -> None:
    data = DataSection(path="a", image_size=30, interpolation="bicubic", crop_pct=0.5, workers=3)
    augment = AugmentSection(hflip=0.25, color_jitter=(0.1, 0.2, 0.3, 0.4), re_prob=0.5, scale=(0.3, 0.4))
    expected = data.model_copy(update=of_data), augment.model_copy(update=of_augment)
    assert view_sections(0, view, data, augment) == expected
    with pytest.raises(widemix.InputError, match=r"^views\[3\]: hflip 2"):
        view_sections(3, {"hflip": 2}, data, augment)
    for name in ("crop_pct", "mixup", "smoothing", "num_aug_repeats"):  # of all views
        with pytest.raises(widemix.InputError, match=rf"^views\[0\]: no argument '{name}'"):
            view_sections(0, {name: 0.5}, data, augment)  # type: ignore[misc]

"""data.sampling: classes as often as their weights say, in both orders, on any ranks, after any restart."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import WeightedRandomSampler

import widemix
from tests.data.plain_batches import permuted, stream_of
from tests.sections import train_section
from tests.unequal import prepare_unequal
from widemix.data.loader import TrainLoader
from widemix.data.order import CYCLE, SampledOrder, Weighted, steps_per_epoch
from widemix.data.paged import PagedOrder
from widemix.distributed.topology import Topology
from widemix.recipe import load_recipe
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection

COUNTS = {"ant": 24, "bee": 16, "cow": 12, "dog": 6, "emu": 2}
# What a sample of a class is worth beside one of another, by the samples of both.
RULES = {
    "balanced": lambda count, name: 1 / count,
    "sqrt": lambda count, name: count**-0.5,
    "{emu: 5, ant: 0.5}": lambda count, name: {"emu": 5, "ant": 0.5}.get(name, 1),
    "{bee: 0}": lambda count, name: name != "bee",
}
ORDERS = ["random", "paged"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare_unequal(tmp_path_factory.mktemp("unequal"), {"train": COUNTS}, side=16)


def loader(folder, sampling, rank=0, world=1, batch=12, order="random", repeats=0, **keys) -> TrainLoader:
    recipe = load_recipe("base/own_images", [("data.sampling", sampling)])
    data = DataSection(
        path=str(folder), num_classes=5, image_size=8, workers=1, sampling=recipe.data.sampling, order=order, **keys
    )
    augment = AugmentSection(scale=(0.5, 1.0), aug_repeats=repeats)
    return TrainLoader(data, augment, train_section(batch, seed=7), Topology(rank, world, 0, 1, torch.device("cpu")))


def library(folder, batch=12, **keys) -> widemix.Loader:
    return widemix.Loader(folder, "train", batch, 8, scale=(0.5, 1), seed=7, device="cpu", num_workers=1, **keys)


def epoch(loader, number, first=0):
    """Images and samples of each step."""
    with loader.batches(number, first) as batches:
        return [(batch.inputs, batch.samples) for batch in batches]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rule", RULES)
def test_classes_are_as_often_as_torchs_weighted_sampler_has_them(folder, rule, order):
    """And, what torch's are by chance only, after a cycle of epochs exactly as often."""
    own = loader(folder, rule, order=order)
    label = own.source.file.label
    worth = [RULES[rule](count, name) for name, count in COUNTS.items()]
    torch.manual_seed(0)
    drawn = [*WeightedRandomSampler(torch.tensor(worth, dtype=torch.float64)[torch.from_numpy(label).long()], 60_000)]
    expected = np.bincount(label[drawn], minlength=5) / 60_000
    ids = np.concatenate([own.order.step(epoch, step) for epoch in range(CYCLE) for step in range(own.steps)])
    found = np.bincount(label[ids % 60], minlength=5) / len(ids)
    assert np.abs(found - expected).max() < 4 * (0.25 / 60_000) ** 0.5
    exact = np.array(worth) * [*COUNTS.values()]
    assert found == pytest.approx(exact / exact.sum(), abs=1 / len(ids))


def order_of(kind, label, weight, batch, seed, repeats, window=2000):
    weighted = Weighted(label, weight)
    if kind == "random":
        steps = steps_per_epoch(len(label), batch)
        return SampledOrder(weighted, batch, seed, repeats, steps * batch)
    place = np.random.RandomState(len(label)).permutation(len(label))
    return PagedOrder(100 + 50 * place, np.full(len(label), 50), batch, seed, window, repeats, 500, weighted)


@pytest.mark.parametrize("kind", ORDERS)
@settings(max_examples=60)
@given(
    counts=st.lists(st.integers(1, 60), min_size=2, max_size=9),
    batch=st.integers(1, 40),
    seed=st.integers(0, 2**63 - 1),
    first=st.sampled_from([0, 1, 63, 64, 1000]),
    power=st.sampled_from([0, 0.5, 1, 1.5]),
)
def test_an_epoch_goes_on_with_each_class_where_the_one_before_has_ended(kind, counts, batch, seed, first, power):
    """Of a class no sample is met again before all others have been; in one epoch it is another view then."""
    label = np.random.RandomState(seed % 2**32).permutation(np.repeat(np.arange(len(counts)), counts))
    weight, n = np.array(counts, float) ** -power, len(label)
    if n < batch:
        batch = n
    order, steps = order_of(kind, label, weight, batch, seed, 1), steps_per_epoch(n, batch)
    exact = weight * counts / (weight * counts).sum() * steps * batch
    met, taken = np.zeros(n, int), np.zeros(len(counts), int)
    for number in range(first, first + 5):
        ids = np.concatenate([order.step(number, step) for step in range(steps)])
        assert len(np.unique(ids)) == len(ids)
        met += np.bincount(ids % n, minlength=n)
        taken += np.bincount(label[ids % n], minlength=len(counts))
    assert np.abs(taken - 5 * exact).max() < 3  # classes begin and end at places that are rounded
    for own in (met[label == k] for k in range(len(counts))):
        assert own.max() - own.min() <= (1 if first == 0 else 2)


@pytest.mark.parametrize("kind", ORDERS)
def test_with_repeats_a_sample_has_all_its_views(kind):
    label = np.repeat([0, 1], [50, 10])
    order = order_of(kind, label, np.array([1 / 50, 1 / 10]), 24, 3, repeats=2)
    for number in range(3):
        ids = np.concatenate([order.step(number, step) for step in range(2)])
        assert len(np.unique(ids)) == len(ids) == 48
        assert np.bincount(label[ids % 60]).tolist() == [24, 24]
        pairs = np.unique(ids // 120 * 60 + ids % 60, return_counts=True)[1]  # of one time that a sample is sampled
        assert (pairs == 2).all()


def test_a_sample_that_an_epoch_has_several_times_is_augmented_anew(folder):
    steps = epoch(loader(folder, "{emu: 1e6}"), 0)
    images, samples = torch.cat([x for x, _ in steps]), np.concatenate([s for _, s in steps])
    assert len(np.unique(samples)) == 2
    assert np.bincount(samples)[np.unique(samples)].tolist() == [30, 30]
    assert len(torch.unique(images.flatten(1), dim=0)) > 50


def test_without_drop_last_equal_weights_have_each_sample_once(folder):
    """The last step of an epoch has what is left, and the next epoch goes on after it."""
    for number, loaded in enumerate(2 * [library(folder, 7, sampling={"ant": 1}, drop_last=False)]):
        loaded.set_epoch(number)
        labels = torch.cat([labels for _, labels in loaded])
        assert torch.bincount(labels).tolist() == [*COUNTS.values()]


def test_the_paged_order_requests_what_it_will_read():
    counts = [300, 30, 3]
    label, n = np.repeat([0, 1, 2], counts), 333
    order = order_of("paged", label, 1 / np.array(counts), 9, 1, 1)
    offset = 100 + 50 * np.random.RandomState(n).permutation(n)
    for number in range(2):
        requested = np.zeros(100 + 50 * n, bool)
        for step in range(37):
            ranges = order.prefetch_ranges(number, step, step == 0, [slice(0, 9)])
            for start, stop in ranges.tolist():
                requested[start:stop] = True
            for start in offset[order.step(number, step) % n].tolist():
                assert requested[start : start + 50].all()
        assert requested.sum() < 50 * 175  # of the large class those 111 alone that the epoch has, and their pages


def plain_epoch(label, weight, length, seed, number):
    """View ids of an epoch, one class after the other, by what the module's text says: all epochs before it, too."""
    classes = [np.flatnonzero(label == k).tolist() for k in range(len(weight))]
    whole = sum(Fraction(w) * len(own) for w, own in zip(weight, classes, strict=True))
    taken = [0] * len(weight)
    for epoch in range(number + 1):
        found, begin, part = [], 0, Fraction(0)
        for k, own in enumerate(classes):
            part += Fraction(weight[k]) * len(own)
            end = (int(64 * length * part / whole + Fraction(1, 1000)) + 39 * epoch % 64) // 64
            for place in range(taken[k], taken[k] + end - begin):
                times, at = divmod(place, len(own))
                sample = own[permuted(at, len(own), stream_of(seed, times, k, 13))]
                found.append(sample + len(label) * (times - taken[k] // len(own)))
            taken[k], begin = taken[k] + end - begin, end
    return found


@pytest.mark.parametrize("number", [0, 1, 5, 63, 64, 70])
def test_an_epoch_is_the_one_that_is_documented(number):
    label, weight = np.array([2, 0, 1, 0, 1, 0, 0, 0, 2, 0, 0]), [1 / 8, 1 / 2, 1.0]
    expected = plain_epoch(label, weight, 10, 5, number)
    random, paged = (order_of(kind, label, np.array(weight), 5, 5, 1) for kind in ORDERS)
    slots = [permuted(at, 10, stream_of(5, number, 11, 0)) for at in range(10)]
    assert [*random.step(number, 0), *random.step(number, 1)] == [expected[slot] for slot in slots]
    assert np.bincount(label[[*paged.step(number, 0), *paged.step(number, 1)] % np.int64(11)]).tolist() == [
        (label[np.array(expected) % 11] == k).sum() for k in range(3)
    ]


def test_the_paged_order_is_the_one_it_always_was():
    """A change here would change every run of every user: it needs a reason and a new major version."""
    label, weight = np.array([0, 0, 0, 0, 0, 1, 1, 2]), np.array([1 / 5, 1 / 2, 1.0])
    order = order_of("paged", label, weight, 4, 0, 1)
    assert [order.step(epoch, 1).tolist() for epoch in (0, 70)] == [[5, 2, 15, 6], [2, 15, 3, 13]]

"""Parts of train: nested, stratified, apart from what is held out."""

import shlex
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from widemix.cli.parser import make_parser
from widemix.command_line.commands import run_command
from widemix.data_prep import image_folder
from widemix.data_prep.prepare import prepare, select
from widemix.data_prep.samples import Dataset, ImageFiles
from widemix.data_prep.settings import PrepSettings, parse_fraction
from widemix.data_prep.shuffle import shuffle_train
from widemix.data_prep.subset import stratified_order, take_subset
from widemix.data_prep.verify import repair_command
from widemix.errors import InputError
from widemix.formats.beton import open_beton
from widemix.formats.manifest import read_manifest

pytestmark = pytest.mark.usefixtures("small_pages")


def dataset(sizes):
    """A dataset of as many samples a class as are asked for."""
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    names = [f"train/{label}/{i}" for i, label in enumerate(labels)]
    classes = tuple(str(label) for label in range(len(sizes)))
    return Dataset(classes, {"train": ImageFiles("", names, labels), "val": ImageFiles("", ["v"], [0])})


def names(cut, split="train"):
    return [sample.name for sample in cut.splits[split]]


sizes = st.lists(st.integers(1, 40), min_size=1, max_size=6)
fractions = st.floats(0.05, 1)


@given(sizes, fractions, fractions, st.floats(0, 0.5), st.integers(0, 3))
def test_fractions_are_nested_stratified_and_apart_from_the_holdout(sizes, one, other, holdout, seed):
    whole = dataset(sizes)
    settings = [PrepSettings(fraction=share, holdout=holdout, seed=seed) for share in sorted((one, other))]
    assume(not holdout or round(holdout * sum(sizes)))
    assume(round(settings[0].fraction * (sum(sizes) - round(holdout * sum(sizes)))))
    cuts = [take_subset(whole, setting) for setting in settings]
    small, large = (names(cut) for cut in cuts)
    assert set(small) <= set(large)
    assert small == [name for name in names(whole) if name in set(small)]  # in the source's order
    held = names(cuts[0], "holdout") if "holdout" in cuts[0].splits else []
    assert len(held) == round(holdout * sum(sizes))
    assert [len(small), len(large)] == [round(share * (sum(sizes) - len(held))) for share in sorted((one, other))]
    assert not set(held) & set(large)
    for part in (small, large, held):
        got = [sum(name.startswith(f"train/{label}/") for name in part) for label in range(len(sizes))]
        least = max((count - 1) / size for count, size in zip(got, sizes, strict=True))
        most = min((count + 1) / size for count, size in zip(got, sizes, strict=True))
        assert least <= most  # one fraction of every class, to within a sample
    assert cuts[0].splits["val"] is whole.splits["val"]


def test_another_seed_takes_others():
    one, other = (names(take_subset(dataset([500]), PrepSettings(fraction=0.1, seed=seed))) for seed in (0, 1))
    assert len(set(one) & set(other)) < 20


def test_a_new_file_hardly_disturbs_the_choice():
    before = names(take_subset(dataset([500]), PrepSettings(fraction=0.2)))
    after = names(take_subset(dataset([501]), PrepSettings(fraction=0.2)))
    assert len(set(before) & set(after)) >= 99


def test_choice_and_order_of_a_seed_are_always_the_same():
    """Whatever the versions of libraries: a folder that is prepared again, or extended, is the same."""
    whole = dataset([5, 3])
    shuffled = names(shuffle_train(whole, PrepSettings(shuffle=True, seed=3)))
    assert shuffled == [f"train/{n}" for n in ("1/6", "1/7", "0/0", "0/1", "0/3", "0/4", "1/5", "0/2")]
    most = take_subset(whole, PrepSettings(fraction=0.7, holdout=0.25, seed=3))
    assert names(most) == ["train/0/0", "train/0/2", "train/0/3", "train/1/5"]
    assert names(most, "holdout") == ["train/0/1", "train/1/7"]
    assert names(take_subset(whole, PrepSettings(per_class=1, seed=3))) == ["train/0/2", "train/1/5"]


def test_what_is_not_listed_class_by_class_is_not_shuffled():
    """One class, numbers to predict, sentence pairs, and a source without train."""
    settings = PrepSettings(shuffle=True)
    numbers = Dataset(("age",), {"train": ImageFiles("", ["a", "b"], [-1, -1])}, targets=True)
    for whole in (dataset([4]), numbers, replace(dataset([4, 4]), text=True)):
        assert shuffle_train(whole, settings) is whole
    assert names(select(dataset([4, 4]), PrepSettings(shuffle=True, splits="val")), "val") == ["v"]
    assert list(select(dataset([4, 4]), PrepSettings(splits="val,train")).splits) == ["train", "val"]
    swapped = Dataset(("a", "b"), {"train": ImageFiles("", ["x", "y"], [1, 0])})
    assert shuffle_train(swapped, settings) is swapped


def test_names_of_any_bytes_are_chosen_too():
    samples = ImageFiles("", [f"a\udcff/{i}" for i in range(8)], [0] * 4 + [1] * 4)
    settings = PrepSettings(fraction=0.5, holdout=0.25, shuffle=True)
    chosen = select(Dataset(("a", "b"), {"train": samples}), settings)
    assert [len(names(chosen, split)) for split in ("train", "holdout")] == [3, 2]


def test_each_head_of_the_order_has_all_classes():
    for sizes, labels in (([1, 3], [1, 0, 1, 1]), ([3, 1], [0, 0, 1, 0]), ([2, 4], [1, 0, 1, 1, 0, 1])):
        train = dataset(sizes).splits["train"]
        assert [train[index].label for index in stratified_order(train, 0)] == labels


def test_the_holdout_has_the_sources_order():
    settings = PrepSettings(holdout=0.5, shuffle=True)
    chosen = select(dataset([20, 20]), settings)
    listed = names(dataset([20, 20]))
    assert names(chosen, "holdout") == [name for name in listed if name in set(names(chosen, "holdout"))]
    assert names(chosen) != [name for name in listed if name in set(names(chosen))]
    checked = replace(dataset([20]), check_files=lambda: ({"file": "x", "rule": "y"},))
    assert select(checked, settings).check_files() != ()
    assert select(checked, PrepSettings(splits="train", part="1/2")).check_files() == ()


def test_per_class_is_nested_and_exact():
    whole = dataset([20, 30, 9])
    five, nine = (take_subset(whole, PrepSettings(per_class=count)) for count in (5, 9))
    assert set(names(five)) <= set(names(nine))
    assert np.bincount([sample.label for sample in nine.splits["train"]]).tolist() == [9, 9, 9]
    numbers = Dataset(("age",), {"train": ImageFiles("", list("abcd"), [-1] * 4)}, targets=True)
    with pytest.raises(InputError, match="per_class 1: the samples have targets and no classes; take a fraction"):
        take_subset(numbers, PrepSettings(per_class=1))
    assert len(names(take_subset(numbers, PrepSettings(fraction=0.5, holdout=0.25)))) == 2
    with pytest.raises(InputError, match="per_class 10: class 2 has 9 samples"):
        take_subset(whole, PrepSettings(per_class=10))
    with pytest.raises(InputError, match="per_class 3: class 1 has 0 samples"):  # the only one is held out
        take_subset(dataset([20, 1]), PrepSettings(per_class=3, holdout=0.6))


def test_a_holdout_does_not_replace_that_of_the_source():
    splits = dataset([20]).splits
    own = Dataset(("0",), {"train": splits["train"], "holdout": splits["val"]})
    with pytest.raises(InputError, match=r"holdout 0\.5: the source has a split holdout already; leave it out"):
        take_subset(own, PrepSettings(holdout=0.5))
    assert names(take_subset(own, PrepSettings(fraction=0.5)), "holdout") == ["v"]


def test_a_source_without_train_cannot_be_cut():
    with pytest.raises(InputError, match="the source has none"):
        take_subset(Dataset(("a",), {"val": ImageFiles("", ["v"], [0])}), PrepSettings(fraction=0.5))


def test_whole_preparation(tmp_path):
    manifest = prepare("digits", None, tmp_path / "out", PrepSettings(per_class=10, holdout=0.1))
    assert {name: split.samples for name, split in manifest.splits.items()} == {
        "train": 100,
        "test": 360,
        "holdout": 144,
    }
    assert np.bincount(open_beton(tmp_path / "out" / "train.beton").label).tolist() == [10] * 10
    with pytest.raises(InputError, match="per_class 10, not 0"):
        prepare("digits", None, tmp_path / "out", PrepSettings(holdout=0.1))


def test_fractions():
    assert parse_fraction("1%") == parse_fraction("0.01") == 0.01
    assert parse_fraction("100%") == 1
    for wrong in ("", "%", "one"):
        with pytest.raises(InputError, match="not a fraction"):
            parse_fraction(wrong)


def test_a_part_that_is_none_is_refused():
    for settings, words in (
        (PrepSettings(fraction=0.01), "fraction 0.01 and holdout 0.0 leave none of 10"),
        (PrepSettings(holdout=0.99), "fraction 1.0 and holdout 0.99 leave none of 10"),
        (PrepSettings(holdout=0.01), "holdout 0.01 of 10 training samples is less than one"),
    ):
        with pytest.raises(InputError, match=words):
            take_subset(dataset([10]), settings)


def test_train_is_stored_shuffled(tmp_path, folder):
    """The same samples and pixels in an order of their own for each seed; val, or a mixed listing, stays as it is."""
    listed = {
        seed: names(select(image_folder.read(folder), PrepSettings(seed=seed, shuffle=True))) for seed in (0, 1)
    }
    plain = names(select(image_folder.read(folder), PrepSettings(shuffle=False)))
    assert plain == sorted(plain)
    assert [sorted(found) == plain for found in listed.values()] == [True, True]
    assert len({*map(tuple, listed.values()), tuple(plain)}) == 3
    for chosen in (True, False):
        manifest = prepare("image-folder", folder, tmp_path / str(chosen), PrepSettings(shuffle=chosen), processes=1)
        assert manifest.settings["shuffle"] is chosen
    shuffled, sorted_ = (open_beton(tmp_path / name / "train.beton") for name in ("True", "False"))
    for sample, name in enumerate(listed[0]):
        assert content(shuffled, sample) == content(sorted_, plain.index(name))
    assert np.array_equal(open_beton(tmp_path / "True" / "val.beton").label, [0, 0, 1, 1, 2, 2])
    mixed = Dataset(("a", "b"), {"train": ImageFiles("", ["x", "y", "z"], [0, 1, 0])})
    alone = Dataset(("a", "b"), {"train": ImageFiles("", ["x", "y", "z"], [1, 1, 1])})
    for kept in (mixed, alone):
        assert shuffle_train(kept, PrepSettings(shuffle=True)) is kept


def test_a_chosen_set_of_splits(tmp_path, folder):
    """The chosen split has the bytes that it has next to the others; another choice is another preparation."""
    prepare("image-folder", folder, tmp_path / "all", PrepSettings(), processes=1)
    settings = PrepSettings(splits="val")
    manifest = prepare("image-folder", folder, tmp_path / "val", settings, processes=1)
    assert list(manifest.splits) == ["val"]
    assert (tmp_path / "val" / "val.beton").read_bytes() == (tmp_path / "all" / "val.beton").read_bytes()
    assert prepare("image-folder", folder, tmp_path / "val", settings) == manifest
    assert "--splits val" in repair_command(tmp_path / "val")
    with pytest.raises(InputError, match=r"was prepared with splits val, not train,val;"):
        prepare("image-folder", folder, tmp_path / "val", PrepSettings(splits="train,val"))
    with pytest.raises(InputError, match=r"splits: the source has no 'valid'; it has train, val"):
        prepare("image-folder", folder, tmp_path / "x", PrepSettings(splits="train,valid"))
    with pytest.raises(InputError, match=r"splits 'train,': names are separated by commas"):
        PrepSettings(splits="train,")


def test_the_command_shuffles_unless_told_not_to(tmp_path, folder):
    """And the command that repairs a folder keeps its order."""
    for options, chosen in (([], True), (["--no-shuffle"], False)):
        out = tmp_path / str(chosen)
        words = ["prep", "image-folder", "--from", str(folder), "--to", str(out), "--processes", "1", *options]
        assert run_command(make_parser(), argv=words) == 0
        labels = open_beton(out / "train.beton").label.tolist()
        assert read_manifest(out).settings["shuffle"] is chosen
        assert (labels == sorted(labels)) is not chosen
        assert ("--no-shuffle" in repair_command(out)) is not chosen
        before = read_manifest(out)
        words = shlex.split(repair_command(out))[1:]
        assert run_command(make_parser(), argv=words) == 0
        assert read_manifest(out) == before


def content(beton, sample):
    return beton.label[sample], beton.bytes[beton.offset[sample] :][: beton.size[sample]].tobytes()

"""Text batches: the pairs that were written, padded alike on every world size, evaluated once each."""

import copy
import gc
import json
import os
import pickle
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sections import train_section
from widemix.data.loader import EvalLoader, TrainLoader, check_model
from widemix.data.tokens import _vocabulary_size
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.formats.checksums import compute_checksums, crc32c, open_checksums
from widemix.formats.tables import ALLOCATION, FIELD, HEADER
from widemix.formats.text import SAMPLE, open_text
from widemix.models.text.section import TextMixerSection
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection, TextDataSection

SMOOTH = AugmentSection(smoothing=0.1)
BATCH = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Seventy pairs of 1 to 25 words a sentence: 53 to train on, 17 to evaluate on."""
    source, target = tmp_path_factory.mktemp("pairs"), tmp_path_factory.mktemp("prepared")
    numbers = np.random.RandomState(0)
    words = [f"w{chr(97 + i)}" for i in range(20)]
    for split, count in (("train", 53), ("dev_matched", 17)):
        rows = ["gold_label\tsentence1\tsentence2"]
        for i in range(count):
            first, second = (" ".join(numbers.choice(words, numbers.randint(1, 26))) for _ in range(2))
            rows.append(f"{('entailment', 'neutral', 'contradiction')[i % 3]}\t{first}\t{second}")
        (source / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    (source / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words]) + "\n")
    prepare("mnli", source, target, PrepSettings(length=48))
    return target


def section(folder, **changes):
    return TextDataSection(kind="text", path=str(folder), eval_split="dev_matched", num_classes=3, **changes)


def place(rank=0, world=1):
    """Each rank on a machine of its own."""
    return Topology(rank, world, 0, 1, torch.device("cpu"))


def training(folder, world=1, grad_accum_steps=1, first=0, **changes):
    """Every step of epoch 1 from `first` on: its micro-batches' ids, targets and samples, all ranks put together."""
    parts = []
    for rank in range(world):
        loader = TrainLoader(
            section(folder, **changes), SMOOTH, train_section(BATCH, grad_accum_steps, 7), place(rank, world)
        )
        with loader.batches(1, first) as batches:
            parts.append([(batch.inputs, batch.targets, torch.from_numpy(batch.samples)) for batch in batches])
    steps = []
    for step in range(len(parts[0]) // grad_accum_steps):
        numbers = range(step * grad_accum_steps, (step + 1) * grad_accum_steps)
        mine = [rank[number] for number in numbers for rank in parts]
        steps.append(tuple(torch.cat(tensors) for tensors in zip(*mine, strict=True)))
    return steps


def test_a_copy_goes_on_by_itself(folder):
    gc.collect()
    descriptors = os.listdir("/proc/self/fd")
    for way in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        first = TrainLoader(section(folder), SMOOTH, train_section(BATCH, 1, 7), place())
        other, expected = way(first), [batch.inputs for batch in first.batches(1)]
        del first
        gc.collect()
        assert all(torch.equal(a, b.inputs) for a, b in zip(expected, other.batches(1), strict=True))
        evaluated = EvalLoader(section(folder), 4, place())
        assert len(way(evaluated).source.file) == len(evaluated.source.file) == 17
    del evaluated, other
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= len(descriptors)


def test_batches_hold_the_pairs_of_the_file_as_short_as_the_longest_allows(folder):
    text = open_text(folder / "train.beton")
    widths = []
    for ids, targets, samples in training(folder):
        longest = int(text.length[samples].max())
        assert (ids.shape, ids.dtype) == ((BATCH, min(-(-longest // 8) * 8, 48)), torch.int64)
        for row, sample in zip(ids, samples.tolist(), strict=True):
            assert np.array_equal(row, text[sample][: ids.shape[1]])
            assert not text[sample][ids.shape[1] :].any()
        assert torch.equal(targets.argmax(1), torch.from_numpy(text.label[samples]))
        assert torch.allclose(targets.sum(1), torch.ones(BATCH))
        widths.append(ids.shape[1])
    assert len(widths) == 3
    assert text.length.min() < 16 < text.length.max() <= 48


@pytest.mark.parametrize(
    "way",
    [
        {"world": 2},
        {"world": 4},
        {"world": 16},
        {"grad_accum_steps": 4},
        {"world": 2, "grad_accum_steps": 2},
        {"first": 1},
    ],
    ids=str,
)
def test_pairs_and_padding_do_not_depend_on_how_they_are_loaded(folder, way):
    """torch.cat has put the ranks together: all of them padded to the same width."""
    expected = training(folder)[way.get("first", 0) :]
    for ours, theirs in zip(training(folder, **way), expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@settings(max_examples=12)
@given(world=st.integers(1, 26), grad_accum_steps=st.sampled_from([1, 2]), order=st.sampled_from(["random", "paged"]))
def test_any_number_of_ranks_takes_the_micro_batches_that_one_takes(folder, world, grad_accum_steps, order):
    """Of one pair a rank, so that there are all of them."""
    batch = world * grad_accum_steps
    taken = []
    for ranks in (1, world):
        parts = []
        for rank in range(ranks):
            loader = TrainLoader(
                section(folder, order=order, shuffle_window_mib=1),
                SMOOTH,
                train_section(batch, grad_accum_steps, 3),
                place(rank, ranks),
            )
            with loader.batches(0) as batches:
                parts.append([batch.samples for batch in batches])
        numbers = range(53 // batch * grad_accum_steps)
        taken.append(np.array([np.concatenate([rank[number] for rank in parts]) for number in numbers]))
    assert np.array_equal(*taken)
    seen = taken[0].reshape(-1)
    assert len(np.unique(seen)) == len(seen) == 53 // batch * batch


@pytest.mark.parametrize("world", [1, 2, 3, 20])
def test_evaluation_sees_every_pair_once(folder, world):
    text = open_text(folder / "dev_matched.beton")
    seen, counts = [], set()
    for rank in range(world):
        with EvalLoader(section(folder), 4, place(rank, world)).batches() as stream:
            batches = list(stream)
        counts.add(len(batches))
        for batch in batches:
            seen += batch.samples.tolist()
            longest = int(text.length[batch.samples].max(initial=1))  # of its own pairs, not of all ranks
            assert batch.inputs.shape == (len(batch), min(-(-longest // 8) * 8, 48))
            for row, sample, label in zip(batch.inputs, batch.samples, batch.targets, strict=True):
                assert np.array_equal(row[: text.length[sample]], text[sample][: text.length[sample]])
                assert label == text.label[sample]
    assert sorted(seen) == list(range(17))
    assert len(counts) == 1


def test_a_model_too_small_for_the_pairs_is_refused(folder, digits):
    loader = TrainLoader(section(folder), SMOOTH, train_section(BATCH, seed=7), place())
    fits = TextMixerSection(kind="text_mixer", vocabulary=24, tokens=48, channels=4, depth=1)
    check_model(fits, loader)
    images = EvalLoader(DataSection(path=str(digits), num_classes=10, eval_split="test"), 4, place())
    for change, words in (
        ({"tokens": 47}, r"model.tokens 47: .* up to 48 tokens; take that many, or prepare with --length 47"),
        ({"vocabulary": 23}, "model.vocabulary 23: the tokenizer.json next to .* has 24 words"),
    ):
        with pytest.raises(InputError, match=words):
            check_model(fits.model_copy(update=change), images, loader)
    loader.source.file = replace(loader.source.file, length=np.full(53, 41))  # a batch of which has 48 tokens
    with pytest.raises(InputError, match="up to 48 tokens"):
        check_model(fits.model_copy(update={"tokens": 41}), loader)


def test_a_damaged_tokenizer_and_damaged_tokens_are_named(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    text = open_text(folder / "train.beton")
    with (broken / "train.beton").open("r+b") as file:
        file.seek(int(text.offset[30]))
        file.write(b"\xff\xff\xff\x7f")
    with pytest.raises(InputError, match=r"sample 30 \(train\.tsv:32\) cannot be read: its bytes differ from its"):
        training(broken)
    with pytest.raises(InputError, match=r"sample 30 holds tokens that tokenizer\.json has no words for"):
        training(broken, checksums=False)
    (broken / "tokenizer.json").write_text(json.dumps({"model": {}}))
    with pytest.raises(InputError, match="cannot be read as the folder's tokenizer"):
        training(broken)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "{",
        "[]",
        "{}",
        '{"model": {"vocab": {}}}',
        '{"model": {"vocab": [1]}}',
        '{"model": {"vocab": {"a": "b"}}}',
    ],
)
def test_what_is_no_tokenizer_is_one_line(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    if text:
        path.write_text(text)
    with pytest.raises(InputError, match=r"tokenizer\.json: cannot be read as the folder's tokenizer .*; prepare it"):
        _vocabulary_size(path)


def test_the_vocabulary_goes_up_to_its_greatest_token(tmp_path):
    """Whatever the order, with numbers that no word has, and words in any language."""
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": {"vocab": {"é": 2, "b": 30, "c": 0}}}', encoding="utf-8")
    assert _vocabulary_size(path) == 31


@pytest.mark.parametrize(
    ("field", "value", "refused"),
    [
        ("f1", 48, False),  # tokens before the padding: as many as there are
        ("f1", 49, True),
        ("f1", 1, True),  # fewer than before the second sentence
        ("f2", 0, False),
        ("f2", "f1", False),  # of an empty second sentence
        ("f2", -1, True),
        ("f0", 0, True),  # its place
        ("ptr", 0, True),
        ("size", 47 * 4, True),
    ],
)
def test_pairs_whose_lengths_or_places_cannot_be_are_refused(folder, tmp_path, field, value, refused):
    path = Path(shutil.copy(folder / "train.beton", tmp_path))
    text, count = open_text(path), 53
    if field.startswith("f"):
        rows = np.memmap(path, SAMPLE, "r+", HEADER.itemsize + 4 * FIELD.itemsize, count)
    else:
        rows = np.memmap(path, ALLOCATION, "r+", path.stat().st_size - count * ALLOCATION.itemsize, count)
    rows[field][52] = rows[field][52] - 4 if field in ("f0", "ptr") else rows[value][52] if value == "f1" else value
    assert text.second[52] > 1
    if refused:
        with pytest.raises(InputError, match=r"train\.beton: sample(s 51 and)? 52 "):
            open_text(path)
    else:
        assert len(open_text(path)) == count


def test_a_tokenizer_of_fewer_words_than_the_pairs_have_is_noticed(folder, tmp_path):
    """Whose bytes are those of their checksums."""
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: token for word, token in words.items() if token < 23}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert len(words) == 24
    with pytest.raises(InputError, match=r"holds tokens that tokenizer\.json has no words for"):
        training(other)


@pytest.mark.parametrize(("token", "named"), [(23, False), (24, True), (-1, True)])
def test_only_tokens_of_the_vocabulary_are_read(folder, tmp_path, token, named):
    """Of 24 words."""
    broken = shutil.copytree(folder, tmp_path / "broken")
    text = open_text(folder / "train.beton")
    with (broken / "train.beton").open("r+b") as file:
        file.seek(int(text.offset[30]) + 4)
        file.write(token.to_bytes(4, "little", signed=True))
    if named:
        with pytest.raises(InputError, match="sample 30 holds tokens"):
            training(broken, checksums=False)
    else:
        assert any(30 in samples for *_, samples in training(broken, checksums=False))


def test_every_view_of_a_pair_is_the_pair_and_damage_names_it(folder, tmp_path):
    """Views are numbered beyond the samples; the first of several damaged pairs is named."""
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    source, checked = (EvalLoader(section(broken, checksums=each), 4, place()).source for each in (False, True))
    samples, views = np.array([3, 16, 5, 6]), np.array([3, 16 + 17, 5 + 2 * 17, 6])
    expected, (ids, read) = source.read(samples, samples, 0)[0], source.read(views, views, 0)
    assert torch.equal(ids, expected)
    assert read.tolist() == views.tolist()
    assert source.labels(views).tolist() == source.labels(samples).tolist()
    with (broken / "dev_matched.beton").open("r+b") as file:
        for sample in (5, 6):
            file.seek(int(source.file.offset[sample]) + 4)
            file.write((24).to_bytes(4, "little"))
        file.flush()
        with pytest.raises(InputError, match="sample 5 holds tokens"):
            source.read(views, views, 0)
        with pytest.raises(InputError, match="sample 6 holds tokens"):
            source.read(views[3:], views, 0)
        with pytest.raises(InputError, match=r"sample 5 \(.*\) cannot be read: its bytes differ from its checksum"):
            checked.read(views, views, 0)
        file.truncate(int(source.file.offset[16]) + 8)
    with pytest.raises(
        InputError, match=r"sample 16 \(.*\) cannot be read: the file ends before it; it was cut short"
    ):
        source.read(views, views, 0)


def test_checksums_by_a_files_bytes_are_those_that_were_stored(folder):
    """By the definition: of length, second, label and size as int64, and of the CRC-32C of the tokens."""
    text, samples = open_text(folder / "train.beton"), np.array([11, 30])
    start = int(text.offset[11]) - 3
    found = compute_checksums(text, samples, text.path.read_bytes()[start:], start)
    assert found.tolist() == open_checksums(text).samples[samples].tolist()
    assert (text.stop - text.offset).tolist() == [48 * 4] * 53
    for sample, checksum in zip(samples.tolist(), found.tolist(), strict=True):
        numbers = int(text.length[sample]), int(text.second[sample]), int(text.label[sample]), 48 * 4
        assert checksum == crc32c(struct.pack("<4qI", *numbers, crc32c(text[sample].tobytes())))


def test_a_batch_is_no_wider_than_the_pairs_of_the_file(tmp_path):
    """Of 21 tokens at most, which is no multiple of 8."""
    source = tmp_path / "source"
    source.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "some", "people", "eat"]
    (source / "vocab.txt").write_text("\n".join(words) + "\n")
    for split in ("train", "dev_matched"):
        rows = [f"neutral\tpeople {'eat ' * count}\tsome people" for count in (1, 4, 30)]
        (source / f"{split}.tsv").write_text("\n".join(["gold_label\tsentence1\tsentence2", *rows]) + "\n")
    prepare("mnli", source, tmp_path / "prepared", PrepSettings(length=21))
    tokens = EvalLoader(section(tmp_path / "prepared"), 4, place()).source
    assert [tokens.width(np.array(samples, int)) for samples in ([0], [0, 1], [1, 2], [])] == [8, 16, 21, 8]
    assert tokens.read(np.array([2]), np.array([2]), 0)[0].shape == (1, 21)
    assert tokens.host_bytes(3) == 3 * 21 * 8


def test_images_are_not_text(folder, digits):
    with pytest.raises(InputError, match="not tokens and length"):
        TrainLoader(section(digits), SMOOTH, train_section(BATCH, seed=7), place())

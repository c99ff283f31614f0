"""Text batches: the pairs that were written, as short as the longest of a step allows, evaluated once each."""

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

from tests.data.loading import SMOOTH, place, read, section, text_section, train_loader
from tests.sections import train_section
from widemix.data.batches import StepPart
from widemix.data.loader import EvalLoader, TrainLoader, check_model
from widemix.data.tokens import vocabulary_size
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError
from widemix.formats.checksums import compute_checksums, crc32c, open_checksums
from widemix.formats.tables import ALLOCATION, FIELD, HEADER
from widemix.formats.text import SAMPLE, TextBeton, open_text
from widemix.models.text.section import TextMixerSection


def training(folder: Path, **keys) -> TrainLoader:
    return train_loader(text_section(folder, **keys), SMOOTH, train=train_section(16, seed=7))


def assert_holds(batch, text: TextBeton) -> None:
    """Its samples' pairs, and padding up to the longest."""
    longest = int(text.length[batch.samples].max(initial=1))
    width = min(-(-longest // 8) * 8, 48)
    assert (batch.inputs.shape, batch.inputs.dtype) == ((len(batch), width), torch.int64)
    assert batch.inputs.tolist() == [text[sample][:width].tolist() for sample in batch.samples]
    assert not any(text[sample][width:].any() for sample in batch.samples)


def test_batches_hold_the_pairs_of_the_file(pairs):
    text, batches = open_text(pairs / "train.beton"), read(training(pairs), 1)
    assert len(batches) == 3
    for batch in batches:
        assert_holds(batch, text)
        assert torch.equal(batch.targets.argmax(1), torch.from_numpy(text.label[batch.samples]))
        assert torch.allclose(batch.targets.sum(1), torch.ones(16))
    assert text.length.min() < 16 < text.length.max() <= 48


@pytest.mark.parametrize("world", [1, 2, 3, 20])
def test_evaluation_sees_every_pair_once(pairs, world):
    text = open_text(pairs / "dev_matched.beton")
    ranks = [read(EvalLoader(text_section(pairs), 4, place(rank, world))) for rank in range(world)]
    batches = [batch for step in zip(*ranks, strict=True) for batch in step]
    for batch in batches:
        assert_holds(batch, text)
        assert batch.targets.tolist() == text.label[batch.samples].tolist()
    assert sorted(sample for batch in batches for sample in batch.samples) == list(range(17))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_a_copy_goes_on_by_itself(pairs, way):
    gc.collect()
    descriptors = os.listdir("/proc/self/fd")
    first = training(pairs)
    other, expected = way(first), [batch.inputs for batch in read(first, 1)]
    del first
    gc.collect()
    assert all(torch.equal(a, b.inputs) for a, b in zip(expected, read(other, 1), strict=True))
    evaluated = EvalLoader(text_section(pairs), 4, place())
    assert len(way(evaluated).source.file) == len(evaluated.source.file) == 17
    del evaluated, other
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= len(descriptors)


def test_a_model_too_small_for_the_pairs_is_refused(pairs, digits):
    loader = training(pairs)
    fits = TextMixerSection(kind="text_mixer", vocabulary=24, tokens=48, channels=4, depth=1)
    check_model(fits, loader)
    images = EvalLoader(section(digits, num_classes=10, eval_split="test"), 4, place())
    for change, words in (
        ({"tokens": 47}, r"model.tokens 47: .* up to 48 tokens; take that many, or prepare with --length 47"),
        ({"vocabulary": 23}, "model.vocabulary 23: the tokenizer.json next to .* has 24 words"),
    ):
        with pytest.raises(InputError, match=words):
            check_model(fits.model_copy(update=change), images, loader)
    loader.source.file = replace(loader.source.file, length=np.full(53, 41))  # a batch of which has 48 tokens
    with pytest.raises(InputError, match="up to 48 tokens"):
        check_model(fits.model_copy(update={"tokens": 41}), loader)


@pytest.fixture
def damaged(pairs, tmp_path) -> Path:
    return Path(shutil.copytree(pairs, tmp_path / "damaged"))


def write_token(path: Path, sample: int, token: int) -> None:
    """In place of the second token of a sample."""
    place = int(open_text(path).offset[sample]) + 4
    np.memmap(path, np.uint8, "r+")[place : place + 4] = np.frombuffer(token.to_bytes(4, "little", signed=True), "u1")


@pytest.mark.parametrize(
    ("token", "checksums", "words"),
    [
        (2**31 - 1, True, r"sample 30 \(train\.tsv:32\) cannot be read: its bytes differ from its"),
        (2**31 - 1, False, r"sample 30 holds tokens that tokenizer\.json has no words for"),
        (24, False, "sample 30 holds tokens"),  # of 24 words
        (-1, False, "sample 30 holds tokens"),
        (23, False, None),
    ],
)
def test_only_tokens_of_the_vocabulary_are_read(damaged, token, checksums, words):
    write_token(damaged / "train.beton", 30, token)
    if words:
        with pytest.raises(InputError, match=words):
            read(training(damaged, checksums=checksums), 1)
    else:
        assert any(30 in batch.samples for batch in read(training(damaged, checksums=checksums), 1))


def test_a_tokenizer_of_too_few_words_is_noticed(damaged):
    path = damaged / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: token for word, token in words.items() if token < 23}
    path.write_text(json.dumps(tokenizer))
    assert len(words) == 24
    with pytest.raises(InputError, match=r"holds tokens that tokenizer\.json has no words for"):
        read(training(damaged), 1)
    path.write_text('{"model": {}}')
    with pytest.raises(InputError, match="cannot be read as the folder's tokenizer"):
        training(damaged)


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
        vocabulary_size(path)


def test_the_vocabulary_goes_up_to_its_greatest_token(tmp_path):
    """Whatever the order, with numbers that no word has, and words in any language."""
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": {"vocab": {"é": 2, "b": 30, "c": 0}}}', encoding="utf-8")
    assert vocabulary_size(path) == 31


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
def test_pairs_whose_lengths_or_places_cannot_be_are_refused(pairs, tmp_path, field, value, refused):
    path, count = Path(shutil.copy(pairs / "train.beton", tmp_path)), 53
    assert open_text(path).second[52] > 1
    if field.startswith("f"):
        rows = np.memmap(path, SAMPLE, "r+", HEADER.itemsize + 4 * FIELD.itemsize, count)
    else:
        rows = np.memmap(path, ALLOCATION, "r+", path.stat().st_size - count * ALLOCATION.itemsize, count)
    rows[field][52] = rows[field][52] - 4 if field in ("f0", "ptr") else rows[value][52] if value == "f1" else value
    if refused:
        with pytest.raises(InputError, match=r"train\.beton: sample(s 51 and)? 52 "):
            open_text(path)
    else:
        assert len(open_text(path)) == count


def test_every_view_is_the_pair_and_damage_names_it(damaged):
    """Views are numbered beyond the samples; the first of several damaged pairs is named."""
    checked, source = (EvalLoader(text_section(damaged, checksums=of), 4, place()).source for of in (True, False))
    samples, views = np.array([3, 16, 5, 6]), np.array([3, 16 + 17, 5 + 2 * 17, 6])
    expected, found = (source.read(StepPart(of)) for of in (samples, views))
    assert torch.equal(found.inputs, expected.inputs)
    assert torch.equal(found.labels, expected.labels)
    assert found.view_ids.tolist() == views.tolist()
    path = damaged / "dev_matched.beton"
    for sample in (5, 6):
        write_token(path, sample, 24)
    cut = int(source.file.offset[16]) + 8
    for reader, chosen, size, words in (
        (source, views, None, "sample 5 holds tokens"),
        (source, views[3:], None, "sample 6 holds tokens"),
        (checked, views, None, r"sample 5 \(.*\) cannot be read: its bytes differ from its checksum"),
        (source, views, cut, r"sample 16 \(.*\) cannot be read: the file ends before it; it was cut short"),
    ):
        if size:
            os.truncate(path, size)
        with pytest.raises(InputError, match=words):
            reader.read(StepPart(chosen))


def test_checksums_by_a_files_bytes_are_those_that_were_stored(pairs):
    """By the definition: of length, second, label and size as int64, and of the CRC-32C of the tokens."""
    text, samples = open_text(pairs / "train.beton"), np.array([11, 30])
    start = int(text.offset[11]) - 3
    found = compute_checksums(text, samples, text.path.read_bytes()[start:], start)
    assert found.tolist() == open_checksums(text).samples[samples].tolist()
    assert (text.stop - text.offset).tolist() == [48 * 4] * 53
    for sample, checksum in zip(samples.tolist(), found.tolist(), strict=True):
        numbers = int(text.length[sample]), int(text.second[sample]), int(text.label[sample]), 48 * 4
        assert checksum == crc32c(struct.pack("<4qI", *numbers, crc32c(text[sample].tobytes())))


def test_a_batch_is_no_wider_than_the_files_pairs(tmp_path):
    """Of 21 tokens at most, which is no multiple of 8."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source/vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nsome\npeople\neat\n")
    for split in ("train", "dev_matched"):
        rows = [f"neutral\tpeople {'eat ' * count}\tsome people" for count in (1, 4, 30)]
        (tmp_path / f"source/{split}.tsv").write_text("\n".join(["gold_label\tsentence1\tsentence2", *rows]) + "\n")
    prepare("mnli", tmp_path / "source", tmp_path / "prepared", PrepSettings(length=21))
    tokens = EvalLoader(text_section(tmp_path / "prepared"), 4, place()).source
    assert [tokens.width(np.array(samples, int)) for samples in ([0], [0, 1], [1, 2], [])] == [8, 16, 21, 8]
    assert tokens.read(StepPart(np.array([2]))).inputs.shape == (1, 21)
    assert tokens.host_bytes(3) == 3 * 21 * 8


def test_images_are_not_text(digits):
    with pytest.raises(InputError, match="not tokens and length"):
        training(digits)

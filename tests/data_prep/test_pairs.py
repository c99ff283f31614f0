"""MultiNLI and SNLI in the forms in which people have them, and what becomes of their sentences."""

import gzip
import hashlib
import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.data_prep.conftest import contents
from tests.data_prep.writing import glue, jsonl, plain, put
from widemix.data_prep import encoding
from widemix.data_prep.encoding import encoding_for
from widemix.data_prep.prepare import dry_run, prepare
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.sources import pairs, read_source
from widemix.data_prep.sources.pairs import FAR_PAIRS, Pair, far_pairs
from widemix.data_prep.verify import verify
from widemix.errors import InputError
from widemix.formats.checksums import crc32c
from widemix.formats.chunks import hash_bytes
from widemix.formats.manifest import data_hashes
from widemix.formats.text import open_text
from widemix.launch.stage import stage

REAL = Path(__file__).parents[3] / "shared" / "data" / "mnli"
ROWS = [
    ("entailment", "A man eats.", "Somebody eats."),
    ("-", "Nobody agreed.", "On this."),
    ("contradiction", 'He said "no".', "He said yes!"),
    ("neutral", "Two dogs, one cat", "Three animals run"),
]
LABELLED = [("entailment", *ROWS[0][1:]), ("contradiction", *ROWS[2][1:]), ("neutral", *ROWS[3][1:])]
PIECES = "a man eat ##s . some ##body he said no yes ! two dog , one cat"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *PIECES.split()]
tokenizers = pytest.mark.skipif(find_spec("tokenizers") is None, reason="needs the package tokenizers")


def listed(split):
    return [(pairs.CLASSES[pair.label], pair.first, pair.second) for pair in split]


@pytest.mark.parametrize(
    ("read", "name", "write", "split"),
    [
        (pairs.mnli, "multinli_1.0_train.jsonl", jsonl, "train"),
        (pairs.mnli, "multinli_1.0_dev_mismatched.jsonl.gz", jsonl, "dev_mismatched"),
        (pairs.mnli, "train.tsv", glue, "train"),
        (pairs.mnli, "dev_matched.tsv.gz", plain, "dev_matched"),
        (pairs.mnli, "train.TSV", plain, "train"),
        (pairs.mnli, "Train.tsv.GZ", plain, "train"),
        (pairs.mnli, "train.tsv", lambda rows: "\ufeff" + plain(rows), "train"),
        (pairs.mnli, "dev_matched_small.txt", plain, "dev_matched_small"),
        (pairs.mnli, "multinli_1.0_dev_mismatched_1.TSV", glue, "dev_mismatched_1"),
        (pairs.snli, "snli_1.0_test.jsonl", jsonl, "test"),
        (pairs.snli, "snli_dev.tsv.gz", plain, "dev"),
        (pairs.snli, "snli_1.0_train.txt", glue, "train"),
        (pairs.snli, "train.tsv", plain, "train"),
        # empty lines are none
        (pairs.mnli, "train.tsv", lambda rows: plain(rows).replace("\n", "\n\n", 1) + "\r\n\n", "train"),
        (pairs.mnli, "train.jsonl", lambda rows: f"\n{jsonl(rows)}\n\n", "train"),
    ],
)
def test_every_form(tmp_path, read, name, write, split):
    """Compressed or not, whatever the name says."""
    data = write(ROWS).encode()
    for written in (data, gzip.compress(data)):
        (tmp_path / name).write_bytes(written)
        dataset = read(tmp_path)
        assert list(dataset.splits) == [split]
        assert listed(dataset.splits[split]) == LABELLED
        assert dataset.exceptions == ({"file": name, "rule": "left out 1 pairs without a gold label"},)
        lines = data.decode().split("\n")  # as editors count them
        line = next(number for number, line in enumerate(lines, 1) if "A man eats." in line)
        assert dataset.splits[split][0].name == f"{name}:{line}"


def test_of_two_forms_the_first_by_name_is_read(tmp_path):
    """And of two columns of labels that of the gold one."""
    put(tmp_path, {"train.tsv": plain(ROWS[:1]), "multinli_1.0_train.txt": glue(ROWS[2:3])})
    put(tmp_path, {"dev_matched.tsv": "label\tsentence1\tsentence2\tgold_label\nneutral\ta\tb\tentailment\n"})
    dataset = pairs.mnli(tmp_path)
    assert list(dataset.splits) == ["dev_matched", "train"]
    assert listed(dataset.splits["train"]) == LABELLED[1:2]
    assert listed(dataset.splits["dev_matched"]) == [("entailment", "a", "b")]


def test_snli_and_mnli_in_one_folder_are_distinguished(tmp_path):
    (tmp_path / "train.tsv").write_text(plain(ROWS[:1]))
    (tmp_path / "snli_dev.tsv").write_text(plain(ROWS[2:]))
    for source, split in (("mnli", "train"), ("snli", "dev")):
        assert list(read_source(source, tmp_path, PrepSettings()).splits) == [split]


def test_the_content_of_a_pair_is_both_sentences(tmp_path):
    """By which a later process tells that one has changed."""
    one = pairs.Pair("x", 0, "a b", "c")
    assert len({pair.content() for pair in (one, one._replace(first="a"), one._replace(second="d"))}) == 3
    assert one.content() != pairs.Pair("x", 0, "a ", "bc").content()
    assert one.content() == pairs.Pair("y", 1, "a b", "c").content()


SNLI = ["index", "captionID", "pairID", "binary1", "binary2", "parse1", "parse2", "sentence1", "sentence2", "label1"]


def test_glues_snli_has_rows_of_one_label_and_of_five(tmp_path):
    """As GLUE distributes it: the first line of train.tsv names 11 columns, and its rows have 11 or 15."""
    values = ["0", "c", "p", "b", "b", "t", "t"]
    rows = [
        [*SNLI, "gold_label"],
        [*values, "A man", "eats", "neutral", "neutral"],
        [*values, "A dog", "runs", "neutral", "entailment", "neutral", "contradiction", "entailment", "entailment"],
        [*values, "A cat", "sits", "neutral", "", "", "", "", "-"],
    ]

    def read(*more):
        put(tmp_path, {"train.tsv": "\n".join("\t".join(row) for row in (*rows, *more))})
        return listed(pairs.snli(tmp_path).splits["train"])

    assert read() == [("neutral", "A man", "eats"), ("entailment", "A dog", "runs")]
    for labels in (["c", *"defg"], ["neutral"], ["neutral"] * 7):
        with pytest.raises(InputError, match=f"line 5 has {9 + len(labels)} columns, the first has 11"):
            read([*values, "A", "b", *labels])


def test_a_sentence_may_have_any_characters_but_breaks(tmp_path):
    """Some of them are line breaks to Python."""
    first, second = "a\u2028b\x85c\x0cd\x1ce \xa0", ' f\rg "h'
    (tmp_path / "train.tsv").write_bytes(plain([("neutral", first, second)]).encode())
    (tmp_path / "dev_matched.jsonl").write_bytes(
        json.dumps({"gold_label": "neutral", "sentence1": first, "sentence2": second}, ensure_ascii=False).encode()
    )
    assert [listed(split) for split in pairs.mnli(tmp_path).splits.values()] == [[("neutral", first, second)]] * 2


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "pairs"
    root.mkdir()
    (root / "train.tsv").write_text(plain(ROWS))
    (root / "vocab.txt").write_text("\n".join(WORDS))
    return root


@tokenizers
def test_tokens_lengths_and_cuts(tmp_path, folder):
    manifest = prepare("mnli", folder, tmp_path / "out", PrepSettings(length=12))
    assert manifest.classes == ("entailment", "neutral", "contradiction")
    beton = open_text(tmp_path / "out" / "train.beton")
    words = [[WORDS[token] for token in beton[i]] for i in range(3)]
    # 13 tokens in all: one is cut, of the first sentence where both are as long
    assert " ".join(words[0]) == "[CLS] a man eat ##s [SEP] some ##body eat ##s . [SEP]"
    assert " ".join(words[2][: beton.length[2]]) == "[CLS] two dog ##s , one cat [SEP] [UNK] [UNK] [UNK] [SEP]"
    assert beton.second.tolist() == [6, 7, 8]
    assert beton.label.tolist() == [0, 2, 1]
    ((_, samples, size, _),), _ = dry_run("mnli", folder, tmp_path / "long", PrepSettings(length=20))
    long = prepare("mnli", folder, tmp_path / "long", PrepSettings(length=20))
    assert (samples, size) == (3, long.splits["train"].bytes)
    whole = "[CLS] a man eat ##s . [SEP] some ##body eat ##s . [SEP]"
    wide = open_text(tmp_path / "long" / "train.beton")
    assert long.splits["train"].samples == 3
    assert [WORDS[token] for token in wide[0]] == [*whole.split(), *["[PAD]"] * 7]
    assert wide.length.tolist()[0] == 13


@tokenizers
def test_a_learnt_vocabulary_is_kept(tmp_path, folder):
    (folder / "vocab.txt").unlink()
    for name in ("one", "two"):
        prepare("mnli", folder, tmp_path / name, PrepSettings(length=16, vocab_size=100))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    from tokenizers import Tokenizer

    kept = Tokenizer.from_file(str(tmp_path / "one" / "tokenizer.json"))
    beton = open_text(tmp_path / "one" / "train.beton")
    assert kept.encode(*ROWS[0][1:]).ids == beton[0][: beton.length[0]].tolist()


@tokenizers
def test_a_vocabulary_is_learnt_from_train(tmp_path, folder):
    """In lower case; of the first split where there is no train."""
    (folder / "vocab.txt").unlink()
    numbers = np.random.RandomState(0)
    for split, letters in (("dev_matched", "UVWXYZ"), ("train", "ABCDEF")):
        words = ["".join(numbers.choice([*letters], 5)) for _ in range(200)]
        (folder / f"{split}.tsv").write_text(plain([("neutral", " ".join(words), "A U")]))

    def learnt(**settings):
        dataset = pairs.mnli(folder)
        if "splits" in settings:
            dataset = replace(dataset, splits={"dev_matched": dataset.splits["dev_matched"]})
        found = encoding_for(dataset, folder, PrepSettings(length=16, **settings), None)
        return json.loads(found.files["tokenizer.json"])["model"]["vocab"]

    small, large, other = learnt(vocab_size=100), learnt(vocab_size=120), learnt(vocab_size=120, splits="dev_matched")
    assert (len(small), len(large)) == (100, 120)
    assert "a" in large
    assert "w" not in large
    assert "w" in other
    assert "b" not in other
    assert not any(set(word) & set("ABCDEFU") for word in set(large) - {*WORDS[:4], "[MASK]"})


@tokenizers
def test_the_most_frequent_characters_are_learnt(limits):
    limits({"widemix.data_prep.encoding.ALPHABET": 3})
    train = [pairs.Pair("x", 0, "zz yyyyy x wwww", "v xxx")]
    vocabulary = encoding.learn_tokenizer(train, 100, 16).get_vocab()
    assert [letter for letter in "vwxyz" if letter in vocabulary] == ["w", "x", "y"]
    assert vocabulary["y"] < vocabulary["w"] < vocabulary["x"]  # wwww and xxxx: in the order of the alphabet


@tokenizers
def test_padding_is_the_vocabularys_and_batches_do_not_matter(folder, limits):
    """Nor where an earlier process has stopped."""
    words = [*WORDS[1:], "[PAD]"]
    (folder / "vocab.txt").write_text("\n".join(words))
    tokenizer, listed_pairs = encoding.load_tokenizer(folder / "vocab.txt", 20), pairs.mnli(folder).splits["train"]
    whole = list(encoding.encode_pairs(listed_pairs, 0, tokenizer, 20))
    tokens = np.frombuffer(whole[0].data, np.int32)
    assert [words[token] for token in tokens[-8:]] == ["[SEP]", *["[PAD]"] * 7]
    assert [record.origin.checksum for record in whole] == [crc32c(pair.content()) for pair in listed_pairs]
    limits({"widemix.data_prep.encoding.BATCH": 2})
    for start in range(4):
        assert list(encoding.encode_pairs(listed_pairs, start, tokenizer, 20)) == whole[start:]


@tokenizers
def test_verify_and_stage_know_the_tokenizer(tmp_path, folder):
    out = tmp_path / "out"
    prepare("mnli", folder, out, PrepSettings(length=16))
    assert verify(out) == []
    hashes = data_hashes(out, "train")  # by which a run knows its data again
    assert hashes["tokenizer.json"] == hash_bytes((out / "tokenizer.json").read_bytes())
    assert {"train.beton", "tokenizer.json"} <= hashes.keys()
    copy = stage(out, tmp_path / "local")
    assert contents(copy) == contents(out)
    (out / "tokenizer.json").write_text("{}")
    assert verify(out) == [f"{out / 'tokenizer.json'}: is damaged"]
    (out / "tokenizer.json").unlink()
    assert verify(out) == [f"{out / 'tokenizer.json'}: is missing"]
    path = out / "train.beton"
    data = bytearray(path.read_bytes())
    data[8 << 20] ^= 1
    path.write_bytes(data)
    assert f"{path}: sample 0 (train.tsv:2) is damaged" in verify(out)


@pytest.mark.parametrize("vocabulary", [True, False])
def test_without_the_package_tokenizers_one_line_says_so(tmp_path, folder, monkeypatch, vocabulary):
    if not vocabulary:
        (folder / "vocab.txt").unlink()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"^sentence pairs need the package tokenizers; run `pip"):
        prepare("mnli", folder, tmp_path / "out", PrepSettings())


@pytest.mark.long
@tokenizers
@pytest.mark.parametrize(
    ("source", "counts"), [("mnli", {"train": 9888, "dev_matched": 9815}), ("snli", {"dev": 9842})]
)
def test_real_pairs_count_as_published(tmp_path, source, counts):
    if not REAL.is_dir():
        pytest.skip("needs the real pairs in ../shared/data/mnli")
    manifest = prepare(source, REAL, tmp_path / "out", PrepSettings())
    assert counts.items() <= {name: split.samples for name, split in manifest.splits.items()}.items()
    for name in manifest.splits:
        beton = open_text(tmp_path / "out" / f"{name}.beton")
        fractions = np.bincount(beton.label, minlength=3) / len(beton)
        assert fractions.min() > 0.3  # near balance, as in the papers
        assert all(beton[i][0] == 101 for i in range(0, len(beton), 500))  # [CLS] of bert-base-uncased


# The generated pairs: always the same ones, of classes that only both sentences together tell.

CIRCLE = "abcdefghabc"


@pytest.fixture(scope="module")
def splits() -> dict[str, list[Pair]]:
    return {name: list(pairs) for name, pairs in far_pairs(None).splits.items()}


def test_the_class_is_whether_most_words_follow(splits):
    for pair in splits["test"]:
        words = zip(pair.first.split(), pair.second.split(), strict=True)
        count = sum(two in CIRCLE[CIRCLE.index(one) : CIRCLE.index(one) + 4] for one, two in words)
        assert pair.label == (count > FAR_PAIRS - count)


def test_they_are_always_the_same(splits):
    assert {name: len(pairs) for name, pairs in splits.items()} == {"train": 20_000, "test": 5_000}
    content = b"".join(pair.content() + bytes([pair.label]) for pairs in splits.values() for pair in pairs)
    assert hashlib.sha256(content).hexdigest() == "ab84419d5c99a5a63702e040f7763a478bf88f34b72da000f39f82064cabfd93"
    assert not {pair.content() for pair in splits["train"]} & {pair.content() for pair in splits["test"]}

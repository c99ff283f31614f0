"""MultiNLI and SNLI in the forms in which people have them, and what becomes of their sentences."""

import gzip
import json
import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from widemix.data_prep import pairs, wordpiece
from widemix.data_prep.dry_run import dry_run
from widemix.data_prep.encoding import encoding_for
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.sources import read_source
from widemix.data_prep.verify import verify
from widemix.errors import InputError
from widemix.formats.blocks import hash_bytes
from widemix.formats.checksums import crc32c
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


def jsonl(rows):
    keys = ("gold_label", "sentence1", "sentence2")
    return "".join(json.dumps({"pairID": "x", **dict(zip(keys, row, strict=True))}) + "\n" for row in rows)


def glue(rows):
    lines = ["index\tpromptID\tsentence1\tsentence2\tlabel1\tgold_label"]
    lines += [f"{i}\t7\t{first}\t{second}\tneutral\t{gold}" for i, (gold, first, second) in enumerate(rows)]
    return "\n".join(lines) + "\n"


def plain(rows):
    return "label\tsentence2\tsentence1\r\n" + "".join(f"{gold}\t{b}\t{a}\r\n" for gold, a, b in rows)


def listed(split):
    return [(pairs.CLASSES[pair.label], pair.first, pair.second) for pair in split]


@pytest.mark.parametrize(
    ("read", "name", "write", "split"),
    [
        (pairs.mnli, "multinli_1.0_train.jsonl", jsonl, "train"),
        (pairs.mnli, "multinli_1.0_dev_mismatched.jsonl.gz", jsonl, "dev_mismatched"),
        (pairs.mnli, "train.tsv", glue, "train"),
        (pairs.mnli, "dev_matched.tsv.gz", plain, "dev_matched"),
        (pairs.snli, "snli_1.0_test.jsonl", jsonl, "test"),
        (pairs.snli, "snli_dev.tsv.gz", plain, "dev"),
        (pairs.snli, "snli_1.0_train.txt", glue, "train"),
        (pairs.snli, "train.tsv", plain, "train"),
        (pairs.mnli, "dev_matched_small.txt", plain, "dev_matched_small"),
        (pairs.mnli, "multinli_1.0_dev_mismatched_1.TSV", glue, "dev_mismatched_1"),
    ],
)
def test_every_form(tmp_path, read, name, write, split):
    data = write(ROWS).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    dataset = read(tmp_path)
    assert list(dataset.splits) == [split]
    assert listed(dataset.splits[split]) == LABELLED
    assert dataset.exceptions == ({"file": name, "rule": "left out 1 pairs without a gold label"},)


def test_snli_and_mnli_in_one_folder_are_distinguished(tmp_path):
    (tmp_path / "train.tsv").write_text(plain(ROWS[:1]))
    (tmp_path / "snli_dev.tsv").write_text(plain(ROWS[2:]))
    for source, split in (("mnli", "train"), ("snli", "dev")):
        assert list(read_source(source, tmp_path, PrepSettings()).splits) == [split]


def test_of_two_forms_of_a_split_the_first_by_name_is_read(tmp_path):
    (tmp_path / "train.tsv").write_text(plain(ROWS[:1]))
    (tmp_path / "multinli_1.0_train.txt").write_text(glue(ROWS[2:3]))
    (tmp_path / "dev_matched.tsv").write_text(plain(ROWS))
    dataset = pairs.mnli(tmp_path)
    assert list(dataset.splits) == ["dev_matched", "train"]
    assert listed(dataset.splits["train"]) == LABELLED[1:2]
    assert [found["file"] for found in dataset.exceptions] == ["dev_matched.tsv"]


def test_the_gold_label_counts_where_there_is_another(tmp_path):
    (tmp_path / "train.tsv").write_text("label\tsentence1\tsentence2\tgold_label\nneutral\ta\tb\tentailment\n")
    assert listed(pairs.mnli(tmp_path).splits["train"]) == [("entailment", "a", "b")]


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
    (tmp_path / "train.tsv").write_text("\n".join("\t".join(row) for row in rows))
    dataset = pairs.snli(tmp_path)
    assert listed(dataset.splits["train"]) == [("neutral", "A man", "eats"), ("entailment", "A dog", "runs")]
    (tmp_path / "train.tsv").write_text(
        "\n".join("\t".join(row) for row in [*rows, [*values, "A", "b", "c", *"defg"]])
    )
    with pytest.raises(InputError, match="line 5 has 14 columns, the first has 11"):
        pairs.snli(tmp_path)
    for labels in (1, 7):
        more = [*values, "A", "b", *["neutral"] * labels]
        (tmp_path / "train.tsv").write_text("\n".join("\t".join(row) for row in [*rows, more]))
        with pytest.raises(InputError, match=f"line 5 has {9 + labels} columns, the first has 11"):
            pairs.snli(tmp_path)


@pytest.mark.parametrize("name", ["train.TSV", "Train.tsv.GZ", "train.tsv"])
def test_marks_of_encodings_cases_and_compression_by_content(tmp_path, name):
    data = b"\xef\xbb\xbf" + plain(ROWS).encode()
    for written in (data, gzip.compress(data)):
        (tmp_path / name).write_bytes(written)
        assert listed(pairs.mnli(tmp_path).splits["train"]) == LABELLED
    packed = gzip.compress(data)
    for damaged in (packed[:-9], packed[:10] + b"\xff" + packed[11:], packed[:-8] + bytes(8)):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(InputError, match=f"{name}: cannot be read"):
            pairs.mnli(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("train.jsonl", jsonl(ROWS)[:-9], "line 4 is not JSON"),
        ("train.jsonl", '{"sentence1": "a"}\n', "line 1 lacks one of"),
        ("train.jsonl", '{"gold_label": "-", "gold_label": "neutral"}', "line 1 .* the key 'gold_label' twice"),
        *(
            ("train.jsonl", jsonl([*ROWS, ("neutral", *sentences)]), "line 5 has a sentence that is not text")
            for sentences in (("a", None), (7, "a"), ("a", "b\ud800"), (["a"], "b"))
        ),
        ("train.jsonl", "[]", "line 1 lacks one of"),
        ("train.jsonl", "\n" + "[" * 10**5, "line 2 is not JSON"),
        ("train.tsv", "label\tsentence1\tsentence2\tlabel\n", "its first line names a column twice"),
        ("train.tsv", plain(ROWS) + "a\tb\n", "line 6 has 2 columns, the first has 3"),
        ("train.tsv", "sentence1\tsentence2\na\tb\n", "line 2 lacks one of"),
        ("train.tsv", plain([("yes", "a", "b")]), "line 2 has the label 'yes'"),
        ("train.tsv", plain(ROWS[1:2]), "holds no labelled pairs"),
        ("train.tsv", "", "holds no labelled pairs"),
        ("train.tsv.gz", "not compressed", r"train\.tsv\.gz: holds no labelled pairs"),
        ("other.tsv", plain(ROWS), "holds none of train, dev_matched"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, text, word):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=word):
        pairs.mnli(tmp_path)


def test_pairs_are_read_from_a_folder(tmp_path):
    (tmp_path / "train.tsv").write_text(plain(ROWS))
    with pytest.raises(InputError, match=r"train\.tsv: is not a folder of \.jsonl or \.tsv files"):
        pairs.mnli(tmp_path / "train.tsv")


def test_empty_lines_are_none(tmp_path):
    (tmp_path / "train.tsv").write_text(plain(ROWS).replace("\n", "\n\n", 1) + "\r\n\n")
    (tmp_path / "dev_matched.jsonl").write_text("\n" + jsonl(ROWS) + "\n\n")
    dataset = pairs.mnli(tmp_path)
    assert [listed(split) for split in dataset.splits.values()] == [LABELLED] * 2
    assert dataset.splits["train"][0].name == "train.tsv:3"  # lines are counted as editors do


def test_a_sentence_may_have_any_characters_but_line_breaks_and_tabs(tmp_path):
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
    long = prepare("mnli", folder, tmp_path / "long", PrepSettings(length=20))
    whole = "[CLS] a man eat ##s . [SEP] some ##body eat ##s . [SEP]"
    wide = open_text(tmp_path / "long" / "train.beton")
    assert long.splits["train"].samples == 3
    assert [WORDS[token] for token in wide[0]] == [*whole.split(), *["[PAD]"] * 7]
    assert wide.length.tolist()[0] == 13


@tokenizers
def test_a_learnt_vocabulary_is_kept_and_the_same_every_time(tmp_path, folder):
    (folder / "vocab.txt").unlink()
    for name in ("one", "two"):
        prepare("mnli", folder, tmp_path / name, PrepSettings(length=16, vocab_size=100))
    contents = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "two")]
    assert contents[0] == contents[1]
    from tokenizers import Tokenizer

    kept = Tokenizer.from_file(str(tmp_path / "one" / "tokenizer.json"))
    beton = open_text(tmp_path / "one" / "train.beton")
    assert kept.encode(*ROWS[0][1:]).ids == beton[0][: beton.length[0]].tolist()


@tokenizers
def test_a_vocabulary_is_learnt_from_train_of_the_size_that_is_asked_for(tmp_path, folder):
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
        encoding = encoding_for(dataset, folder, PrepSettings(length=16, **settings), None)
        return json.loads(encoding.files["tokenizer.json"])["model"]["vocab"]

    small, large, other = learnt(vocab_size=100), learnt(vocab_size=120), learnt(vocab_size=120, splits="dev_matched")
    assert (len(small), len(large)) == (100, 120)
    assert "a" in large
    assert "w" not in large
    assert "w" in other
    assert "b" not in other
    assert not any(set(word) & set("ABCDEFU") for word in set(large) - {*WORDS[:4], "[MASK]"})


@tokenizers
def test_the_most_frequent_characters_are_learnt(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(wordpiece, "ALPHABET", 3)
    train = [pairs.Pair("x", 0, "zz yyyyy x wwww", "v xxx")]
    vocabulary = wordpiece.learn_tokenizer(train, 100, 16).get_vocab()
    assert [letter for letter in "vwxyz" if letter in vocabulary] == ["w", "x", "y"]
    assert vocabulary["y"] < vocabulary["w"] < vocabulary["x"]  # wwww and xxxx: in the order of the alphabet


@tokenizers
def test_padding_is_that_of_the_vocabulary_and_batches_do_not_matter(tmp_path, folder, monkeypatch):
    """Nor where an earlier process has stopped."""
    words = [*WORDS[1:], "[PAD]"]
    (folder / "vocab.txt").write_text("\n".join(words))
    tokenizer, listed_pairs = wordpiece.load_tokenizer(folder / "vocab.txt", 20), pairs.mnli(folder).splits["train"]
    whole = list(wordpiece.encode_pairs(listed_pairs, 0, tokenizer, 20))
    tokens = np.frombuffer(whole[0].data, np.int32)
    assert [words[token] for token in tokens[-8:]] == ["[SEP]", *["[PAD]"] * 7]
    assert [record.origin.checksum for record in whole] == [crc32c(pair.content()) for pair in listed_pairs]
    monkeypatch.setattr(wordpiece, "BATCH", 2)
    for start in range(4):
        assert list(wordpiece.encode_pairs(listed_pairs, start, tokenizer, 20)) == whole[start:]


@tokenizers
def test_verify_and_stage_know_the_tokenizer(tmp_path, folder):
    out = tmp_path / "out"
    prepare("mnli", folder, out, PrepSettings(length=16))
    assert verify(out) == []
    hashes = data_hashes(out, "train")  # by which a run knows its data again
    assert hashes["tokenizer.json"] == hash_bytes((out / "tokenizer.json").read_bytes())
    assert {"train.beton", "tokenizer.json"} <= hashes.keys()
    copy = stage(out, tmp_path / "local")
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == {p.name: p.read_bytes() for p in out.iterdir()}
    (out / "tokenizer.json").write_text("{}")
    assert verify(out) == [f"{out / 'tokenizer.json'}: is damaged"]
    (out / "tokenizer.json").unlink()
    assert verify(out) == [f"{out / 'tokenizer.json'}: is missing"]
    path = out / "train.beton"
    data = bytearray(path.read_bytes())
    data[8 << 20] ^= 1
    path.write_bytes(data)
    assert f"{path}: sample 0 (train.tsv:2) is damaged" in verify(out)


@tokenizers
def test_dry_run_of_pairs(tmp_path, folder):
    ((split, samples, size, _),), _ = dry_run("mnli", folder, tmp_path / "out", PrepSettings(length=16))
    assert (split, samples) == ("train", 3)
    assert size == prepare("mnli", folder, tmp_path / "out", PrepSettings(length=16)).splits["train"].bytes


@tokenizers
@pytest.mark.parametrize("words", ["", "a\nb", None])
def test_a_wrong_vocabulary_is_named(tmp_path, folder, words):
    if words is not None:
        (tmp_path / "words.txt").write_text(words)
    with pytest.raises(
        InputError,
        match=r"words\.txt: is not a WordPiece vocabulary with one word per line|the vocabulary lacks \[PAD\]",
    ):
        prepare("mnli", folder, tmp_path / "out", PrepSettings(vocab=str(tmp_path / "words.txt")))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("vocabulary", [True, False])
def test_without_the_package_tokenizers_one_line_says_so(tmp_path, folder, monkeypatch, vocabulary):
    if not vocabulary:
        (folder / "vocab.txt").unlink()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"^sentence pairs need the package tokenizers; run `pip"):
        prepare("mnli", folder, tmp_path / "out", PrepSettings())


@tokenizers
@pytest.mark.parametrize("name", ["train.tsv", "vocab.txt"])
def test_what_is_no_file_is_not_waited_for(tmp_path, folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(InputError, match=rf"{name}: is not a regular file"):
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

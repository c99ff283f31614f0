"""Tables of images and pairs from Python: labels, numbers of classes, targets, names of splits and of classes."""

import csv
import json
import os
import tempfile
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

import widemix
from tests.data_prep.test_sources import ROWS
from tests.data_prep.writing import found, put
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.sources import csv_list, read_source
from widemix.data_prep.sources.from_python import collect
from widemix.data_prep.sources.labels import MAX_CLASSES, check_label, check_names, check_split, number_classes
from widemix.data_prep.sources.shards import read_names
from widemix.errors import InputError
from widemix.formats.beton import open_beton

pytestmark = pytest.mark.usefixtures("small_pages")


def read_table(tmp_path, labels, column="label"):
    """Class names, and the samples of a table of these."""
    with (tmp_path / "list.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("path", column), *((f"{i}.jpg", label) for i, label in enumerate(labels))])
    dataset = csv_list.read(tmp_path / "list.csv")
    return dataset.classes, dataset.splits["train"]


def numbers_of(samples):
    return [np.frombuffer(sample.targets, "<f4").tolist() for sample in samples]


@pytest.mark.parametrize(("labels", "numbers"), ROWS["numbers"], ids=str)
def test_whole_numbers_are_the_labels(tmp_path, labels, numbers, capsys):
    classes, samples = read_table(tmp_path, labels)
    assert classes == tuple(str(i) for i in range(1 + max(numbers)))
    assert [sample.label for sample in samples] == numbers
    assert "list.csv: labels such as" in capsys.readouterr().err
    rows = [json.dumps({"path": "a", "label": float(number)}) for number in numbers]
    (tmp_path / "list.jsonl").write_text("\n".join(rows))
    assert [sample.label for sample in csv_list.read(tmp_path / "list.jsonl").splits["train"]] == numbers


@pytest.mark.parametrize(("labels", "order"), ROWS["names"], ids=str)
def test_other_texts_are_names(tmp_path, labels, order, capsys):
    classes, samples = read_table(tmp_path, labels)
    assert list(classes) == order
    assert [classes[sample.label] for sample in samples] == [label.strip() for label in labels]
    mixed = "the labels are both names such as 'A' and numbers such as '9'"
    assert (mixed in capsys.readouterr().err) is ("A" in labels)


NAN = ["nan", "NaN", "+nan", "-nan", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"]
MISSING = ["inf", "+inf", "-inf", "infinity", "+Infinity", "-infinity", "na", "n/a", "#N/A", "#NA", "<NA>", "NaT"]
MISSING += ["null", "NULL", "nil", "none", "?", "-", "--", "."]


@pytest.mark.parametrize("text", NAN + MISSING)
def test_signs_of_missing_values(tmp_path, capsys, text):
    """Among numbers they are none; among names those of not-a-number are none, and of the others a line tells."""
    with pytest.raises(InputError) as error:
        read_table(tmp_path, ["0", text])
    assert f"line 3: label {text!r} is no number, as 0 is" in str(error.value)
    if text in NAN:
        with pytest.raises(InputError) as error:
            read_table(tmp_path, ["cat", text])
        assert f"line 3: label {text!r} is no class name" in str(error.value)
        assert capsys.readouterr().err == ""
        return
    assert set(read_table(tmp_path, ["cat", text])[0]) == {"cat", text}
    told = f"list.csv: the class {text!r} is named as tables write a missing value\n"
    assert capsys.readouterr().err == f"warning: {tmp_path}/{told}"


def test_several_numbers_are_in_numeric_order(tmp_path):
    classes, samples = read_table(tmp_path, ["10|2.0", "900000.0", "", " "], "labels")
    assert classes == ("2", "10", "900000")
    assert numbers_of(samples) == [[1, 1, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]]


def test_a_row_of_json_without_classes_has_none(tmp_path):
    rows = [json.dumps({"path": "a.jpg", "labels": labels}) for labels in (["ant"], [], None, "")]
    (tmp_path / "list.jsonl").write_text("\n".join(rows))
    assert numbers_of(csv_list.read(tmp_path / "list.jsonl").splits["train"]) == [[1], [0], [0], [0]]


@pytest.mark.parametrize("label", ["", " "])
def test_an_empty_label_is_no_class(tmp_path, label):
    with pytest.raises(InputError, match=rf"list\.csv: line 3: '{label}' is no class name"):
        read_table(tmp_path, ["0", label])


@pytest.mark.parametrize(
    ("labels", "warned"), [(["ant;bee", "bee"], "'ant;bee'"), (["ant,bee"], "'ant,bee'"), (["ant;bee", "a|b"], "")]
)
def test_another_separator_of_classes_is_told(tmp_path, labels, warned, capsys):
    assert labels[0] in read_table(tmp_path, labels, "labels")[0]
    line = f"warning: {tmp_path / 'list.csv'}: no image has several classes, and one is named {warned}; "
    assert capsys.readouterr().err == (f"{line}in the column labels '|' separates them\n" if warned else "")


@pytest.mark.long
def test_ids_as_labels_take_no_memory_of_rows_by_classes(tmp_path):
    classes, samples = read_table(tmp_path, [f"id{i}" for i in range(100_000)], "labels")  # 40 GB as an array
    assert len(classes) == len(samples) == 100_000
    assert np.flatnonzero(np.frombuffer(samples[70].targets, np.float32)).tolist() == [classes.index("id70")]


@pytest.mark.parametrize(("targets", "columns"), [("height,age", (1, 0)), ("*", (0, 1)), (" age ", (0,))])
def test_targets_are_numbers_or_their_texts(tmp_path, targets, columns):
    rows = [[1, "2.5"], [-3.25, " \u0664 "], [3.4e38, "1e-3"]]
    lines = [{"split": "val", "path": "a.jpg", "age": age, "height": height} for age, height in rows]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    dataset = csv_list.read(tmp_path / "list.jsonl", targets)
    assert dataset.classes == tuple(("age", "height")[column] for column in columns)
    assert list(dataset.splits) == ["val"]
    wanted = np.array([[1, 2.5], [-3.25, 4], [3.4e38, 1e-3]], np.float32)[:, columns]
    assert np.array_equal(numbers_of(dataset.splits["val"]), wanted)


def test_each_splits_rows_have_their_own_targets(tmp_path):
    put(tmp_path, {"list.csv": "split,label,age,path\nval,b,1,1\ntrain,a,2,2\nval,c,3,3\ntrain,b,4,4\n"})
    splits = csv_list.read(tmp_path / "list.csv", "age").splits
    assert {name: numbers_of(split) for name, split in splits.items()} == {"val": [[1], [3]], "train": [[2], [4]]}


def test_paths_of_a_table_are_files_the_system_opens(tmp_path):
    """Absolute ones, also with .. after a link, and in a table's folder that is reached by one."""
    put(tmp_path, {"real/deep/img.jpg": "1", "real/img.jpg": "2", "img.jpg": "3", "here/a/img.jpg": "4"})
    put(tmp_path, {"here/link": "-> ../real/deep", "real/deep/again.png": "-> ../img.jpg"})
    for folder in (tmp_path, tmp_path / "here", tmp_path / "here/link"):
        for path in ("here/link/../img.jpg", "img.jpg", "here/a/img.jpg", "here/link/../deep/again.png"):
            (folder / "list.csv").write_text(f"path,label\n{tmp_path}/{path},cat\n")
            [(_, data)] = found(csv_list.read(folder / "list.csv"), "train").values()
            assert data == (tmp_path / path).read_bytes()
            [name] = found(csv_list.read(folder / "list.csv"), "train")
            assert (os.path.isabs(name), os.path.basename(name)) == (False, os.path.basename(path))
    (tmp_path / "here/list.csv").write_text(f"path,label\n{tmp_path}/here/link/img.jpg,cat\n")
    assert list(found(csv_list.read(tmp_path / "here/list.csv"), "train")) == ["link/img.jpg"]  # by its own name


# Labels, and names of classes and splits, of every source.


def test_the_largest_label_is_below_a_million(tmp_path):
    assert [check_label("x", label) for label in (0, 999_999, 7.0)] == [0, 999_999, 7]
    assert isinstance(check_label("x", 7.0), int)
    for label, written, words in ((10**6, "", "1000000 is above 999999"), (3.5, "0x3", "0x3 is not a whole number")):
        with pytest.raises(InputError, match=f"x: label {words}"):
            check_label("x", label, written)


def test_there_are_at_most_a_million_classes():
    assert len(number_classes("x", {"999999": ""})[0]) == MAX_CLASSES == 1_000_000
    with pytest.raises(InputError, match="x: names the class 'a' twice"):  # and are not too many
        check_names("x", ["a"] * MAX_CLASSES)
    more = list(map(str, range(MAX_CLASSES + 1)))
    for refused in (check_names, lambda place, names: number_classes(place, dict.fromkeys(names, ""))):
        with pytest.raises(InputError, match="x: has 1000001 classes, more than 1000000"):
            refused("x", more)


def test_classes_of_one_name_are_refused_or_told(tmp_path, capsys):
    put(tmp_path, {"list.csv": f"path,label\n0.jpg,{LATIN[0]}\n1.jpg,{LATIN[1]}\n"})
    with pytest.raises(InputError, match=r"list\.csv: names the class .* twice, in two Unicode forms"):
        read_source("csv", tmp_path / "list.csv", PrepSettings())
    for names, words in (
        (("crane", "duck", "crane"), r"'crane' twice \(classes 0 and 2\); rename one"),
        (("caf\u00e9", "cafe\u0301"), ".* twice, in two Unicode forms"),
    ):
        with pytest.raises(InputError, match=rf"x: names the class {words}"):
            check_names("x", names)
    alike = (("A", "a"), ("b", "b "), ("c d", "c  d"), ("e", "e\u200b"), ("fi", "\ufb01"), ("G", "\uff27"))
    alike += (("\u00df", "SS"),)
    check_names("x", (*sum(alike, ()), "cd"))
    assert capsys.readouterr().err.splitlines() == [
        f"warning: x: the classes {a!r} and {b!r} differ only in case, blanks or forms of characters"
        for a, b in alike
    ]


def test_lists_of_names(tmp_path):
    path = tmp_path / "classes.txt"
    for data, names in ((b"\xef\xbb\xbfcat \r\nfish\xe2\x80\xa8owl\r\n\r\n", ("cat", "fish\u2028owl")), (b"\n", ())):
        path.write_bytes(data)
        assert read_names(path) == names
    path.write_bytes(b"caf\xe9\n")
    with pytest.raises(InputError, match=r"classes\.txt: cannot be read as UTF-8"):
        read_names(path)


# Pairs that a program gives.


def collected(tmp_path, splits, targets=""):
    """Class names; labels, or targets, of each split."""
    with collect(splits, tmp_path / "out", targets) as dataset:
        listed = {
            name: numbers_of(split) if dataset.targets else [sample.label for sample in split]
            for name, split in dataset.splits.items()
        }
        assert not dataset.targets or {sample.label for split in dataset.splits.values() for sample in split} == {-1}
        return dataset.classes, listed


def of(*labels, split="train"):
    return {split: [(b".", label) for label in labels]}


@pytest.mark.parametrize(
    ("splits", "classes", "labels"),
    [
        (of(2, 0), "0 1 2", {"train": [2, 0]}),
        (of("10", "2"), "0 1 2 3 4 5 6 7 8 9 10", {"train": [10, 2]}),
        (of("12", "10"), "0 1 2 3 4 5 6 7 8 9 10 11 12", {"train": [12, 10]}),  # of one width, and no codes
        (of("b", "a"), "a b", {"train": [1, 0]}),
        # the greatest number, and the first place of a name, may be in any split
        (of(1) | of(np.int32(3), True, split="val"), "0 1 2 3", {"train": [1], "val": [3, 1]}),
        (of("cow") | of("bee", "cow", split="val"), "bee cow", {"train": [1], "val": [0, 1]}),
        # targets are floats of any type, several numbers, or whether there is a class
        (of(1.5, np.float32(-2)), "0", {"train": [[1.5], [-2]]}),
        (of([1, 2.5], np.array([3, 4], np.int8)), "0 1", {"train": [[1, 2.5], [3, 4]]}),
        (of([True, False], (False, True)), "0 1", {"train": [[1, 0], [0, 1]]}),
        (of(np.float64(3.4e38), 0.0), "0", {"train": [[np.float32(3.4e38)], [0]]}),
        (of([Fraction(1, 2), 1], [0, Decimal("0.25")]), "0 1", {"train": [[0.5, 1], [0, 0.25]]}),
    ],
)
def test_labels_and_targets_from_python(tmp_path, splits, classes, labels):
    assert collected(tmp_path, splits) == (tuple(classes.split()), labels)


LATIN = "caf\u00e9", "cafe\u0301"


def test_names_of_targets_from_python(tmp_path):
    assert collected(tmp_path, of([1, 2]), " age, height")[0] == ("age", "height")


@pytest.mark.parametrize("split", ["x" * 100, "\u00e9" * 50, "_1"])
def test_names_of_splits_that_files_can_have(split):
    check_split("", split, [split, "train"])


@pytest.mark.parametrize("unnamed", [True, False])
def test_bytes_from_python_go_to_the_outputs_disk(tmp_path, jpeg, system, unnamed):
    """Not to /tmp, often a small one in memory; to a file without a name, or one that is removed."""
    asked = []
    for kind in ("TemporaryFile", "NamedTemporaryFile"):
        make = getattr(tempfile, kind)
        system({f"tempfile.{kind}": lambda dir, kind=kind, make=make: asked.append((kind, dir)) or make(dir=dir)})
    (tmp_path / "there").mkdir()
    pairs = [(jpeg(9), 0), (jpeg(7), 1)]
    for to in ("a/b/c", "there"):
        with collect({"val": pairs}, tmp_path / to, unnamed=unnamed) as dataset:
            assert [sample.image.read() for sample in dataset.splits["val"]] == [jpeg(9), jpeg(7)]
    assert asked == [("TemporaryFile" if unnamed else "NamedTemporaryFile", tmp_path)] * 2
    with pytest.raises(InputError, match="pair 1"), collect({"val": [*pairs[:1], (b"", -1)]}, tmp_path / "x"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_generator_of_bytes_is_read_once(tmp_path, jpeg):
    """An image without bytes is left out, by its own name; names of classes may be any bytes."""
    pairs = ((jpeg(number) if number else b"", "b\udcff" if number % 2 else "a") for number in range(12))
    manifest = widemix.prepare(pairs, tmp_path / "data", processes=2, max_bad=0.5)
    assert manifest.classes == ("a", "b\udcff")
    assert manifest.exceptions == ({"file": "train/0-00000000", "rule": "left out: is empty"},)
    assert open_beton(tmp_path / "data/train.beton").label.tolist() == [number % 2 for number in range(1, 12)]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]

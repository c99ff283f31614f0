"""Labels and class names of every source: numbers in numeric order, one limit, no class twice."""

import json
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from widemix.api.prep import prepare as prepare_pairs
from widemix.data_prep import csv_list, from_python, image_folder
from widemix.data_prep.labels import MAX_CLASSES, check_label, check_names, check_split, number_classes
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.shards import read_names
from widemix.data_prep.sources import read_source
from widemix.errors import InputError
from widemix.formats.beton import open_beton

pytestmark = pytest.mark.usefixtures("small_pages")


def read_table(tmp_path, labels, column="label"):
    rows = "".join(f'{i}.jpg,"{label}"\n' for i, label in enumerate(labels))
    (tmp_path / "list.csv").write_text(f"path,{column}\n{rows}")
    dataset = csv_list.read(tmp_path / "list.csv")
    return dataset.classes, dataset.splits["train"]


@pytest.mark.parametrize(
    ("labels", "numbers"),
    [
        ([f"{i}.0" for i in range(12)], list(range(12))),
        (["11", " 2 ", "10.", "+3", "0"], [11, 2, 10, 3, 0]),
        (["1e1", "2", "01"], [10, 2, 1]),
        (["5.000", "005"], [5, 5]),
        (["\u0663", "\u0661\u0660", "2"], [3, 10, 2]),  # digits of Arabic
        (["\uff11\uff10", "\uff0b2", "\uff13\uff0e\uff10"], [10, 2, 3]),  # wide ones
        (["01", "2", "10"], [1, 2, 10]),
        (["0.0", "1.0"], [0, 1]),
        (["1E1", "2"], [10, 2]),
        (["\ufeff2", "10\u200b", "-0"], [2, 10, 0]),  # characters that nobody sees
    ],
)
def test_whole_numbers_are_the_labels(tmp_path, labels, numbers, capsys):
    classes, samples = read_table(tmp_path, labels)
    assert classes == tuple(str(i) for i in range(1 + max(numbers)))
    assert [sample.label for sample in samples] == numbers
    assert "list.csv: labels such as" in capsys.readouterr().err
    (tmp_path / "list.jsonl").write_text(
        "".join(json.dumps({"path": "a", "label": float(i)}) + "\n" for i in numbers)
    )
    assert [sample.label for sample in csv_list.read(tmp_path / "list.jsonl").splits["train"]] == numbers


@pytest.mark.parametrize(
    ("labels", "order"),
    [
        ([" cat", "dog ", "cat"], ["cat", "dog"]),
        (["010", "002", "005"], ["002", "005", "010"]),  # codes: no class for each number between them
        (["123", "007", "012"], ["007", "012", "123"]),  # a leading zero in some of them is enough
        (["A", "9", "10"], ["10", "9", "A"]),
        (["1.5.2", "v2", "none"], ["1.5.2", "none", "v2"]),
        (["True", "False"], ["False", "True"]),
        (["3D", "2D", "10D"], ["10D", "2D", "3D"]),
        (["5%", "more"], ["5%", "more"]),
        (["012", "\ufeff007"], ["012", "\ufeff007"]),  # of one width, without what nobody sees
        (["1_a", "2,b"], ["1_a", "2,b"]),
        (["²", "½"], ["²", "½"]),
    ],
)
def test_other_texts_are_names(tmp_path, labels, order, capsys):
    classes, samples = read_table(tmp_path, labels)
    assert list(classes) == order
    assert [classes[sample.label] for sample in samples] == [label.strip() for label in labels]
    mixed = "the labels are both names such as 'A' and numbers such as '9'"
    assert (mixed in capsys.readouterr().err) is ("A" in labels)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["0", "-1"], "line 3: label -1 is negative; labels begin at 0: remove what has no label"),
        (["-1.0", "0.0"], "line 2: label -1.0 is negative"),
        (["0.0", "nan"], "line 3: label 'nan' is no number, as 0.0 is"),
        (["cat", "NaN"], "line 3: label 'NaN' is no class name"),
        (["cat", "-NaN"], "line 3: label '-NaN' is no class name"),
        *(
            (["0", "1", text], f"line 4: label '{re.escape(text)}' is no number")
            for text in ("#N/A", "NaT", "infinity", "?", "<NA>")
        ),
        *(
            (
                ["2", text, "10"],
                f"line 3: label {text!r} is a number in a notation that is not read; write digits alone",
            )
            for text in ("0x1F", "0b1", "0o7", "1_000", "1,000", "2,5", "3L", "5%", "1\u2019000", "1'000", "1 000")
        ),
        (["'10'", "'2'"], "line 2: label \"'10'\" is a number in a notation"),
        (["0", "\u22121"], "line 3: label \u22121 is negative"),
        (["0", "\uff0d1"], "line 3: label \uff0d1 is negative"),
        (["0", "1", "NA"], "line 4: label 'NA' is no number, as 0 is"),
        (["0.0", "inf"], "line 3: label 'inf' is no number"),
        (["0", "-inf"], "line 3: label '-inf' is no number"),
        (["1", "2.5", "cat"], "line 4: label 'cat' is no number, as 1 is"),
        (["0.5", "1"], "line 2: label 0.5 is not a whole number"),
        (["0", "900000000"], "line 3: label 900000000 is above 999999, the largest"),
        (["0", "1e400"], "line 3: label 1e400 is above 999999"),
        (["0", str(MAX_CLASSES)], "line 3: label 1000000 is above 999999"),
        (["0", "-1e400"], "line 3: label -1e400 is negative"),
        (["0", ""], "line 3: '' is no class name"),
        (["0", " "], "line 3: ' ' is no class name"),
    ],
)
def test_labels_that_are_neither_are_refused_with_their_line(tmp_path, labels, words):
    for column in ("label", "labels")[: 1 if "" in labels or " " in labels else 2]:
        with pytest.raises(InputError, match=rf"list\.csv: {words}"):
            read_table(tmp_path, labels, column)


def test_every_sign_of_a_missing_value_is_none_among_numbers(capsys):
    """Among names those of not-a-number are none; of the others a line tells."""
    nan = ["nan", "NaN", "+nan", "-nan", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"]
    others = ["inf", "+inf", "-inf", "infinity", "+Infinity", "-infinity", "na", "n/a", "#N/A", "#NA", "<NA>", "NaT"]
    others += ["null", "NULL", "nil", "none", "?", "-", "--", "."]
    for text in (*nan, *others):
        with pytest.raises(InputError, match=rf"line 3: label {re.escape(repr(text))} is no number, as 0 is"):
            number_classes("x", {"0": "line 2", text: "line 3"})
        if text in nan:
            with pytest.raises(InputError, match=rf"line 3: label {re.escape(repr(text))} is no class name"):
                number_classes("x", {"cat": "line 2", text: "line 3"})
    assert capsys.readouterr().err == ""
    for text in others:
        assert set(number_classes("x", {"cat": "line 2", text: "line 3"})[0]) == {"cat", text}
        assert capsys.readouterr().err == f"warning: x: the class {text!r} is named as tables write a missing value\n"


@pytest.mark.parametrize("text", ['"10"', "(10)", "'10'"])
def test_numbers_in_quotes_or_parentheses_are_no_names(text):
    with pytest.raises(InputError, match=r"x: line 2: label .* is a number in a notation that is not read"):
        number_classes("x", {text: "x: line 2"})


def test_numbers_of_which_a_sample_may_have_several_are_in_numeric_order(tmp_path):
    classes, samples = read_table(tmp_path, ["10|2.0", "900000.0", "", " "], "labels")
    assert classes == ("2", "10", "900000")
    rows = [np.frombuffer(sample.targets, np.float32).tolist() for sample in samples]
    assert rows == [[1, 1, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("given", [0, 0.0, False, {}])
def test_labels_of_a_jsonl_that_are_no_list_are_not_those_without_classes(tmp_path, given):
    table = tmp_path / "list.jsonl"

    def write(*rows):
        table.write_text("\n".join(json.dumps({"path": "a.jpg", "labels": labels}) for labels in rows))

    write(["ant"], [], None, "", given)
    with pytest.raises(InputError, match=rf"list\.jsonl: line 5: labels {given} is no list of class names"):
        csv_list.read(table)
    write(["ant"], [], None, "")
    targets = [np.frombuffer(sample.targets, np.float32) for sample in csv_list.read(table).splits["train"]]
    assert np.concatenate(targets).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("labels", "warned"), [(["ant;bee", "bee"], "'ant;bee'"), (["ant,bee"], "'ant,bee'"), (["ant;bee", "a|b"], "")]
)
def test_a_table_whose_classes_another_character_may_separate_is_told(tmp_path, labels, warned, capsys):
    classes, _ = read_table(tmp_path, labels, "labels")
    assert labels[0] in classes
    line = (
        f"warning: {tmp_path / 'list.csv'}: no image has several classes, and one is named {warned}; in the column "
    )
    line += "labels '|' separates them\n"
    assert capsys.readouterr().err == (line if warned else "")


@pytest.mark.long
def test_ids_in_place_of_labels_take_no_memory_of_rows_by_classes(tmp_path):
    classes, samples = read_table(tmp_path, [f"id{i}" for i in range(100_000)], "labels")  # 40 GB as an array
    assert len(classes) == len(samples) == 100_000
    assert np.flatnonzero(np.frombuffer(samples[70].targets, np.float32)).tolist() == [classes.index("id70")]


def test_lines_of_a_table_are_counted_as_editors_do(tmp_path):
    """With empty lines, and line breaks in a name."""
    for name, text, line in (
        ("list.csv", 'path,label\n\n"a\nb.jpg",1\n\nc.jpg,-1\n', 6),
        ("list.JSONL", '\n{"path": "a", "label": 1}\n\n{"label": -1, "path": "b"}\n', 4),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=rf"{name}: line {line}: label -1 is negative"):
            csv_list.read(tmp_path / name)


def test_numbers_of_a_jsonl_are_numbers_or_their_texts(tmp_path):
    table = tmp_path / "list.jsonl"
    rows = [[1, "2.5"], [-3.25, " \u0664 "], [3.4e38, "1e-3"]]
    lines = [{"split": "val", "path": "a.jpg", "age": age, "height": height} for age, height in rows]
    table.write_text("\n".join(map(json.dumps, lines)))
    for targets, columns in (("height,age", (1, 0)), ("*", (0, 1)), (" age ", (0,))):
        dataset = csv_list.read(table, targets)
        assert dataset.classes == tuple(("age", "height")[column] for column in columns)
        assert list(dataset.splits) == ["val"]
        wanted = np.array([[1, 2.5], [-3.25, 4], [3.4e38, 1e-3]], np.float32)[:, columns]
        found = [np.frombuffer(sample.targets, np.float32) for sample in dataset.splits["val"]]
        assert np.array_equal(found, wanted)
    for wrong in (True, None, [1], 1e39, -1e39, float("nan"), 10**400):
        table.write_text(json.dumps({"path": "a.jpg", "age": wrong}))
        with pytest.raises(InputError, match=r"line 1: age is .*, not a finite number"):
            csv_list.read(table, "age")


def test_the_rows_of_each_split_have_their_own_labels_and_targets(tmp_path):
    (tmp_path / "list.csv").write_text(
        "split,label,age,path\nval,b,1,1.jpg\ntrain,a,2,2.jpg\nval,c,3,3.jpg\ntrain,b,4,4.jpg\n"
    )
    dataset = csv_list.read(tmp_path / "list.csv")
    found = {name: [(sample.name, sample.label) for sample in split] for name, split in dataset.splits.items()}
    assert found == {"val": [("1.jpg", 1), ("3.jpg", 2)], "train": [("2.jpg", 0), ("4.jpg", 1)]}
    splits = csv_list.read(tmp_path / "list.csv", "age").splits
    ages = {name: [np.frombuffer(sample.targets, "<f4").item() for sample in split] for name, split in splits.items()}
    assert ages == {"val": [1, 3], "train": [2, 4]}


def test_names_of_columns_have_no_blanks_around(tmp_path):
    (tmp_path / "list.csv").write_bytes(b"\xef\xbb\xbfpath, label, split\r\na.jpg, 3,train\r\n")
    assert csv_list.read(tmp_path / "list.csv").splits["train"][0].label == 3


def test_a_path_keeps_its_line_breaks_and_a_jsonl_may_have_blank_lines(tmp_path):
    (tmp_path / "list.csv").write_bytes(b'path,label\r\n"a\r\nb.jpg",1\r\n')
    assert csv_list.read(tmp_path / "list.csv").splits["train"][0].name == "a\r\nb.jpg"
    (tmp_path / "list.jsonl").write_text('{"path": "a", "label": 1}\n \t\n{"label": 0, "path": "b"}\n  ')
    assert [sample.label for sample in csv_list.read(tmp_path / "list.jsonl").splits["train"]] == [1, 0]


def test_a_line_of_a_jsonl_with_more_keys_is_refused(tmp_path):
    (tmp_path / "list.jsonl").write_text('{"path": "a", "label": 1}\n{"path": "b", "label": 0, "split": "val"}\n')
    with pytest.raises(InputError, match="line 2 has other keys than line 1"):
        csv_list.read(tmp_path / "list.jsonl")


def collect(tmp_path, labels):
    with from_python.collect({"train": [(b".", label) for label in labels]}, tmp_path / "out") as dataset:
        return dataset.classes, [sample.label for sample in dataset.splits["train"]]


def test_a_class_named_as_a_missing_value_is_told(tmp_path, capsys):
    assert read_table(tmp_path, ["US", "NA"])[0] == ("NA", "US")
    assert "list.csv: the class 'NA' is named as tables write a missing value" in capsys.readouterr().err


def test_digits_alone_are_numbers_with_a_class_for_each_between_them(tmp_path):
    classes, samples = read_table(tmp_path, ["2", "0"])
    assert (classes, [sample.label for sample in samples]) == (("0", "1", "2"), [2, 0])


def test_labels_from_python(tmp_path):
    assert collect(tmp_path, [2, 0])[1] == [2, 0]
    assert collect(tmp_path, ["10", "2"]) == (tuple(map(str, range(11))), [10, 2])
    assert collect(tmp_path, ["b", "a"]) == (("a", "b"), [1, 0])
    for wrong, words in ((900_000_000, "above 999999"), (-1, "negative"), ("1.5", "not a whole number")):
        with pytest.raises(InputError, match=f"train: pair 1: label {wrong} is {words}"):
            collect(tmp_path, [type(wrong)(3), wrong])


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (("a.jpg", 10**5000), "train: pair 0: label of the type int is above 999999"),
        (("a.jpg", -(10**5000)), "train: pair 0: label of the type int is negative"),
        (("a\0.jpg", 0), r"train: pair 0 is \('a\\x00.jpg', 0\), not \(path or bytes"),
        (("\ud800.jpg", 0), r"train: pair 0 is \('\\ud800.jpg', 0\), not"),
        (("a.jpg", np.eye(2)), r"(?s)train: pair 0 has the label .* \(ndarray\), no number"),
        (("a.jpg", ["1", "2"]), r"train: pair 0 has the label \['1', '2'\] \(list\), no number"),
        (("a.jpg", np.array(["2020-01-01"], "M8[D]")), r"pair 0 has the label .* \(ndarray\), no number"),
        (("a.jpg", [1j]), r"pair 0 has the label \[1j\] \(list\), no number"),
    ],
    ids=["large", "negative", "NUL", "surrogate", "matrix", "texts", "dates", "complex"],
)
def test_pairs_that_are_none(tmp_path, pair, words):
    with pytest.raises(InputError, match=words):
        prepare_pairs([pair], tmp_path / "out")


def test_labels_of_splits_from_python_are_numbered_together(tmp_path):
    """The greatest number, and the first place of a name, may be in any of them."""

    def collected(splits, targets=""):
        with from_python.collect(splits, tmp_path / "out", targets) as dataset:
            return dataset.classes, {name: [s.label for s in split] for name, split in dataset.splits.items()}

    numbers = {"train": [(b".", 1)], "val": [(b".", np.int32(3)), (b"x", True)]}
    assert collected(numbers) == (tuple("0123"), {"train": [1], "val": [3, 1]})
    names = {"train": [(b".", "cow")], "val": [(b".", "bee"), (b"x", "cow")]}
    assert collected(names) == (("bee", "cow"), {"train": [1], "val": [0, 1]})
    with pytest.raises(InputError, match="val: pair 1: label -1 is negative"):
        collected({"train": [(b".", "1")], "val": [(b".", "2"), (b".", "-1")]})
    with pytest.raises(InputError, match="labels are both numbers and names"):
        collected({"train": [(b".", 1)], "val": [(b".", "1")]})
    with pytest.raises(InputError, match="targets 'age': the labels are classes; give each sample one float"):
        collected(numbers, "age")
    with pytest.raises(InputError, match="the samples of one split have 0 targets, those of another 2"):
        collected({"train": [(b".", [1, 2])], "val": [(b".", 1)]})
    assert collect(tmp_path, ["12", "10"]) == (tuple(map(str, range(13))), [12, 10])  # of one width, and no codes


def test_targets_from_python_are_each_samples_own(tmp_path):
    """Floats of any type, several numbers, or whether there is a class."""
    for labels, rows in (
        ([1.5, np.float32(-2)], [[1.5], [-2]]),
        ([[1, 2.5], np.array([3, 4], np.int8)], [[1, 2.5], [3, 4]]),
        ([[True, False], (False, True)], [[1, 0], [0, 1]]),
        ([np.float64(3.4e38), 0.0], [[np.float32(3.4e38)], [0]]),
        ([[Fraction(1, 2), 1], [0, Decimal("0.25")]], [[0.5, 1], [0, 0.25]]),
    ):
        with from_python.collect({"val": [(b"", label) for label in labels]}, tmp_path / "out") as dataset:
            assert dataset.classes == tuple(map(str, range(len(rows[0]))))
            assert [np.frombuffer(s.targets, "<f4").tolist() for s in dataset.splits["val"]] == rows
            assert [sample.label for sample in dataset.splits["val"]] == [-1, -1]
            assert dataset.targets
    for right, wrong in (([1.0], [1e39]), ([1, 2], [0.0, float("-inf")])):
        with pytest.raises(InputError, match=r"train: pair 1 has the targets .* not finite numbers"):
            collect(tmp_path, [right, wrong])
    for labels, words in (
        ([[1, 2], [3, 4, 5]], "pair 1 has 3 targets, and those before it have others"),
        ([[1, 2], 3], "pair 1 has 0 targets"),
        ([3, [1.0]], "pair 1 has 1 targets"),
        ([[1], [2], [3, 4]], "pair 2 has 2 targets"),
        ([[]], r"pair 0 has the targets \[\], not finite numbers"),
    ):
        with pytest.raises(InputError, match=f"train: {words}"):
            collect(tmp_path, labels)


def test_names_of_targets_from_python(tmp_path):
    def names(given):
        with from_python.collect({"train": [(b".", [1, 2])]}, tmp_path / "out", given) as dataset:
            return dataset.classes

    assert names(" age, height") == ("age", "height")
    for wrong in ("age,", "age, age", "age"):
        with pytest.raises(InputError, match=f"targets '{wrong}': the samples have 2; name each once"):
            names(wrong)


def test_splits_from_python(tmp_path):
    for splits, words in (
        (("train", "Train"), "split 'train' differs from 'Train' in case alone"),
        (("stra\u00dfe", "STRASSE"), "differs from 'STRASSE' in case alone"),
        (("x" * 101,), "split 'xxx.* is no name such as train"),
        (("a\nb",), r"split 'a\\nb' is no name"),
        (("\u00e9" * 51,), r"split '\u00e9.* is no name"),  # 102 bytes
    ):
        with pytest.raises(InputError, match=words):
            prepare_pairs({split: [(b"", 0)] for split in splits}, tmp_path / "out")
    for split in ("x" * 100, "\u00e9" * 50, "_1"):
        check_split("", split, [split, "train"])


def test_the_largest_label_is_one_less_than_the_number_of_classes(tmp_path):
    assert [check_label("x", label) for label in (0, 999_999, 7.0)] == [0, 999_999, 7]
    assert isinstance(check_label("x", 7.0), int)
    with pytest.raises(InputError, match="x: label 1000000 is above 999999"):
        check_label("x", 1_000_000)
    with pytest.raises(InputError, match="x: label 0x3 is not a whole number"):
        check_label("x", 3.5, "0x3")


def test_classes_of_one_name(tmp_path, capsys):
    with pytest.raises(InputError, match=r"x: names the class 'crane' twice \(classes 0 and 2\); rename one"):
        check_names("x", ("crane", "duck", "crane"))
    with pytest.raises(InputError, match=r"x: names the class .* twice, in two Unicode forms"):
        check_names("x", ("caf\u00e9", "cafe\u0301"))
    pairs = (
        ("A", "a"),
        ("b", "b "),
        ("c d", "c  d"),
        ("e", "e\u200b"),
        ("fi", "\ufb01"),
        ("G", "\uff27"),
        ("\u00df", "SS"),
    )
    check_names("x", (*sum(pairs, ()), "cd"))
    warned = "".join(
        f"warning: x: the classes {a!r} and {b!r} differ only in case, blanks or forms of characters\n"
        for a, b in pairs
    )
    assert capsys.readouterr().err == warned
    with pytest.raises(InputError, match="x: has 1000001 classes, more than 1000000"):
        check_names("x", ["a"] * (MAX_CLASSES + 1))
    with pytest.raises(InputError, match="x: has 1000001 classes"):
        number_classes("x", {str(i): "" for i in range(MAX_CLASSES + 1)})


def test_there_may_be_as_many_classes_as_the_limit_says(monkeypatch):
    monkeypatch.setattr("widemix.data_prep.labels.MAX_CLASSES", 3)
    check_names("x", "abc")
    assert number_classes("x", dict.fromkeys("cab", ""))[0] == ("a", "b", "c")
    assert number_classes("x", {"2": ""})[0] == ("0", "1", "2")
    with pytest.raises(InputError, match="has 4 classes, more than 3"):
        number_classes("x", dict.fromkeys("abcd", ""))


def test_every_source_is_checked_for_them(tmp_path, jpeg):
    for name in ("caf\u00e9", "cafe\u0301"):
        (tmp_path / "in/train" / name).mkdir(parents=True)
        (tmp_path / "in/train" / name / "1.jpg").write_bytes(jpeg(0))
    assert len(image_folder.read(tmp_path / "in").classes) == 2
    with pytest.raises(InputError, match=r"in: names the class .* twice, in two Unicode forms"):
        read_source("image-folder", tmp_path / "in", PrepSettings())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"crane\nduck\ncrane\n", r"names the class 'crane' twice \(classes 0 and 2\)"),
        (b"cat\n\nowl\n", "line 2 is empty, and each line names a class"),
        (b"\ncat\nowl\n", "line 1 is empty, and each line names a class"),
        (b"caf\xe9\n", "cannot be read as UTF-8"),
    ],
)
def test_lists_of_names_that_would_shift_or_merge_classes(tmp_path, data, words):
    (tmp_path / "classes.txt").write_bytes(data)
    with pytest.raises(InputError, match=rf"classes\.txt: {words}"):
        read_names(tmp_path / "classes.txt")


def test_lists_of_names(tmp_path):
    (tmp_path / "classes.txt").write_bytes(b"\xef\xbb\xbfcat \r\nfish\xe2\x80\xa8owl\r\n\r\n")
    assert read_names(tmp_path / "classes.txt") == ("cat", "fish\u2028owl")
    (tmp_path / "classes.txt").write_bytes(b"\n")
    assert read_names(tmp_path / "classes.txt") == ()


def test_a_table_of_pandas_floats_is_stored_by_number(tmp_path, jpeg):
    for i in range(12):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg(i))
    read_table(tmp_path, [f"{i}.0" for i in range(12)])
    prepare("csv", tmp_path / "list.csv", tmp_path / "out", PrepSettings(), processes=1)
    assert open_beton(tmp_path / "out/train.beton").label.tolist() == list(range(12))


def test_a_table_without_labels_names_the_columns_that_may_be_targets(tmp_path):
    for columns, cure in (
        ("path,x,split,y", "; name columns of numbers with --targets: x, y"),
        ("path,split", ""),
    ):
        (tmp_path / "list.csv").write_text(f"{columns}\n" + ",".join("a" for _ in columns.split(",")) + "\n")
        with pytest.raises(InputError) as caught:
            csv_list.read(tmp_path / "list.csv")
        assert str(caught.value) == f"{tmp_path / 'list.csv'}: has no column 'label' or 'labels'{cure}"

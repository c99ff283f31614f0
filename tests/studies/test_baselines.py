"""Baselines of a prepared folder: one row for each, and the points of a study that are below the linear one."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

from tests.studies.conftest import runs_of
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.formats.manifest import read_manifest
from widemix.studies.baselines import FILE, Baseline, baseline_lines, measure, points_below, read_baselines
from widemix.studies.points import Result
from widemix.studies.study import read_study
from widemix.studies.study_page import write_report

STUDY = """
title: Widths
source: ours
runs: [{{label: Normal, recipes: {{Digits: {recipe}}}, set: {{{keys}}}, axes: {{model.channels: [8, 16]}}}}]
figure: {{x: width}}
"""


@pytest.fixture
def runs(digits, tmp_path):
    return runs_of(tmp_path, STUDY.format(recipe="digits/s_mixer", keys=f"data.path: {digits}"))


def test_the_command_adds_a_row_for_each_data_set_once(runs, digits, tmp_path, widemix):
    for expected in (f"on `{digits.name}` the most frequent class has", ""):
        code, said = widemix("study", "baselines", tmp_path / "study.yaml", "--report", tmp_path / "results")
        assert (code, said.startswith(expected), bool(said)) == (0, True, bool(expected))
    [line] = (tmp_path / "results" / FILE).read_text().splitlines()
    row = json.loads(line)
    splits = read_manifest(digits).splits
    train, test = splits["train"].per_class, splits[row["split"]].per_class
    assert row["majority"] == pytest.approx(100 * test[int(np.argmax(train))] / sum(test), abs=0.01)
    assert row["samples"] == sum(train) < len(load_digits().target)
    assert row["features"] == "pixels"
    assert 90 < row["linear"] < 100  # scikit-learn's page on these digits: 95 to 97 % for linear models
    assert list(read_baselines(tmp_path / "results")) == [(digits.name, row["split"])]


def results_of(runs, *top1s):
    return [Result(run, 0.0, {"top1": top1}) for run, top1 in zip(runs, top1s, strict=True)]


@pytest.fixture
def row(runs, digits, tmp_path):
    """Of the digits, 60 % by logistic regression, in the folder of the results."""
    row = Baseline(digits.name, runs[0].recipe.data.eval_split, 1437, "pixels", 10.0, 60.0, 0.01, 2.0, "2026-11-25")
    (tmp_path / FILE).write_text(json.dumps(vars(row)) + "\n")
    return row


@pytest.mark.parametrize("top1s", [(59.0, 61.0), (59.99, 60.0), (60.0, 59.99), (60.0, 60.0)])
def test_points_below_the_linear_baseline_are_named(runs, row, tmp_path, top1s):
    results = results_of(runs, *top1s)
    below = [at for at, top1 in enumerate(top1s) if top1 < 60]  # one that is as good is not
    assert points_below(results, tmp_path) == {runs[at].point for at in below}
    known, *lines = baseline_lines(results, tmp_path)
    assert f"on `{row.data}` the most frequent class has 10.00 % top-1" in known
    assert lines == [
        "Below logistic regression, and so no result of a network: "
        f"Normal on `{row.data}`, model.channels {(8, 16)[at]} ({top1s[at]:.2f} %)."
        for at in below
    ]
    study = read_study(tmp_path / "study.yaml")
    page = write_report(results, study, tmp_path / "study.yaml", tmp_path)[3].read_text()
    assert "\n\n{}\n\n".format("\n\n".join([known, *lines])) in page


def test_points_are_means_of_what_has_not_diverged(runs, row, tmp_path):
    seeds = [replace(runs[0], seed=number) for number in range(3)]
    assert points_below(results_of(seeds, 50.0, math.nan, 69.9), tmp_path) == {runs[0].point}
    assert len(baseline_lines(results_of(runs[:1], math.nan), tmp_path)) == 1


def test_few_points_are_named_and_many_counted(runs, row, digits, tmp_path):
    moved = results_of([replace(runs[0], varied=(("data.path", str(digits)), ("optim.lr", "3")))], 1.0)
    assert f"Normal on `{row.data}`, optim.lr 3 (1.00 %)." in baseline_lines(moved, tmp_path)[1]
    many = results_of([replace(runs[0], varied=(("optim.lr", str(n)),)) for n in range(1, 10)], *[59.0] * 9)
    assert baseline_lines(many, tmp_path)[1].endswith("no result of a network: 9 of 9 points.")
    assert f"Normal on `{row.data}`, optim.lr 8 (59.00 %)." in baseline_lines(many[:8], tmp_path)[1]


def test_data_without_a_baseline_is_named_alone(runs, row, tmp_path):
    results = results_of(runs, 59.0, 61.0)
    [other] = results_of([replace(runs[0], shared=(("data.path", "far/other"),), line="Far")], 1.0)
    missing, *lines = baseline_lines([other, *results], tmp_path)
    assert f"is known of `other`, {row.split}: " in missing
    assert lines == baseline_lines(results, tmp_path)  # of other's points nothing is said
    assert points_below(results, tmp_path / "none") == set()
    assert baseline_lines(results, tmp_path / "none") == [
        f"No linear baseline is known of `{row.data}`, {row.split}: `widemix study baselines STUDY.yaml` computes it."
    ]


def test_of_text_the_words_are_counted_without_padding(tmp_path):
    numbers, texts, classes = np.random.RandomState(4), {}, {}
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{letter}" for letter in "abcdefghij")]
    (tmp_path / "source").mkdir()
    (tmp_path / "source/vocab.txt").write_text("\n".join(vocabulary) + "\n")
    for split, count in (("train", 60), ("dev_matched", 24)):
        rows, texts[split], classes[split] = ["gold_label\tsentence1\tsentence2"], [], []
        for number in range(count):
            first, second = (" ".join(numbers.choice(vocabulary[4:], numbers.randint(1, 9))) for _ in range(2))
            rows.append(f"{('entailment', 'neutral', 'contradiction')[number % 3]}\t{first}\t{second}")
            texts[split].append(f"[CLS] {first} [SEP] {second} [SEP]")
            classes[split].append(number % 3)
        (tmp_path / f"source/{split}.tsv").write_text("\n".join(rows) + "\n")
    prepare("mnli", tmp_path / "source", tmp_path / "prepared", PrepSettings(length=48))
    keys = f"data.path: {tmp_path / 'prepared'}, data.eval_split: dev_matched"
    row = measure(runs_of(tmp_path, STUDY.format(recipe="mnli/mixer", keys=keys))[0])
    counter = CountVectorizer(tokenizer=str.split, token_pattern=None, lowercase=False, vocabulary=vocabulary)
    counts = {split: counter.transform(own) for split, own in texts.items()}
    model = LogisticRegression(C=row.penalty, max_iter=200).fit(counts["train"], classes["train"])
    assert row.features == "counts of words"
    fits = train_test_split(
        counts["train"], classes["train"], test_size=0.2, stratify=classes["train"], random_state=0
    )
    scores = {
        c: LogisticRegression(C=c, max_iter=200).fit(fits[0], fits[2]).score(fits[1], fits[3])
        for c in (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    }
    assert row.penalty == max(scores, key=scores.__getitem__) == 0.1
    assert (row.data, row.split) == ("prepared", "dev_matched")
    assert row.linear == round(100 * model.score(counts["dev_matched"], classes["dev_matched"]), 2)
    assert (row.samples, row.majority) == (60, 33.33)

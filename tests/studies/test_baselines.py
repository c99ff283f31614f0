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

from tests.conftest import ROOT
from widemix.cli.parser import make_parser
from widemix.command_line.commands import run_command
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.formats.manifest import read_manifest
from widemix.studies.baselines import FILE, Baseline, baseline_lines, measure, points_below, read_baselines
from widemix.studies.page import write_report
from widemix.studies.results import Result
from widemix.studies.study import read_study, study_runs_of

STUDY = """
title: Widths
source: ours
runs:
- label: Normal
  recipes: {{Digits: {root}/recipes/digits/s_mixer.yaml}}
  set: {{data.path: {digits}}}
  axes: {{model.channels: [8, 16]}}
figure: {{x: width}}
"""


@pytest.fixture
def study(digits, tmp_path):
    path = tmp_path / "widths.yaml"
    path.write_text(STUDY.format(root=ROOT, digits=digits))
    return path


def test_the_command_adds_a_row_for_each_data_set_once(study, digits, tmp_path, capsys):
    words = ["study", "baselines", str(study), "--report", str(tmp_path / "results")]
    for expected in ("the most frequent class has", ""):
        assert run_command(make_parser(), argv=words) == 0
        assert capsys.readouterr().out.startswith(f"on `{digits.name}` {expected}" if expected else "")
    [line] = (tmp_path / "results" / FILE).read_text().splitlines()
    row = json.loads(line)
    splits = read_manifest(digits).splits
    train, test = splits["train"].per_class, splits[row["split"]].per_class
    assert row["majority"] == pytest.approx(100 * test[int(np.argmax(train))] / sum(test), abs=0.01)
    assert row["samples"] == sum(train) < len(load_digits().target)
    assert row["features"] == "pixels"
    assert 90 < row["linear"] < 100  # scikit-learn's page on these digits: 95 to 97 % for linear models
    assert list(read_baselines(tmp_path / "results")) == [(digits.name, row["split"])]


def test_points_below_the_linear_baseline_are_named(study, digits, tmp_path):
    runs = study_runs_of(study, read_study(study))
    split = runs[0].recipe.data.eval_split
    row = Baseline(digits.name, split, 1437, "pixels", 10.0, 60.0, 0.01, 2.0, "2026-11-25")
    (tmp_path / FILE).write_text(json.dumps(vars(row)) + "\n")
    results = [Result(run, 0.0, {"top1": top1}) for run, top1 in zip(runs, (59.0, 61.0), strict=True)]
    first, second = baseline_lines(results, tmp_path)
    assert f"on `{digits.name}` the most frequent class has 10.00 % top-1" in first
    assert second == (
        "Below logistic regression, and so no result of a network: "
        f"Normal on `{digits.name}`, model.channels 8 (59.00 %)."
    )
    assert points_below(results, tmp_path) == {runs[0].point}
    page = write_report(results, read_study(study), study, tmp_path)[3].read_text()
    assert f"\n\n{first}\n\n{second}\n\n" in page
    for tops, below in (((60.0, 59.99), {runs[1].point}), ((59.99, 60.0), {runs[0].point})):
        own = [Result(run, 0.0, {"top1": top1}) for run, top1 in zip(runs, tops, strict=True)]
        assert points_below(own, tmp_path) == below  # one that is as good is not
    seeds = [Result(replace(runs[0], seed=n), 0.0, {"top1": top1}) for n, top1 in enumerate((50.0, math.nan, 69.9))]
    assert points_below(seeds, tmp_path) == {runs[0].point}  # by the mean of those that have not diverged
    moved = Result(replace(runs[0], varied=(("data.path", str(digits)), ("optim.lr", "3"))), 0.0, {"top1": 1.0})
    assert f"Normal on `{digits.name}`, optim.lr 3 (1.00 %)." in baseline_lines([moved], tmp_path)[1]
    many = [Result(replace(runs[0], varied=(("optim.lr", str(n)),)), 0.0, {"top1": 59.0}) for n in range(1, 10)]
    assert baseline_lines(many, tmp_path)[1].endswith("no result of a network: 9 of 9 points.")
    assert f"Normal on `{digits.name}`, optim.lr 8 (59.00 %)." in baseline_lines(many[:8], tmp_path)[1]
    other = Result(replace(runs[0], shared=(("data.path", "far/other"),), line="Far"), 0.0, {"top1": 1.0})
    missing, known, below = baseline_lines([other, *results], tmp_path)
    assert f"is known of `other`, {split}: " in missing
    assert (known, below) == (first, second)  # of other's points nothing is said
    assert points_below(results, tmp_path / "none") == set()
    assert len(baseline_lines(results[1:], tmp_path)) == 1
    assert len(baseline_lines([Result(runs[0], 0.0, {"top1": math.nan})], tmp_path)) == 1
    assert baseline_lines(results, tmp_path / "none") == [
        f"No linear baseline is known of `{digits.name}`, {split}: `widemix study baselines` computes it."
    ]


TEXT = """
title: Sentences
source: ours
runs:
- label: Text
  recipes: {{MNLI: {root}/recipes/mnli/mixer.yaml}}
  set: {{data.path: {folder}, data.eval_split: dev_matched}}
figure: {{x: width}}
"""


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
    path = tmp_path / "text.yaml"
    path.write_text(TEXT.format(root=ROOT, folder=tmp_path / "prepared"))

    [run] = study_runs_of(path, read_study(path))
    row = measure(run)
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

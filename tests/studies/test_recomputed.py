"""The verdicts of the committed page, computed again from the rows by scipy alone: nothing of widemix is imported."""

import csv
import functools
import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "recipes/studies/results"
PAGE = (ROOT / "docs/results.md").read_text()
WORDS = (
    "supported",
    "contradicted",
    "undecided",
    "regime not reached",
    "below a linear baseline",
    "with a diverged run",
)
BASELINES = {
    (row["data"], row["split"]): row["linear"]
    for row in map(json.loads, (TABLES / "baselines.jsonl").read_text().splitlines())
}


@functools.cache
def study(name):
    """Its file, and its runs: those of the CSV table with the numbers of their rows."""
    text = yaml.safe_load((ROOT / f"recipes/studies/{name}.yaml").read_text())
    rows = {row["run"]: row for row in map(json.loads, (TABLES / f"{name}.jsonl").read_text().splitlines())}
    axes = {key for group in text["runs"] for axis in group.get("axes", {}) for key in axis.split(", ")}
    runs = []
    for line in csv.DictReader((TABLES / f"{name}.csv").read_text().splitlines()):
        row = rows[line["run"]]
        data = re.search(r"--data\.path=(\S+)", row["recipe"])
        path = data[1] if data else {"MNIST": "mnist", "far pairs": "far-pairs"}.get(line["panel"], "cifar10")
        values = {"error": 100 - row["metrics"]["top1"]} if row["state"] == "done" else {}
        values |= row["metrics"] if row["state"] == "done" else {}
        at = {key: line[key] for key in axes if line[key]}
        keys = {"seed": row["seed"], "data": (Path(path).name, row["split"]), "values": values}
        runs.append(
            {"line": line["line"], "panel": line["panel"], "at": at, "x": line.get(text["figure"]["x"])} | keys
        )
    return text, runs


def is_at(run, place):
    def text(value):
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    return run["line"] == place["line"] and all(
        re.sub(r"^\[|\]$|^datasets/", "", run["at"][key]) in (text(value), f"{value}")
        or number(run["at"][key], value)
        for key, value in place.get("at", {}).items()
    )


def number(text, value):
    return isinstance(value, (int, float)) and float(text) == value


def below(runs):
    """The points, by line and values, whose mean top-1 is below logistic regression."""
    points = {}
    for run in runs:
        if run["values"]:
            points.setdefault((run["panel"], run["line"], *sorted(run["at"].items())), []).append(run)
    means = {point: np.mean([run["values"]["top1"] for run in own]) for point, own in points.items()}
    return {point for point, own in points.items() if means[point] < BASELINES.get(own[0]["data"], -1)}


def contrast(claim, runs, y):
    """The word without a test, or the values of both sides and their differences, by seed."""
    lost, places = below(runs), [claim[side] for side in ("left", "right", "slope") if side in claim]
    own = [[run for run in runs if is_at(run, place)] for place in places]
    assert all(own), claim["text"]
    beaten = [
        run["at"] for run in itertools.chain(*own) if (run["panel"], run["line"], *sorted(run["at"].items())) in lost
    ]
    kept = [[run for run in side if run["at"] not in beaten] for side in own]
    if not all(kept):
        return "below a linear baseline", None
    if any(not run["values"] for run in itertools.chain(*kept)):
        return "with a diverged run", None
    means = [
        {
            seed: np.mean([run["values"][y] for run in side if run["seed"] == seed])
            for seed in {r["seed"] for r in side}
        }
        for side in kept
    ]
    values = np.array([[side[seed] for seed in sorted(means[0])] for side in means])
    values = np.stack([*values, values[0] - values[1]])
    for condition in claim.get("regime", []):
        rows = [run["values"] for run in runs if is_at(run, condition) and run["values"]]
        mean = np.mean([row[condition["y"]] - row.get(condition.get("minus"), 0) for row in rows])
        if not condition.get("below", math.inf) > mean > condition.get("above", -math.inf):
            return "regime not reached", values
    return "", values


def p_and_word(claim, values):
    """The p value, two-sided, and the word it would have."""
    margin, expect = claim.get("margin", 0), claim["expect"]

    def one_sided(border, side):
        return stats.ttest_1samp(values, border, alternative=side).pvalue

    if expect == "equal":
        holds = max(one_sided(-margin, "greater"), one_sided(margin, "less"))
        fails = one_sided(margin, "greater") if np.mean(values) > 0 else one_sided(-margin, "less")
    else:
        sign, up, down = (-1, "less", "greater") if expect.endswith("less") else (1, "greater", "less")
        holds, fails = one_sided(0, up), one_sided(sign * margin, down)
        if expect.startswith("not"):
            holds, fails = one_sided(sign * margin, down), one_sided(sign * margin, up)
        elif max(holds, fails) < 0.025:
            holds = 1
    return min((min(1, 2 * holds), "supported"), (min(1, 2 * fails), "contradicted"))


def holm(found):
    """Of (p, word) or None: p by Holm's correction, and the word that is left."""
    order = sorted((p, at) for at, one in enumerate(found) if one for p in one[:1])
    corrected, greatest = [None] * len(found), 0.0
    for rank, (p, at) in enumerate(order):
        greatest = max(greatest, min(1.0, p * (len(found) - rank)))
        corrected[at] = (greatest, found[at][1] if greatest < 0.05 else "undecided")
    return corrected


@functools.cache
def recomputed(name):
    """For each claim, in each panel: its text, values, p and word."""
    text, runs = study(name)
    panels = list(dict.fromkeys(run["panel"] for run in runs))
    rows = []
    for claim in text["claims"]:
        for panel in [claim["panel"]] if "panel" in claim else panels:
            own = [run for run in runs if run["panel"] == panel]
            word, values = contrast(claim, own, claim.get("y", text["figure"].get("y", ["error"])[0]))
            rows.append([claim, word, values])
    ps = holm([None if word else p_and_word(claim, values[-1]) for claim, word, values in rows])
    return [(claim, values, *(p or (None, word))) for (claim, word, values), p in zip(rows, ps, strict=True)]


LINES = [line for line in PAGE.splitlines() if line.startswith("| ")]
NAMES = list(dict.fromkeys(name for line in LINES for name in re.findall(r"\[([^\]]*)\]\([^()]*\.md\)", line)))


assert len(NAMES) > 20  # those whose runs have ended


def cells_of(name):
    """The rows of a study on the page, those of papers and ours: word, difference, interval, p and seeds of each."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in LINES if f"/{name}.md)" in line]
    return (iter([[cell.strip() for cell in row[1:6]] for row in rows if len(row) == count]) for count in (12, 10))


@pytest.mark.parametrize("name", NAMES)
def test_each_row_of_the_page_is_what_scipy_finds(name):
    papers, ours = cells_of(name)
    left = Counter(word for _, values, _, word in recomputed(name) if values is None)
    for word, count in left.items():
        assert re.search(rf"numbers: .*{count} of \[{name}\]\(\S+\) \({word}\)", PAGE), (name, word)
    for claim, values, p, word in recomputed(name):
        if values is not None:
            said, difference, interval, *numbers = next(papers if "place" in claim else ours)
            left, right, mean = values.mean(1)
            low, high = stats.t.interval(0.95, len(values[-1]) - 1, mean, stats.sem(values[-1]))
            assert difference.partition(": ")[2] == f"{left:#.4g} - {right:#.4g} = {mean:+.3g}", claim
            assert [interval, *numbers[1:]] == [f"{low:+.3g} to {high:+.3g}", str(len(values[-1]))], claim
            assert numbers[0] == ("" if p is None else f"{p:.2g}"), claim
            assert word in said, claim
    assert [*papers, *ours] == []


def test_the_counts_of_statements_are_those_of_the_page():
    """Of statements that papers' figures have in their studies: each once, at the study listed first."""
    papers = yaml.safe_load((ROOT / "recipes/papers.yaml").read_text())
    listed = [name for paper in papers for entry in paper["entries"] for name in entry.get("studies", [])]
    counted = {}
    for name in (name for name in listed if name in NAMES):
        for claim, *_, word in recomputed(name):
            if "place" in claim and word in WORDS[:4]:
                counted.setdefault((claim["place"], claim["text"]), word)
    checks = [check for paper in papers for entry in paper["entries"] for check in entry.get("checks", [])]
    analyses = [re.search(rf"\| {re.escape(check['text'][:75])}.*", PAGE)[0] for check in checks if "place" in check]
    words = Counter([*counted.values(), *(re.search(r"\*\*(\w+)", line)[1] for line in analyses)])
    said = re.search(r"Of (\d+) statements of the papers, tried in the small: (.*?); corrected", PAGE)
    assert said[1] == str(words.total())
    assert said[2] == ", ".join(f"{words[word]} {word}" for word in WORDS[:4] if words[word])

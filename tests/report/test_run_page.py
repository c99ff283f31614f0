"""The page of runs: it shows what the run folder says, needs nothing else, and lets nobody's words become HTML.

golden/ has what pages show, as text: `pytest --regenerate` writes it anew; look at the diff.
"""

import base64
import html
import json
import math
import re
import time
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from tests.conftest import ROOT
from widemix.cli.commands import run_command
from widemix.cli.parser import make_parser
from widemix.metrics import METRICS
from widemix.plots.chart import STYLES, Series, line_chart, thinned, tick_labels, ticks
from widemix.recipe import dump_recipe, load_recipe
from widemix.report.run import chip, formatted, short_paths
from widemix.run.records import is_number

EVIL = "<script>alert('x')</script>\"'&"
CHARTED = ["loss", "lr", "grad_norm", "weight_norm", "images_per_s", "mfu", "data_wait", "memory_gib", "replaced"]
TRAIN, EVAL, EVENT = {"split": "train", "loss": 1.0}, {"split": "eval", "loss": 2.0}, {"split": "event"}


def write_run(folder, lines, keys=(), images=(), starts=(), **files):
    """A run of digits/mixer with these lines; files: JSON by name."""
    (folder / "images").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(dump_recipe(load_recipe("digits/mixer", keys)))
    for name, own in (("metrics", lines), ("starts", starts)):
        if own:
            text = "".join(f"{json.dumps(line)}\n" for line in own)
            (folder / f"{name}.jsonl").write_text(f'{text}{{"step": 41, "spl')  # killed while writing
    for name, content in ({"environment": {}} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    for name in images:
        (folder / f"images/{name}.png").write_bytes(name.encode())
    return folder


def page_of(tmp_path, *runs) -> str:
    assert run_command(make_parser(), None, ["report", *map(str, runs), "--to", str(tmp_path / "page.html")]) == 0
    return (tmp_path / "page.html").read_text()


def shown(page: str) -> str:
    """What a page shows, as text: headings, rows of tables, curves with their points, images, and what is folded."""
    plain = re.sub(r"<(script|style)>.*?</\1>|<meta [^>]*>", "", page.partition("\n")[2], flags=re.S)
    root = ElementTree.fromstring(re.sub(r"<(input|img)\b([^>]*?)(?: checked)?>", r"<\1\2/>", plain))
    lines: list[str] = []

    def text(element) -> str:
        own = element.get("class", "")
        mark = f"[{own}]" if own.startswith("chip") else ""
        parts = [mark, element.text or "", *(text(child) + (child.tail or "") for child in element)]
        return "".join(parts)

    def walk(element):
        tag, own = element.tag, element.get("class", "")
        if tag == "tr":
            shades = [cell.get("style", "") for cell in element]
            cells = [
                f"{text(cell)} {shade.rpartition(',')[2][:-1]}".strip() if shade else text(cell)
                for cell, shade in zip(element, shades, strict=True)
            ]
            lines.append(f"| {' | '.join(cells)} |")
        elif tag == "svg":
            lines.append(f"{own}: {element.get('aria-label')}")
            for curve in element.iter("polyline"):
                points = zip(curve.get("data-x", "").split(), curve.get("data-y", "").split(), strict=True)
                pairs = " ".join(f"({x}, {y})" for x, y in points)
                lines.append(f"  {curve.get('data-name')} ({curve.get('class')}): {pairs}")
        elif tag == "img":
            data = base64.b64decode(element.get("src", "").removeprefix("data:image/png;base64,"))
            lines.append(f"image {data!r}: {element.get('alt')}")
        elif tag in ("h1", "h2", "h3", "p", "summary", "figcaption", "label") or own in ("bar", "legend"):
            lines.append(f"{'' if tag == 'div' else f'{tag} '}{own}: {text(element).strip()}")
        elif tag == "pre":
            lines.append(f"pre: {text(element).splitlines()[0]} ...")
        else:
            for child in element:
                walk(child)

    walk(root)
    return re.sub(r"(report on|last line) \d[^.|]*\b", r"\1 TIME", "\n".join(lines)) + "\n"


def everything(folder):
    """One run with every metric, event, evaluation, confusion, image and start that a page shows."""
    lines = []
    for step in (1, 2):
        train = {name: step + at / 32 for at, name in enumerate(CHARTED)}
        evaluated = {name: step + at / 32 for at, name in enumerate([*METRICS, "ema_loss", "ema_top1", "ema_top5"])}
        both = {"step": step, "epoch": step / 2, "time": 5.0 + step}
        lines.append(TRAIN | both | train | {"grad_norm/blocks.0": step * 10.0, "grad_norm/head": step * 20.0})
        lines.append(EVAL | both | evaluated | {"zero_weights": 5.0 * step, "own": step / 3})
    lines += [EVAL | {"step": 3, "epoch": 12.25, "time": 8.0, "loss": value} for value in (None, math.nan)]
    lines += [
        EVENT | {"step": 1500, "event": "save_failed", "reason": f"no space {EVIL}", "time": 1.0},
        EVENT | {"step": 1600, "event": "save_failed", "reason": "none at all"},
        EVENT | {"step": 1700, "event": "evaluation_failed", "epoch": 3.0, "time": 2.0, "loss": math.inf},
    ]
    seconds = [{"imports": 2000.25, "first step": 1.5}, {EVIL: 3.0, "first step": 0.5}]
    starts = [{"time": 1e9, "step": 1, "ranks": 2, "seconds": seconds[0]}]
    starts.append({"time": 2e9, "step": 3, "seconds": seconds[1], "memory_layout": f"batch_last{EVIL}"})
    confusion = {"step": 3000, "classes": [EVIL, "b"], "counts": [[5, 1, 0], [2, 7, 4], [0, 0, 0]]}
    images = ("first_batch", "mistakes", "other")
    environment = {"ranks": 2, "device": EVIL, "commit": EVIL}
    return [write_run(folder / "<i>run", lines, [], images, starts, confusion=confusion, environment=environment)]


def compared(folder):
    """Two runs: one ended; the other, of numbers, went back to an earlier step and began without times."""
    one = [TRAIN | {"step": step, "epoch": min(step, 2.0), "images_per_s": 10.0 * step} for step in (1, 2, 9)]
    done = {"top1": 91.5, "loss": 0.5, "step": 9, "seconds": 5400.0, "recipe": "f"}
    environment = {"ranks": 4, "device": "cuda", "commit": 40 * "d"}
    steps = ((1, 0.5, {}), (601, 3.5, {"time": 20.0}), (602, 4.0, {"time": 900.0}), (301, 2.0, {"time": 1000.0}))
    other = [
        TRAIN | {"step": s, "epoch": epoch, "loss": float(s), "images_per_s": 1999.6} | at for s, epoch, at in steps
    ]
    keys = [
        ("data.targets", "regression"),
        ("train.loss", "mse"),
        ("augment.smoothing", "0"),
        ("optim.clip_grad", "null"),
    ]
    first = write_run(folder / "runs/old/one", one, done=done, environment={"ranks": 1, "commit": None})
    second = write_run(folder / "runs/two", [*other, EVAL | {"step": 5}], keys, ["mistakes"], environment=environment)
    return [first, second, first.parent / "../old/one"]  # each once


def many(folder):
    """Four runs, more than keys that differ: a row each; and confusions of fifty classes and of more."""
    runs, names = [], [f"c{number}" for number in range(50)]  # of 51 the last has none
    for number, count in enumerate((50, 51, 2, 0)):
        counts = np.diag(np.full(count, 50))
        if count > 2:
            counts[:25, 49] = np.arange(1, 26)
            counts[3, 4], counts[4, 3], counts[count - 1, 0] = 70, 1100, 90
        confusion = {"confusion": {"step": 1, "classes": names[:count], "counts": counts.tolist()}} if count else {}
        keys = [("train.seed", str(number)), ("model.depth", str(2 + number // 2))]
        runs.append(write_run(folder / f"{number}", [], keys, **confusion))
    return runs


def begun(folder):
    """Runs of one recipe that have only begun."""
    return [write_run(folder / name, []) for name in ("a/b/one", "a/two")]


@pytest.mark.parametrize("runs", [everything, compared, many, begun])
def test_a_page_shows_what_golden_has(runs, tmp_path, monkeypatch, request):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    found = shown(page_of(tmp_path, *runs(tmp_path)))
    path = ROOT / f"tests/report/golden/{runs.__name__}.txt"
    if request.config.option.regenerate:
        path.write_text(found)
    assert found == path.read_text()


def test_the_page_needs_no_other_file(tmp_path):
    [run] = everything(tmp_path)
    text = page_of(tmp_path, run)
    assert html.escape((run / "recipe.yaml").read_text()) in text
    assert html.escape(json.dumps(json.loads((run / "environment.json").read_text()), indent=1)) in text
    assert not re.search(r"https?:|@import|url\(|<[^>]* (href|srcset)=", text)
    assert html.escape(EVIL) in text
    assert EVIL not in text


@pytest.mark.parametrize(("count", "said"), [(600, False), (601, True)])
def test_a_note_says_that_long_curves_are_thinned(tmp_path, count, said):
    lines = [TRAIN | {"step": step, "images_per_s": 1.0} for step in range(1, count + 1)]
    page = page_of(tmp_path, write_run(tmp_path / "run", lines))
    assert ("Of curves with more than 600 points the extremes of 300 stretches" in page) is said


@pytest.mark.parametrize(
    ("seconds", "unit", "end"),
    [
        (299, "seconds", "299"),
        (300, "minutes", "5"),
        (7199, "minutes", f"{7199 / 60:.6g}"),
        (7200, "hours", "2"),
        (None, None, None),
    ],
)
def test_time_runs_in_a_unit_that_suits_its_length(tmp_path, seconds, unit, end):
    """Of lines that have no time there is none."""
    lines = [EVAL | {"step": step} | ({"time": 1e9 + step * seconds} if seconds else {}) for step in (0, 1)]
    found = shown(page_of(tmp_path, write_run(tmp_path / "run", lines)))
    assert "by-epoch" not in found
    by_time = f"by-time: Evaluation loss by {unit} since the first line\n  run (curve s0): (0, 2) ({end}, 2)\n"
    assert (by_time in found, "by-time" in found) == (bool(seconds), bool(seconds))


def test_long_curves_keep_their_extremes():
    rng = np.random.default_rng(0)
    points = list(enumerate(rng.standard_normal(5000).tolist()))
    points[1234], points[4321] = (1234, 99.0), (4321, -99.0)
    kept = thinned(points)
    assert len(kept) <= 600
    assert kept == sorted(kept)
    assert {points[1234], points[4321]} <= set(kept) <= set(points)
    assert thinned(points[:600]) == points[:600]


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 6, ["0", "2", "4", "6"]),
        (0.97, 1.043, ["0.98", "1.00", "1.02", "1.04"]),
        (0, 300_000, ["0", "1e5", "2e5", "3e5"]),
        (0, 3e12, ["0", "1e12", "2e12", "3e12"]),
        (0, 99_000, ["0", "20,000", "40,000", "60,000", "80,000"]),
        (0, 100_000, ["0", "2e4", "4e4", "6e4", "8e4", "1e5"]),
        (0, 1e-3, ["0.0000", "0.0002", "0.0004", "0.0006", "0.0008", "0.0010"]),
        (150_000, 152_000, ["1.5e5", "1.505e5", "1.51e5", "1.515e5", "1.52e5"]),
        (5.001e-4, 5.004e-4, ["0.0005001", "0.0005002", "0.0005003", "0.0005004"]),
        (0, 3e-5, ["0", "1e-5", "2e-5", "3e-5"]),
        (0, 3e-12, ["0", "1e-12", "2e-12", "3e-12"]),
        (1e-5, 9e-4, ["0.0002", "0.0004", "0.0006", "0.0008"]),
        (-3, 2, ["-3", "-2", "-1", "0", "1", "2"]),
        (0, 1281, ["0", "500", "1,000"]),
        (5, 5, ["5"]),
        (0, 0, ["0"]),
    ],
)
def test_ticks_are_round_and_told_apart(low, high, labels):
    assert tick_labels(ticks(low, high)) == labels


def test_curves_have_a_colour_each_and_are_dashed_after_those():
    styles = (ROOT / "pipeline/report/page.css").read_text()
    colours = re.findall(r"^\.(s\d) \{ stroke: var\(--(c\d)\)", styles, re.M)
    series = [Series(str(number), number, [(0.0, 1.0)]) for number in range(14)]
    looks = re.findall(r'<polyline class="curve ([^"]*)"', line_chart("title", "step", 1, series))
    assert looks == [name for name, _ in colours] + [f"{name} dashed" for name, _ in colours]
    assert len(dict(colours)) == len({value for _, value in colours}) == 7


@pytest.mark.parametrize("count", [12, 13])
def test_a_curve_is_where_the_numbers_of_its_axes_say(count):
    """A line through the places of the axes' numbers has each point at its value; few points are marked."""
    points = [(k * 4000.0 / (count - 1), 0.5 + (k % 5) / 2) for k in range(count)]
    svg = ElementTree.fromstring(line_chart('a "<b>"', "step & more", 4000, [Series('c"<', 3, points)]))
    assert svg.get("aria-label") == 'a "<b>" by step & more'
    _, _, width, height = map(float, svg.get("viewBox", "").split())
    texts = [(each.text or "", each) for each in svg.iter("text") if each.get("class") is None]
    (label,) = (each for each in svg.iter("text") if each.get("class") == "label")
    drawn_by: dict = {}
    for each in svg.iter("path"):
        numbers = [*map(float, re.findall(r"[\d.]+", each.get("d", "")))]
        drawn_by.setdefault(each.get("class"), []).append(numbers)
    [(left, bottom, right)] = drawn_by["axis"]
    assert (float(label.get("x", 0)), float(label.get("y", 0))) == ((left + right) / 2, height - 3)
    assert label.text == "step & more"
    count_y = len(drawn_by["grid"])
    values_y = [(float(text), float(each.get("y", 0)) - 4) for text, each in texts[:count_y]]
    values_x = [(float(text.replace(",", "")), float(each.get("x", 0))) for text, each in texts[count_y:]]
    assert [value for value, _ in values_x] == [0, 1000, 2000, 3000, 4000]
    assert [value for value, _ in values_y] == [0.5, 1, 1.5, 2, 2.5]
    for (_, y), line, (_, each) in zip(values_y, drawn_by["grid"], texts, strict=False):
        assert line == pytest.approx([left, y, right], abs=0.1)
        assert (each.get("text-anchor"), float(each.get("x", 0))) == ("end", left - 6)
    for (_, x), line, (_, each) in zip(values_x, drawn_by["tick"], texts[count_y:], strict=True):
        assert line == pytest.approx([x, bottom, 4], abs=0.1)
        assert (each.get("text-anchor"), float(each.get("y", 0))) == ("end" if x == right else "middle", bottom + 17)
    across = np.polynomial.Polynomial.fit(*zip(*values_x, strict=True), 1)
    down = np.polynomial.Polynomial.fit(*zip(*values_y, strict=True), 1)
    assert (across(0), across(4000)) == pytest.approx((left, right), abs=0.1)
    top = 10  # pixels; 4 % of the range are left above and below
    assert (down(0.5 - 0.08), down(2.5 + 0.08)) == pytest.approx((bottom, top), abs=0.2)
    assert width - right == 12
    [curve] = svg.iter("polyline")
    places = [(float(across(x)), float(down(y))) for x, y in points]
    drawn = [[*map(float, pair.split(","))] for pair in curve.get("points", "").split()]
    np.testing.assert_allclose(drawn, places, atol=0.15)
    assert [*map(float, curve.get("data-x", "").split())] == pytest.approx([x for x, _ in points], rel=1e-5)
    assert [*map(float, curve.get("data-y", "").split())] == pytest.approx([y for _, y in points], rel=1e-4)
    assert (curve.get("data-name"), curve.get("class")) == ('c"<', "curve s3")
    marks = [(float(each.get("cx", 0)), float(each.get("cy", 0))) for each in svg.iter("circle")]
    assert marks == ([tuple(each) for each in drawn] if count == 12 else [])


def test_a_constant_curve_is_in_the_middle():
    for end, points in (
        (8, [(0.0, 5.0), (8.0, 5.0)]),
        (5, [(0.0, 0.0), (5.0, 0.0)]),
        (2, [(1.0, 1e-12), (2.0, 2e-12)]),
    ):
        chart = line_chart("title", "step", end, [Series("a", 0, points), Series("empty", 1, [])])
        [drawn] = re.findall(r' points="([^"]*)"', chart)
        (x, y), (last, same) = ([*map(float, pair.split(","))] for pair in drawn.split())
        assert last == 460 - 12
        if points[0][1] == points[1][1]:
            assert (x, y, same) == (58, (10 + 250 - 36) / 2, y)


def test_marks_repeat_their_colours_dashed_and_then_plain_again():
    marks = [chip(number) for number in (0, 1, STYLES, STYLES + 1, 2 * STYLES)]
    colours = [re.findall(r"\bs(\d+)", mark) for mark in marks]
    assert colours == [["0"], ["1"], ["0"], ["1"], ["0"]]
    assert ["dashed" in mark for mark in marks] == [False, False, True, True, False]
    assert [formatted(value, ".1f") for value in (None, 0.0, 2.25)] == ["–", "0.0", "2.2"]


def test_short_paths_and_numbers(tmp_path):
    assert short_paths([tmp_path / "a/b/one", tmp_path / "a/two"]) == ["b/one", "two"]
    assert short_paths([tmp_path / "a/b/one"]) == ["one"]
    assert [is_number(value) for value in (0, 0.5, True, None, math.inf, "1")] == [True, True, *[False] * 4]

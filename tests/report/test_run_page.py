"""The page of runs: it shows what the run folder says, needs nothing else, and lets nobody's words become HTML."""

import base64
import html
import json
import math
import re
import time
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from tests.conftest import ROOT
from widemix.cli.parser import make_parser
from widemix.command_line.commands import run_command
from widemix.metrics import metric_heading
from widemix.plots.chart import STYLES, Series, line_chart, thinned, tick_labels, ticks
from widemix.recipe import dump_recipe, load_recipe
from widemix.report.run import chip, formatted, read_runs, short_paths
from widemix.run.records import is_number

EVIL = "<script>alert('x')</script>\"'&"


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open, "an element is not closed"

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "input", "img", "path", "polyline", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.elements if name == tag]


def write_run(folder, name: str, seed: int, rows: int = 40):
    """A run folder with strangers' words wherever a run folder has words."""
    run = folder / name
    (run / "images").mkdir(parents=True)
    (run / "recipe.yaml").write_text(
        dump_recipe(load_recipe("digits/mixer", [("train.seed", str(seed)), ("data.path", json.dumps(EVIL))]))
    )
    (run / "environment.json").write_text(json.dumps({"ranks": 2, "device": EVIL, "commit": EVIL, "host": EVIL}))
    rng = np.random.default_rng(seed)
    lines = [
        {
            "step": s,
            "epoch": s / 10,
            "loss": rng.random(),
            "lr": 1e-3,
            EVIL: rng.random(),
            "split": "train",
            "time": 1e9 + s,
        }
        | {"images_per_s": 100.0, "grad_norm": 1.0}
        for s in range(1, rows + 1)
    ]
    lines.insert(10, {"step": 10, "epoch": 1.0, "loss": 2.0, "top1": 50.0, "split": "eval", "time": 1e9 + 10})
    lines.insert(20, {"step": 15, "split": "event", "event": "save_failed", "reason": EVIL, "time": 1e9 + 15})
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (run / "metrics.jsonl").write_text(text + '{"step": 41, "spl')  # killed while writing
    starts = [{"time": 1e9, "step": 1, "ranks": 2, "seconds": {EVIL: 2000.25, "first step": 1.5}}]
    second = {"time": 2e9, "step": 31, "ranks": 2, "seconds": {"imports": 3.0, "first step": 0.5}}
    starts.append(second | {"memory_layout": f"batch_last{EVIL}"})
    (run / "starts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in starts[: 3 - seed]))
    Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(run / "images/first_batch.png")
    counts = [[5, 1], [2, 7]]
    (run / "confusion.json").write_text(json.dumps({"step": 10, "classes": [EVIL, "b"], "counts": counts}))
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [write_run(folder, "<i>a", 1), write_run(folder, "b", 2)]


def written(tmp_path, *runs) -> str:
    words = ["report", *map(str, runs), "--to", str(tmp_path / "page.html")]
    assert run_command(make_parser(), None, words) == 0
    return (tmp_path / "page.html").read_text()


def test_a_run_is_shown_once_by_whichever_paths(runs):
    one, other = runs
    again = other.parent / "b" / ".." / "b"
    assert [run.name for run in read_runs([one, other, again, one])] == ["<i>a", "b"]


def test_what_differs_has_a_row_a_key_or_run(tmp_path):
    def rows(*changes: dict) -> list[list[str]]:
        folders = []
        for number, change in enumerate(changes):
            folder = tmp_path / f"{len(changes)} {number}"
            folder.mkdir()
            words = [(key, str(value)) for key, value in change.items()]
            (folder / "recipe.yaml").write_text(dump_recipe(load_recipe("digits/mixer", words)))
            (folder / "metrics.jsonl").write_text('{"step": 1, "split": "train", "images_per_s": 1.0}\n')
            (folder / "environment.json").write_text("{}")
            folders.append(folder)
        part = written(tmp_path, *folders).partition("What differs")[2].partition("</table>")[0]
        cells = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in part.split("<tr>")[1:]]
        return [[re.sub("<.*?>", "", cell) for cell in row] for row in cells]

    two = [
        {"train.seed": 1, "model.depth": 2, "optim.lr": 0.5},
        {"train.seed": 2, "model.depth": 3, "optim.lr": 0.25},
    ]
    keys = ["model.depth", "optim.lr", "train.seed"]
    assert rows(*two) == [["", "2 0", "2 1"], [keys[0], "2", "3"], [keys[1], "0.5", "0.25"], [keys[2], "1", "2"]]
    square = [{key: value for key, value in run.items() if key != "optim.lr"} for run in (two[0], two[1])]
    folder = tmp_path / "square"
    folder.mkdir()
    tmp_path = folder
    assert rows(*square) == [["", "2 0", "2 1"], ["model.depth", "2", "3"], ["train.seed", "1", "2"]]
    four = [{"train.seed": seed, "model.depth": 2 + seed // 2} for seed in range(4)]
    assert rows(*four) == [
        ["", "model.depth", "train.seed"],
        *([f"4 {seed}", str(2 + seed // 2), str(seed)] for seed in range(4)),
    ]


def test_each_start_has_its_seconds_by_part(runs, tmp_path):
    cells = written(tmp_path, *runs).partition("Starts, in seconds")[2].partition("</table>")[0]
    rows = [re.findall(r'<td class="n">(.*?)</td>', row) for row in cells.split("<tr>")[2:]]
    assert rows == [
        ["1", "2", "2,001.8", "2,000.2", "1.5", "–"],
        ["31", "2", "3.5", "–", "0.5", "3.0"],
        ["1", "2", "2,001.8", "2,000.2", "1.5", "–"],
    ]
    assert html.unescape(cells).count(f"batch_last{EVIL}") == 1
    heads = [html.unescape(head) for head in re.findall(r'<th class="n">(.*?)</th>', cells)]
    assert heads == ["step", "ranks", "all", EVIL, "first step", "imports"]


def test_the_page_needs_no_other_file(runs, tmp_path):
    page = Page(text := written(tmp_path, runs[0]))
    sources = [attributes["src"] for attributes in page.all("img")]
    assert len(sources) == 1
    assert (
        base64.b64decode(sources[0].removeprefix("data:image/png;base64,"))
        == (runs[0] / "images/first_batch.png").read_bytes()
    )
    assert not re.search(r"https?:|@import|url\(", text)
    assert not [a for _, attributes in page.elements for a in attributes if a in ("href", "srcset")]


def test_a_run_that_has_only_begun_has_a_page(runs, tmp_path):
    run = tmp_path / "new"
    run.mkdir()
    (run / "recipe.yaml").write_bytes((runs[0] / "recipe.yaml").read_bytes())
    (run / "environment.json").write_text("{}")
    assert "no line yet" in Page(written(tmp_path, run)).text


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


def plain_run(folder, lines, **files):
    """A run of digits/mixer with these lines; files: JSON by name."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(dump_recipe(load_recipe("digits/mixer", [])))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for name, content in ({"environment": {}} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def rows_of(part: str) -> list[list[str]]:
    """The cells of a table as text, its head first."""
    rows = part.partition("</table>")[0].split("<tr>")[1:]
    return [
        [html.unescape(re.sub("<.*?>", "", cell)) for cell in re.findall(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", row, re.S)]
        for row in rows
    ]


def charts_of(text: str) -> dict[str, dict[str, list[tuple]]]:
    """By title and axis: name, x and y of each curve."""
    found: dict = {}
    for title, figure in re.findall(r"<figure><h3>(.*?)</h3>(.*?)</figure>", text, re.S):
        for axis, label, svg in re.findall(
            r'<svg class="by-(\w+)" [^>]*aria-label="[^"]* by ([^"]*)">(.*?)</svg>', figure, re.S
        ):
            curves = re.findall(r'data-name="(.*?)" data-x="(.*?)" data-y="(.*?)"', svg)
            values = [(name, [*map(float, x.split())], [*map(float, y.split())]) for name, x, y in curves]
            found.setdefault(html.unescape(title), {})[axis] = (label, values)
    return found


TITLES = {
    ("train", "loss"): "Training loss",
    ("eval", "loss"): "Evaluation loss",
    ("eval", "top1"): "Top-1, %",
    ("eval", "top5"): "Top-5, %",
    ("eval", "ema_loss"): "Evaluation loss of the averaged weights",
    ("eval", "ema_top1"): "Top-1 of the averaged weights, %",
    ("eval", "ema_top5"): "Top-5 of the averaged weights, %",
    ("eval", "zero_weights"): "Weights that are zero, %",
    ("train", "lr"): "Learning rate",
    ("train", "grad_norm"): "Gradient norm",
    ("train", "weight_norm"): "Weight norm",
    ("train", "images_per_s"): "Samples per second, all ranks",
    ("train", "mfu"): "Model FLOPs utilisation, fraction of the GPUs' peak",
    ("train", "data_wait"): "Fraction of the time spent waiting for data",
    ("train", "memory_gib"): "Peak memory of rank 0, GiB",
    ("train", "replaced"): "Corrupt samples replaced",
    ("eval", "own"): "own (eval)",
}


def test_each_metric_has_its_chart(tmp_path):
    lines = []
    for step in (1, 2):
        for split in ("train", "eval"):
            own = {name: step + at / 32 for at, (where, name) in enumerate(TITLES) if where == split}
            lines.append({"step": step, "epoch": step / 2, "time": 5.0 + step, "split": split, **own})
        lines[-2] |= {"grad_norm/blocks.0": step * 10.0, "grad_norm/head": step * 20.0}
    lines += [{"step": 3, "epoch": 1.5, "time": 8.0, "split": "eval", "loss": value} for value in (None, math.nan)]
    run = plain_run(tmp_path / "one", lines)
    found = charts_of(written(tmp_path, run))
    expected = {title: [1 + at / 32, 2 + at / 32] for at, title in enumerate(TITLES.values())}
    blocks = found.pop("Gradient norm by block, one")
    assert list(found) == list(expected)
    for title, values in expected.items():
        for axis, label, x in (
            ("epoch", "epoch", [0.5, 1]),
            ("step", "step", [1, 2]),
            ("time", "seconds since the first line", [0, 1]),
        ):
            (name, found_x, found_y), *rest = found[title][axis][1]
            assert (found[title][axis][0], name, found_x, rest) == (label, "one", x, [])
            assert found_y == pytest.approx(values, rel=1e-4)
    assert blocks["step"] == ("step", [("blocks.0", [1, 2], [10, 20]), ("head", [1, 2], [20, 40])])


@pytest.mark.parametrize(
    ("seconds", "unit", "end"),
    [
        (299, "seconds", 299),
        (300, "minutes", 5),
        (7199, "minutes", 7199 / 60),
        (7200, "hours", 2),
        (None, None, None),
    ],
)
def test_time_runs_in_a_unit_that_suits_its_length(tmp_path, seconds, unit, end):
    """Of lines that have no time there is none."""
    lines = [{"step": step, "split": "eval", "loss": 1.0} for step in (1, 2)]
    if seconds:
        lines = [line | {"time": 1e9 + at * seconds} for at, line in enumerate(lines)]
    axes = charts_of(written(tmp_path, plain_run(tmp_path / "run", lines)))["Evaluation loss"]
    assert "epoch" not in axes
    assert axes["step"][1] == [("run", [1, 2], [1, 1])]
    if seconds:
        assert axes["time"] == (f"{unit} since the first line", [("run", [0, pytest.approx(end, rel=1e-5)], [1, 1])])
    assert ("time" in axes) is bool(seconds)


def test_the_summary_has_each_runs_numbers(tmp_path):
    line = {"split": "train", "loss": 1.0}
    going = plain_run(
        tmp_path / "runs" / "going",
        [{**line, "step": 1200, "epoch": 1.5, "images_per_s": 1999.6}],
        environment={"ranks": 4, "device": "cuda", "commit": 40 * "d"},
    )
    done = plain_run(
        tmp_path / "runs" / "old" / "done",
        [{**line, "step": step, "epoch": min(step, 2.0), "images_per_s": 10.0 * step} for step in (1, 2, 9)],
        done={"top1": 91.5, "loss": 0.5, "step": 9, "seconds": 5400.0, "recipe": "f"},
        environment={"ranks": 1, "commit": None},
    )
    text = written(tmp_path, going, done, going)  # each once
    epochs = load_recipe("digits/mixer", []).train.epochs
    head, first, second = rows_of(text)
    heads = "run,state,top-1 %,steps,epochs,samples/s,hours,ranks,device,commit"
    assert head == heads.split(",")
    assert first[0] == "going"
    assert first[1].startswith("not done, last line ")
    assert first[2:] == ["–", "1,200", f"1.5 of {epochs}", "2,000", "–", "4", "cuda", 10 * "d"]
    assert second == ["old/done", "done", "91.50", "9", f"2 of {epochs}", "20", "1.50", "1", "–", "–"]
    alone = written(tmp_path, done)
    assert rows_of(alone)[1][0] == "done"
    assert "<h1>done</h1>" in alone
    assert "<h1>2 runs compared</h1>" in text
    recipes = html.unescape("".join(re.findall(r"<summary>[\w/]+</summary><pre>(.*?)</pre>", text, re.S)))
    assert recipes.count("channels: 64") == recipes.count('"ranks": ') == 2


def test_of_several_runs_each_has_its_own_metric(tmp_path):
    """The second is of numbers, went back to an earlier step, and began without times; the first has one line."""
    one, two = tmp_path / "runs/old/one", tmp_path / "runs/two"
    trained = {"split": "train", "images_per_s": 1.0}
    evaluated = {"split": "eval", "step": 5, "loss": 2.0}
    plain_run(one, [{**trained, "step": 1, "epoch": 0.5, "loss": 4.0, "time": 3.0}, evaluated])
    steps = ((1, 0.5, None), (601, 3.5, 20.0), (602, 4.0, 900.0), (301, 2.0, 1000.0))
    lines = [{**trained, "step": step, "epoch": epoch, "loss": float(step)} for step, epoch, _ in steps]
    for line, (_, _, at) in zip(lines, steps, strict=True):
        line |= {"time": at} if at else {}
    long = [{**trained, "step": step, "loss": 1.0} for step in range(700, 1300)]
    counts = {"step": 3, "classes": ["<i>"], "counts": [[0, 0], [1, 3]]}
    plain_run(two, [*lines, *long, evaluated, evaluated | {"step": 6}], confusion=counts)
    keys = {"data.targets": "regression", "train.loss": "mse", "augment.smoothing": "0", "augment.cutmix": "0"}
    recipe = load_recipe("digits/mixer", [*keys.items(), ("optim.clip_grad", "null")])
    (two / "recipe.yaml").write_text(dump_recipe(recipe))
    (two / "images").mkdir()
    (two / "images/mistakes.png").write_bytes(b"png")
    text = written(tmp_path, one, two)
    assert [run.name for run in read_runs([one, two])] == ["old/one", "two"]
    head, first, second = rows_of(text)
    assert head[2:4] == [metric_heading(run.summary.metric) for run in read_runs([one, two])]
    assert [first[5], second[5]] == [f"{epoch} of {recipe.train.epochs}" for epoch in ("0.5", "4")]
    cells = {row[0]: row[1:] for row in rows_of(text.partition("<h2>What differs</h2>")[2])}
    assert cells["optim.clip_grad"] == ["1.0", "None"]
    charts = charts_of(text)["Training loss"]
    assert [(name, x) for name, x, _ in charts["epoch"][1]] == [("old/one", [0.5]), ("two", [0.5, 2, 3.5, 4])]
    assert charts["time"][0] == "minutes since the first line"
    assert charts["time"][1][1][1] == pytest.approx([0, 880 / 60, 980 / 60], rel=1e-4)
    assert "Of curves with more than 600 points" in text
    said = html.unescape(re.sub("<.*?>", "", text))
    assert "old/one: 1 evaluation; the last" in said
    assert "two: 2 evaluations; the last" in said
    assert "<p>None.</p>" in text.partition("<h2>Events</h2>")[2]
    _, confused, other = rows_of(text.partition('<table class="confusion">')[2])
    assert (confused, other) == (["<i>", "", ""], ["1", "1", "3"])
    assert "two: Misclassified at the last evaluation" in re.sub("<.*?>", "", text)
    legend = text.partition('<div class="bar">')[2].partition("</div>")[0]
    assert [name in legend for name in ("old/one", "two")] == [True, True]
    summary = recipe.model.summary()
    assert (html.escape(summary) in written(tmp_path, two), html.escape(summary) in text) == (True, False)


def test_runs_of_one_recipe_do_not_differ(tmp_path):
    runs = [plain_run(tmp_path / name, []) for name in ("a/b/one", "a/two")]
    assert "<p>All runs have the same recipe.</p>" in written(tmp_path, *runs)
    assert short_paths(runs) == ["b/one", "two"]
    assert short_paths(runs[:1]) == ["one"]
    assert [is_number(value) for value in (0, 0.5, True, None, math.inf, "1")] == [True, True, *[False] * 4]


def test_marks_repeat_their_colours_dashed_and_then_plain_again():
    marks = [chip(number) for number in (0, 1, STYLES, STYLES + 1, 2 * STYLES)]
    colours = [re.findall(r"\bs(\d+)", mark) for mark in marks]
    assert colours == [["0"], ["1"], ["0"], ["1"], ["0"]]
    assert ["dashed" in mark for mark in marks] == [False, False, True, True, False]
    assert [formatted(value, ".1f") for value in (None, 0.0, 2.25)] == ["–", "0.0", "2.2"]


def test_evaluations_events_and_confusions_are_in_their_columns(tmp_path):
    lines = [
        {"split": "eval", "step": 1000, "epoch": 0.5, "time": 3.0, "loss": 2.5, "top1": 10.0},
        {"split": "event", "step": 1500, "event": "save_failed", "reason": "no space", "time": 1.0},
        {"split": "event", "step": 1600, "event": "save_failed", "reason": "none at all"},
        {"split": "event", "step": 1700, "event": "evaluation_failed", "epoch": 3.0, "time": 2.0, "loss": math.inf},
        {"split": "eval", "step": 2000, "epoch": 12.25, "time": 4.0, "loss": 1.25, "top1": 20.125, "ema_map": 0.5},
        {"split": "eval", "step": 3000, "loss": None, "top1": 30.0, "own": 0.33333},
    ]
    counts = [[5, 1, 0], [2, 7, 4], [0, 0, 0]]
    confusion = {"step": 3000, "classes": ["a", "b"], "counts": counts}
    run = plain_run(tmp_path / "run", lines, confusion=confusion)
    (run / "images").mkdir()
    for name in ("first_batch", "mistakes", "other"):
        (run / f"images/{name}.png").write_bytes(name.encode())
    text = written(tmp_path, run)
    assert rows_of(text.partition("<h2>Evaluations</h2>")[2]) == [
        ["step", "epoch", "loss", "top-1 %", "ema_map", "own"],
        ["1,000", "0.5", "2.5000", "10.00", "–", "–"],
        ["2,000", "12.25", "1.2500", "20.12", "0.50", "–"],
        ["3,000", "0", "–", "30.00", "–", "0.3333"],
    ]
    assert "run: 3 evaluations; the last: loss –, top-1 30.00 %, ema_map –, own 0.3333</summary>" in text
    _, first, second, third = rows_of(text.partition("<h2>Events</h2>")[2])
    assert third[3] == "the evaluation at step 1700 failed: loss inf"
    assert (first[0], first[1], second[1], second[2]) == ("run", "1,500", "1,600", "–")
    assert time.mktime(time.strptime(first[2], "%Y-%m-%d %H:%M:%S")) == 1
    assert "no space" in first[3]
    assert "none at all" in second[3]
    assert "<h3>run at step 3,000</h3>" in text
    part = text.partition('<table class="confusion">')[2]
    assert rows_of(part) == [["", "a", "b", "2"], ["a", "5", "1", ""], ["b", "2", "7", "4"], ["2", "", "", ""]]
    shades = [float(shade) for shade in re.findall(r"var\(--heat\),([\d.]+)", part)]
    assert shades == [float(f"{0.75 * n / max(sum(row), 1):.2f}") for row in counts for n in row]
    images = re.findall(r'src="data:image/png;base64,(.*?)".*?<figcaption>(.*?)</figcaption>', text)
    assert [(base64.b64decode(data), caption) for data, caption in images] == [
        (b"first_batch", "The first training batch"),
        (b"mistakes", "Misclassified at the last evaluation, the surest first"),
    ]


def test_fifty_classes_have_a_matrix_and_more_have_pairs(tmp_path):
    """The twenty classes of lowest top-1, and the twenty pairs most confused with the samples of their true class."""
    names = [f"c{number}" for number in range(50)]  # of 51 the last has none
    for count in (50, 51):
        counts = np.diag(np.full(count, 50))
        counts[:25, 49] = np.arange(1, 26)
        counts[3, 4], counts[4, 3], counts[count - 1, 0] = 70, 1100, 90
        confusion = {"step": 1, "classes": names, "counts": counts.tolist()}
        text = written(tmp_path, plain_run(tmp_path / f"{count}", [], confusion=confusion))
        assert ('<table class="confusion">' in text) is (count == 50)
    by_class, pairs = text.partition("<h2>Confusions</h2>")[2].split("</table>")[:2]
    rows = rows_of(by_class)
    assert len(rows) == 1 + 20
    assert rows[1:4] == [
        ["c4", "1,155", "50", "4.3 %", "c3 (1,100)"],
        ["50", "140", "50", "35.7 %", "c0 (90)"],
        ["c3", "124", "50", "40.3 %", "c4 (70)"],
    ]
    rows = rows_of(pairs)
    assert len(rows) == 1 + 20
    assert rows[1:4] == [["c4", "c3", "1,100", "1,155"], ["50", "c0", "90", "140"], ["c3", "c4", "70", "124"]]
    assert '<table class="confusion">' in written(tmp_path, tmp_path / "51", tmp_path / "50")
    right = tmp_path / "right"
    text = written(tmp_path, plain_run(right, [], confusion=confusion | {"counts": [[3, 0], [0, 0]]}))
    assert rows_of(text.partition("<h2>Confusions</h2>")[2].split("</table>")[0])[1:] == [
        ["c0", "3", "3", "100.0 %", "–"]
    ]


def test_a_note_says_that_long_curves_are_thinned(tmp_path):
    for count in (600, 601):
        line = {"split": "train", "loss": 1.0, "images_per_s": 1.0}
        lines = [{"step": step, **line} for step in range(1, count + 1)]
        text = written(tmp_path, plain_run(tmp_path / f"{count}", lines))
        assert ("Of curves with more than 600 points the extremes of 300 stretches" in text) is (count == 601)


def test_the_page_has_its_parts_in_order(runs, tmp_path):
    """And each run's recipe and environment as they were written."""
    text = written(tmp_path, *runs)
    parts = ["Curves", "Evaluations", "Events", "Starts, in seconds to the first step", "Images", "Confusions"]
    heads = ["2 runs compared", "What differs", *parts, "Recipe", "Environment"]
    assert re.findall(r"<h[12]>(.*?)</h[12]>", text) == heads
    assert re.search(r"</h1>\s*<p[^>]*>Written by widemix report", text)
    environment = json.loads((runs[0] / "environment.json").read_text())
    assert html.unescape(text).count(json.dumps(environment, indent=1)) == 2

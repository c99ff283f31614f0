"""The page itself: HTML with its style, script and images inside. Whatever a run folder says becomes text."""

import base64
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from widemix.metrics import METRICS, PERCENT, metric_heading, show_metric
from widemix.plots.chart import MOST, Html, Series, document, element, join, line_chart
from widemix.report.run import ReportedRun, chip, formatted, named, section, table
from widemix.run.listing import differing_keys
from widemix.run.records import is_number

# What is plotted, in this order: (split, name in metrics.jsonl) -> title. Other metrics follow by their own names.
CHARTS = {
    ("train", "loss"): "Training loss",
    ("eval", "loss"): "Evaluation loss",
    ("eval", "top1"): "Top-1, %",
    ("eval", "top5"): "Top-5, %",
    ("eval", "balanced_accuracy"): "Balanced accuracy, %",
    ("eval", "macro_f1"): "Macro F1, %",
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
}
NOT_METRICS = ("step", "epoch", "split", "time")
BLOCKS = "grad_norm/"  # the gradient norms of blocks begin so
UNITS = ((7200, 3600, "hours"), (300, 60, "minutes"), (0, 1, "seconds"))  # from so many seconds on: unit
NAMED_CLASSES, MOST_CONFUSED = 50, 20
Curve = tuple[str, list[dict[str, Any]], str, float | None]  # name, lines, metric, time of the run's first line


def page(runs: Sequence[ReportedRun]) -> str:
    """Return the page of one run, or of several compared."""
    one = len(runs) == 1
    title = runs[0].name if one else f"{len(runs)} runs compared"
    style, script = (Path(__file__).with_name(name).read_text() for name in ("page.css", "page.js"))
    written = time.strftime("%Y-%m-%d %H:%M %Z")
    recipe = runs[0].recipe
    model = f"{recipe.model.summary(recipe.data.image_size)}. " if one else ""
    return document(
        f"{title} · widemix",
        f"\n{style}",
        f"\n{script}",
        element("h1", title),
        element("p", f"{model}Written by widemix report on {written}.", class_="soft"),
        section("", _summary(runs)),
        section("What differs", join() if one else _differences(runs)),
        section("Curves", _curves(runs)),
        section("Evaluations", _evaluations(runs)),
        section("Events", _events(runs)),
        section("Starts, in seconds to the first step", _starts(runs)),
        section("Images", _images(runs)),
        section("Confusions", join(*_confusions(runs))),
        section("Recipe", _folded((run.name, run.recipe_text) for run in runs)),
        section("Environment", _folded((run.name, json.dumps(run.environment, indent=1)) for run in runs)),
    )


def _summary(runs: Sequence[ReportedRun]) -> Html:
    metrics = list(dict.fromkeys(run.summary.metric for run in runs))
    shown = map(metric_heading, metrics)
    best = ["best checkpoint"] if any(run.summary.best for run in runs) else []
    head = ("run", "state", *shown, "steps", "epochs", "samples/s", "hours", *best, "ranks", "device", "commit")
    rows = []
    for number, run in enumerate(runs):
        summary, environment = run.summary, run.environment
        epoch = max((line["epoch"] for line in run.lines if "epoch" in line), default=None)
        rows.append(
            (
                named(runs, number),
                summary.state
                if summary.state.startswith("done")
                else element("span", f"not done, last line {summary.state}", class_="state"),
                *(summary.cell(name) or "–" for name in metrics),
                f"{summary.step:,}",
                f"{formatted(epoch, '.1f').removesuffix('.0')} of {run.recipe.train.epochs}",
                formatted(summary.images_per_s, ",.0f"),
                formatted(summary.hours, ".2f"),
                *(summary.best.sentence() if summary.best else "–" for _ in best),
                environment.get("ranks", "–"),
                environment.get("device", "–"),
                str(environment.get("commit") or "–")[:10],
            )
        )
    return table(head, rows, numbers=range(2, 6 + len(metrics)))


def _differences(runs: Sequence[ReportedRun]) -> Html:
    """The recipe keys that not all runs share: a row for each, or for each run where there are more runs."""
    keys = differing_keys([run.recipe for run in runs])
    if not keys:
        return element("p", "All runs have the same recipe.")
    names = [element("code", name) for name, _ in keys]
    cells = [["–" if value is ... else value for value in values] for _, values in keys]
    runs_named = [named(runs, number) for number in range(len(runs))]
    if len(runs) > len(keys):
        names, cells, runs_named = runs_named, [list(row) for row in zip(*cells, strict=True)], names
    return table(("", *runs_named), ((name, *row) for name, row in zip(names, cells, strict=True)))


def _curves(runs: Sequence[ReportedRun]) -> Html:
    """All charts, each by epoch, by step and, where the lines have their time, by time."""
    keys = list(CHARTS)
    for run in runs:
        keys += [(s, n) for s in ("train", "eval") for line in run.of(s) for n in line if n not in NOT_METRICS]
    axes = _axes(runs)
    charts: list[Html] = []
    for split, name in dict.fromkeys(key for key in keys if not key[1].startswith(BLOCKS)):
        curves = [(run.name, run.of(split), name, run.began) for run in runs]
        charts += _chart(CHARTS.get((split, name), f"{name} ({split})"), axes, curves)
    if not charts:
        return join()
    for run in runs:
        lines = run.of("train")
        names = dict.fromkeys(name for line in lines for name in line if name.startswith(BLOCKS))
        blocks = [(name.removeprefix(BLOCKS), lines, name, run.began) for name in names]
        marks = element("div", *(element("span", chip(n), one[0]) for n, one in enumerate(blocks)), class_="legend")
        charts += _chart(f"Gradient norm by block, {run.name}", axes, blocks, marks)
    buttons = [
        element(
            "label",
            element("input", type="radio", name="axis", id=f"by-{axis.name}", checked=axis is axes[0]),
            f" {axis.name}",
        )
        for axis in axes
    ]
    legend = [element("span", named(runs, number)) for number in range(len(runs) if len(runs) > 1 else 0)]
    thinned = f"Of curves with more than {MOST} points the extremes of {MOST // 2} stretches are plotted."
    note = [element("p", thinned, class_="soft")] if max(len(run.of("train")) for run in runs) > MOST else []
    bar = element("div", element("span", "by", class_="soft"), *buttons, *legend, class_="bar")
    return join(bar, element("div", join(*charts, between="\n"), class_="charts"), *note, between="\n")


def _chart(title: str, axes: "list[_Axis]", curves: Sequence[Curve], *below: Html) -> list[Html]:
    """A chart by each axis; none where no curve has two points: what has one is in the tables."""
    plotted = []
    for axis in axes:
        series = [Series(curve[0], n, axis.points(*curve[1:])) for n, curve in enumerate(curves)]
        if max((len(one.points) for one in series), default=0) > 1:
            plotted.append(line_chart(title, axis.label, axis.end, series, f"by-{axis.name}"))
    return [element("figure", element("h3", title), *plotted, *below)] if plotted else []


@dataclass(frozen=True)
class _Axis:
    """An x axis of the charts: a key of the lines, with `unit` of it as 1."""

    name: str
    label: str
    end: float
    unit: float = 1

    def points(self, lines: list[dict[str, Any]], name: str, began: float | None) -> list[tuple[float, float]]:
        """The points of a metric; `began` is the time of the run's first line."""
        first = began or 0 if self.name == "time" else 0
        known = [line for line in lines if is_number(line.get(name)) and is_number(line.get(self.name))]
        return sorted(((line[self.name] - first) / self.unit, line[name]) for line in known)


def _axes(runs: Sequence[ReportedRun]) -> list[_Axis]:
    axes = [
        _Axis(name, name, max((line.get(name, 0) for run in runs for line in run.lines), default=0))
        for name in ("epoch", "step")
    ]
    seconds = [line["time"] - run.began for run in runs for line in run.lines if run.began and "time" in line]
    if seconds:
        unit, name = next((unit, name) for least, unit, name in UNITS if max(seconds) >= least)
        axes.append(_Axis("time", f"{name} since the first line", max(seconds) / unit, unit))
    return axes


def _evaluations(runs: Sequence[ReportedRun]) -> Html:
    parts = []
    for number, run in enumerate(runs):
        lines = run.of("eval")
        names = [name for name in dict.fromkeys(n for line in lines for n in line) if name not in NOT_METRICS]
        if not lines:
            continue
        rows = [
            (f"{line['step']:,}", f"{line.get('epoch', 0):.4g}", *(_metric(name, line.get(name)) for name in names))
            for line in lines
        ]
        titles = [metric_heading(name) if name in METRICS else name for name in names]
        shown = table(("step", "epoch", *titles), rows, numbers=range(len(names) + 2))
        last = ", ".join(_said(name, lines[-1].get(name)) for name in names)
        summary = join(named(runs, number), f": {len(lines)} evaluation{'s' * (len(lines) > 1)}; the last: {last}")
        parts.append(element("details", element("summary", summary), shown))
    return join(*parts, between="\n")


def _said(name: str, value: Any) -> str:
    return show_metric(name, value) if name in METRICS and is_number(value) else f"{name} {_metric(name, value)}"


def _metric(name: str, value: Any) -> str:
    if not is_number(value):
        return "–"
    known = METRICS.get(name.removeprefix("ema_"))
    return f"{value:.2f}" if known and known.form == PERCENT else f"{value:.4f}"


def _events(runs: Sequence[ReportedRun]) -> Html:
    rows = []
    for number, run in enumerate(runs):
        for step, at, text in run.events():
            when = "–" if at is None else element("time", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)))
            rows.append((named(runs, number), f"{step:,}", when, element("div", text, class_="text")))
    return table(("run", "step", "time", "event"), rows, numbers=(1,)) if rows else element("p", "None.")


def _starts(runs: Sequence[ReportedRun]) -> Html:
    """A row for each start: the seconds to its first step, and of each part, and how a Mixer computed its blocks."""
    starts = [(number, start) for number, run in enumerate(runs) for start in run.starts]
    parts = list(dict.fromkeys(part for _, start in starts for part in start.get("seconds", {})))
    rows = []
    for number, start in starts:
        seconds = start.get("seconds", {})
        shown = (formatted(seconds.get(part), ",.1f") for part in parts)
        total = formatted(sum(seconds.values()), ",.1f")
        layout = start.get("memory_layout", "")
        rows.append((named(runs, number), layout, f"{start['step']:,}", start.get("ranks", "–"), total, *shown))
    head = ("run", "engine.memory_layout", "step", "ranks", "all", *parts)
    return table(head, rows, numbers=range(2, len(head))) if rows else join()


def _images(runs: Sequence[ReportedRun]) -> Html:
    figures = []
    for number, run in enumerate(runs):
        for title, png in run.images():
            data = f"data:image/png;base64,{base64.b64encode(png).decode()}"
            caption = join(named(runs, number), f": {title}") if len(runs) > 1 else title
            figures.append(element("figure", element("img", src=data, alt=title), element("figcaption", caption)))
    return element("div", *figures, class_="images") if figures else join()


def _confusions(runs: Sequence[ReportedRun]) -> Iterator[Html]:
    """Of each run a matrix, or of many classes the pairs that are confused most."""
    for number, run in enumerate(runs):
        found = run.confusion()
        if not found:
            continue
        counts, classes = found["counts"], list(found["classes"])
        classes += range(len(classes), len(counts))
        yield element("h3", named(runs, number), f" at step {found['step']:,}")
        yield _by_class(classes, counts)
        if len(counts) > NAMED_CLASSES:
            wrong = [
                (n, true, guess) for true, row in enumerate(counts) for guess, n in enumerate(row) if true != guess
            ]
            most = [each for each in sorted(wrong, reverse=True)[:MOST_CONFUSED] if each[0]]
            rows = [(classes[true], classes[guess], f"{n:,}", f"{sum(counts[true]):,}") for n, true, guess in most]
            yield table(("true class", "predicted", "samples", "of"), rows, numbers=(2, 3))
        else:
            yield element("p", "Rows are true classes, columns predicted ones; numbers of samples.", class_="soft")
            yield element("div", _matrix(classes, counts), class_="scroll")


def _by_class(classes: Sequence[object], counts: Sequence[Sequence[int]]) -> Html:
    """Samples and accuracy of each class, of many those with the lowest."""
    rows = []
    for label, row in enumerate(counts):
        if samples := sum(row):
            wrong, guess = max(((n, guess) for guess, n in enumerate(row) if guess != label), default=(0, 0))
            taken = f"{classes[guess]} ({wrong:,})" if wrong else "–"
            rows.append((row[label] / samples, label, (classes[label], f"{samples:,}", f"{row[label]:,}", taken)))
    shown = sorted(rows)[: NAMED_CLASSES if len(counts) <= NAMED_CLASSES else MOST_CONFUSED]
    cells = [(*row[:3], f"{100 * accuracy:.1f} %", row[3]) for accuracy, _, row in shown]
    return table(("true class", "samples", "correct", "top-1", "most often taken for"), cells, numbers=(1, 2, 3))


def _matrix(classes: Sequence[object], counts: Sequence[Sequence[int]]) -> Html:
    rows = []
    for name, row in zip(classes, counts, strict=False):
        shades = [f"background:rgba(var(--heat),{0.75 * n / (sum(row) or 1):.2f})" for n in row]
        cells = [element("td", n or "", style=shade) for n, shade in zip(row, shades, strict=True)]
        rows.append(element("tr", element("th", name), *cells))
    head = element("thead", element("tr", element("th"), *(element("th", name) for name in classes)))
    return element("table", head, element("tbody", *rows), class_="confusion")


def _folded(texts: Iterable[tuple[str, str]]) -> Html:
    folded = (element("details", element("summary", name), element("pre", text)) for name, text in texts)
    return join(*folded, between="\n")

"""HTML, and curves as inline SVG: no library, no script, colours and type from the page's style sheet."""

import base64
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

_VOID = ("meta", "input", "img")  # of HTML; in SVG elements without content are closed by />
_SVG_VOID = ("path", "polyline", "circle")


class Html(str):
    """Text that is HTML already, as `element` and `join` return it; they escape all other text."""

    __slots__ = ()


def join(*parts: object, between: str = "") -> Html:
    """Return parts one after the other: those that are HTML as they are, all others as the text that they show."""
    return Html(escape(between).join(part if isinstance(part, Html) else escape(str(part)) for part in parts))


def element(tag: str, *content: object, **attributes: object) -> Html:
    """Return an element with its content. Attributes that are True have no value; those None or False are left out.

    A name's underscore is a hyphen, and one at its end is not part of it: `class_`, `data_x`.
    """
    names = {name.removesuffix("_").replace("_", "-"): value for name, value in attributes.items()}
    shown = "".join(
        f" {name}" if value is True else f' {name}="{escape(str(value))}"'
        for name, value in names.items()
        if value is not None and value is not False
    )
    if tag in _SVG_VOID:
        return Html(f"<{tag}{shown}/>")
    return Html(f"<{tag}{shown}>") if tag in _VOID else Html(f"<{tag}{shown}>{join(*content)}</{tag}>")


def document(title: str, style: str, script: str, *body: Html) -> Html:
    """Return a page of its own: a browser runs this script alone, and loads nothing but images that the page holds.

    style, script: ours, as they are.
    """
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{hashed}'"
    head = join(
        element("meta", charset="utf-8"),
        element(
            "meta", http_equiv="Content-Security-Policy", content=f"{rules}; base-uri 'none'; form-action 'none'"
        ),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        join(element("title", title), element("style", Html(style))),
        between="\n",
    )
    shown = join(*body, element("script", Html(script)), between="\n")
    page = element(
        "html", "\n", element("head", "\n", head, "\n"), "\n", element("body", "\n", shown, "\n"), lang="en"
    )
    return join(Html("<!doctype html>\n"), page, "\n")


WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 36
MOST = 600  # points of a curve; of more, the extremes of each of MOST / 2 stretches are plotted
STYLES = 7  # colours; the eighth curve has the first one again, dashed


@dataclass(frozen=True)
class Series:
    """A curve: its name, its number in the legend, and its points (x, y) by x, all finite."""

    name: str
    number: int
    points: list[tuple[float, float]]


def line_chart(title: str, x_label: str, x_end: float, series: Iterable[Series], class_: str | None = None) -> Html:
    """Return the chart as SVG, from x = 0 to `x_end`.

    Each curve has its values in `data-x` and `data-y`, for the page's script.
    """
    plotted = [Series(one.name, one.number, thinned(one.points)) for one in series if one.points]
    ys = [y for one in plotted for _, y in one.points]
    low, high = min(ys), max(ys)
    margin = 0.04 * (high - low) or 0.04 * abs(high) or 1.0
    x_ticks, y_ticks = ticks(0, x_end), ticks(low, high)

    def across(x: float) -> float:
        return LEFT + x / (x_end or 1) * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - (y - low + margin) / (high - low + 2 * margin) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for y, text in zip(y_ticks, tick_labels(y_ticks), strict=True):
        parts.append(element("path", class_="grid", d=f"M{LEFT} {down(y):.1f}H{WIDTH - RIGHT}"))
        parts.append(element("text", text, x=LEFT - 6, y=f"{down(y) + 4:.1f}", text_anchor="end"))
    for x, text in zip(x_ticks, tick_labels(x_ticks), strict=True):
        anchor = "end" if across(x) > WIDTH - 24 else "middle"
        parts.append(element("path", class_="tick", d=f"M{across(x):.1f} {HEIGHT - BOTTOM}v4"))
        parts.append(element("text", text, x=f"{across(x):.1f}", y=HEIGHT - BOTTOM + 17, text_anchor=anchor))
    parts.append(element("path", class_="axis", d=f"M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(element("text", x_label, class_="label", x=middle, y=HEIGHT - 3, text_anchor="middle"))
    for one in plotted:
        places = [(across(x), down(y)) for x, y in one.points]
        look = f"s{one.number % STYLES}{' dashed' if one.number // STYLES % 2 else ''}"
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        values = {
            f"data_{axis}": " ".join(f"{point[at]:.{6 - at}g}" for point in one.points)
            for at, axis in enumerate("xy")
        }
        parts.append(element("polyline", class_=f"curve {look}", points=joined, data_name=one.name, **values))
        if len(places) <= 12:  # few points: mark them
            parts += [element("circle", class_=look, cx=f"{x:.1f}", cy=f"{y:.1f}", r=2.5) for x, y in places]
    parts.append(element("path", class_="cursor", d=""))
    box = f"0 0 {WIDTH} {HEIGHT}"
    return element("svg", *parts, class_=class_, viewBox=box, role="img", aria_label=f"{title} by {x_label}")


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points if there are at most `MOST`, else the lowest and the highest of each stretch, in order."""
    if len(points) <= MOST:
        return list(points)
    edges = [len(points) * place // (MOST // 2) for place in range(MOST // 2 + 1)]
    kept: list[tuple[float, float]] = []
    for first, stop in pairwise(edges):
        stretch = points[first:stop]
        extremes = {id(point): point for point in (min(stretch, key=_y), max(stretch, key=_y))}
        kept += sorted(extremes.values())
    return kept


def _y(point: tuple[float, float]) -> float:
    return point[1]


def ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten in the range, two to seven; of an empty range its value."""
    if not high > low:
        return [low]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """The values as text, all with as many decimals as their distance needs."""
    step = min((b - a for a, b in pairwise(values)), default=abs(values[0]) or 1)
    largest = max(map(abs, values))
    if not 1e-3 <= largest < 1e5:
        apart = math.floor(math.log10(largest)) - math.floor(math.log10(step) + 1e-9) if largest else 0
        digits = max(3, 1 + apart)
        return [f"{value:.{digits}g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e") for value in values]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{value:,.{decimals}f}" for value in values]

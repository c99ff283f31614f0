"""HTML and SVG made of elements: tags and names of attributes are ours, and whatever else is given becomes text."""

import base64
import hashlib
from html import escape

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

"""Writes the reference pages of the Python interface, from docstrings and signatures.

`python -m widemix.api.reference docs/reference`.
"""

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from timm.data import Mixup, create_loader

import widemix
from widemix.api.loader_arguments import NONE_MEANS, RENAMED, WITHOUT
from widemix.files import atomic_write

_ABOUT = "Made from the docstrings, by `python -m widemix.api.reference docs/reference`."
_ABOUT_TIMM = """# timm's names and widemix's

`widemix.Loader` has timm's names where it has timm's meanings. It has one list of arguments for `create_loader` and
`Mixup`, in which those of Mixup say what they are for. Its defaults leave out what is not asked for; to train as
timm's defaults do, give those of the second table. An argument that only timm has is an error that names ours.

Made from the signatures, by `python -m widemix.api.reference docs/reference`."""
_ALIASES = {
    **dict.fromkeys(("Size", "Whole", "Epoch"), "int"),
    "Numbers": "Sequence[float]",
    "ByClass": "Mapping[str, float]",
    "FilePath": "str | Path",
    "Device": "str | int | torch.device",
    "AnyRecipe": "Recipe | str | Path",
    "Fraction": "float",
}
_FIXED = "\0"  # a space within an argument
_TOP = Path(widemix.__file__).resolve().parents[1]
_WIDTH = 88  # of signatures: a line of the page


def page() -> str:
    """Return the page, as Markdown: every name of `widemix`, and the operations for FFCV."""
    parts = [f"# Python\n\n{_ABOUT}\n", f"## widemix\n\n{inspect.getdoc(widemix)}\n"]
    for name in widemix.__all__:
        thing = getattr(widemix, name)
        if callable(thing):
            parts += _described(f"widemix.{name}", thing)
    return "\n".join([*parts, *_ffcv()])


def timm_page() -> str:
    """Return the page on timm's names, as Markdown."""
    ours = {name: argument.default for name, argument in inspect.signature(widemix.Loader).parameters.items()}
    names, defaults = ["| timm | widemix |", "|---|---|"], ["| argument | timm | widemix |", "|---|---|---|"]
    names += [f"| `{name}` | `{RENAMED[name].replace(' and ', '` and `')}` |" for name in RENAMED]
    for name, argument in timm_arguments().items():
        own = RENAMED.get(name, name)
        theirs = _shown(NONE_MEANS.get(name) if argument.default is None else argument.default)
        if own in ours and (name == own or own not in timm_arguments()) and _shown(ours[own]) != theirs:
            defaults.append(f"| `{own}` | `{theirs}` | `{_shown(ours[own])}` |")
    without = ["| timm | in widemix |", "|---|---|", *(f"| `{name}` | {why} |" for name, why in WITHOUT.items())]
    tables = {"Other names": names, "Other defaults": defaults, "Without a counterpart": without}
    return "\n".join([f"{_ABOUT_TIMM}\n", *(f"## {title}\n\n{chr(10).join(t)}\n" for title, t in tables.items())])


def timm_arguments() -> dict[str, inspect.Parameter]:
    """The arguments of timm's `create_loader` and `Mixup`."""
    arguments = {**inspect.signature(create_loader).parameters, **inspect.signature(Mixup).parameters}
    return {name: argument for name, argument in arguments.items() if name != "args"}


def _shown(default: Any) -> str:
    if isinstance(default, Sequence) and not isinstance(default, str):
        return f"({', '.join(f'{number:.4g}' for number in default)})"
    return (
        "none" if default is inspect.Parameter.empty else f"{default:g}" if type(default) is float else f"{default}"
    )


def _described(name: str, thing: Any) -> Iterator[str]:
    yield f"### {name}\n\n```python\n{_filled(name + _signature(thing))}\n```\n\n{_text(inspect.getdoc(thing))}\n"
    yield f"In `{Path(inspect.getfile(inspect.unwrap(thing))).relative_to(_TOP)}`.\n"
    if name == "widemix.Loader":
        for method, function in vars(thing).items():
            if method == "__len__" or not method.startswith("_"):
                function = function.fget if isinstance(function, property) else function
                yield f"- `{method}`: {_one_line(inspect.getdoc(function))}"
        yield ""


def _signature(thing: Any) -> str:
    """The arguments with types and defaults, and the type of what is returned."""
    if inspect.isclass(thing) and ("__init__" not in vars(thing) or hasattr(thing, "model_fields")):
        return ""  # of an exception or a section
    function = inspect.unwrap(thing.__init__ if inspect.isclass(thing) else thing)
    (parsed,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(parsed, ast.FunctionDef)
    types = {argument.arg: _type(argument.annotation) for argument in [*parsed.args.args, *parsed.args.kwonlyargs]}
    words: list[str] = []
    is_named = False
    for argument in inspect.signature(thing).parameters.values():
        if argument.kind is argument.KEYWORD_ONLY and not is_named:
            words, is_named = [*words, "*"], True
        value = json.dumps(argument.default) if isinstance(argument.default, str) else repr(argument.default)
        default = "" if argument.default is argument.empty else f" = {value}"
        stars = "**" if argument.kind is argument.VAR_KEYWORD else ""
        hint = f": {types[argument.name]}" if types.get(argument.name) else ""
        words.append(f"{stars}{argument.name}{hint}{default}".replace(" ", _FIXED))
    returned = _type(parsed.returns).replace(" ", _FIXED)
    return f"({', '.join(words)})" + (f"{_FIXED}->{_FIXED}{returned}" if returned not in ("", "None") else "")


def _type(annotation: ast.expr | None) -> str:
    """A type as text, without the checks of `Annotated`, and with aliases of ours written out."""

    class Plain(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            if ast.unparse(node.value) == "Annotated" and isinstance(node.slice, ast.Tuple):
                return self.visit(node.slice.elts[0])
            return self.generic_visit(node)

        def visit_Name(self, node: ast.Name) -> ast.AST:
            return ast.parse(_ALIASES[node.id], mode="eval").body if node.id in _ALIASES else node

    return ast.unparse(Plain().visit(annotation)) if annotation else ""


def _filled(signature: str) -> str:
    """A call, on lines that break between arguments."""
    return textwrap.fill(
        signature, _WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    ).replace(_FIXED, " ")


def _ffcv() -> Iterator[str]:
    """From the source alone, since FFCV may be missing."""
    folder = Path(widemix.__file__).with_name("ffcv")
    page, *modules = (
        ast.parse((folder / f"{name}.py").read_text(encoding="utf-8")) for name in ("__init__", "order", "operations")
    )
    names = {alias.name for node in page.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    yield f"## widemix.ffcv\n\n```\n{ast.get_docstring(page)}\n```\n"
    for part in (part for module in modules for part in module.body):
        if isinstance(part, ast.ClassDef | ast.FunctionDef) and part.name in names:
            body = part.body if isinstance(part, ast.ClassDef) else [part]
            made = [f for f in body if isinstance(f, ast.FunctionDef) and f.name in ("__init__", part.name)]
            arguments = ", ".join(_arguments(made[0])) if made else ""
            yield f"- `{part.name}({arguments})`: {_one_line(ast.get_docstring(part))}"
    yield ""


def _arguments(function: ast.FunctionDef) -> list[str]:
    names = [argument.arg for argument in function.args.args]
    defaults = [f"={ast.unparse(default)}" for default in function.args.defaults]
    named = zip(names, [*[""] * (len(names) - len(defaults)), *defaults], strict=True)
    return [name + default for name, default in named if name != "self"]


def _text(docstring: str | None) -> str:
    """A docstring as Markdown: lines about an argument become points."""
    return re.sub(r"^(\w+(?:, \w+)*): ", r"- `\1`: ", (docstring or "").replace("<", "&lt;"), flags=re.MULTILINE)


def _one_line(docstring: str | None) -> str:
    return " ".join((docstring or "").split())


if __name__ == "__main__":
    atomic_write(Path(sys.argv[1]) / "python.md", page())
    atomic_write(Path(sys.argv[1]) / "timm_names.md", timm_page())

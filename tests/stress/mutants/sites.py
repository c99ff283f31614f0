"""Where a file can be broken: each place of its syntax tree, or of its C, with what would stand there instead."""

import ast
import re
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
COMPARISONS |= {"in": "not in", "not in": "in", "is": "is not", "is not": "is"}
ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "/", "%": "*", "<<": ">>", ">>": "<<", "|": "&", "&": "|"}
_TOKEN = r"\*\*|not\s+in\b|is\s+not\b|\bin\b|\bis\b|<<|>>|<=|>=|==|!=|//|[-+*/%<>|&]"
# How something looks, which no test should hold.
LOOKS = {"alpha", "capsize", "color", "columns", "figsize", "fontsize", "height", "layout", "linestyle", "linewidth"}
LOOKS |= {"loc", "marker", "markersize", "ncols", "pad", "rotation", "shrink", "zorder"}
LEFT_OUT = LOOKS | {"frozen"}  # refuses an assignment that nothing makes
SYMMETRIC = {"array_equal", "gcd", "lcm", "max", "min", "transpose"}  # functions of arguments in any order


class Site(NamedTuple):
    """The bytes from `start` to `stop` of a file become `new`. line: from 1, of the first of them."""

    file: str
    line: int
    kind: str
    start: int
    stop: int
    new: str

    def is_code(self, text: str) -> bool:
        """Whether what comes of it can be run at all: brackets around a part are not in the syntax tree."""
        try:
            return not self.file.endswith(".py") or bool(ast.parse(self.changed(text)))
        except SyntaxError:
            return False

    def changed(self, text: str) -> str:
        """The file's text with the mutation."""
        data = text.encode()
        return (data[: self.start] + self.new.encode() + data[self.stop :]).decode()


def line_starts(text: str) -> list[int]:
    """The first byte of each line."""
    return [0, *accumulate(map(len, text.encode().splitlines(keepends=True)))]


def span(node: ast.AST, starts: list[int]) -> tuple[int, int]:
    """The first byte of a node, and that after its last one."""
    start = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
    return start, starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]


def sites(file: str, text: str) -> list[Site]:
    """All that a file offers, in its order."""
    found = _Python(file, text).sites if file.endswith(".py") else list(_of_c(file, text))
    return sorted(set(found))


class _Python(ast.NodeVisitor):
    """Comparisons, constants, signs, and/or, conditions, arguments, statements and returned values of functions.

    Left out: annotations, decorators, asserts, formatted strings, `__repr__`, what is for type checkers or for
    `python -m` alone, and the looks of plots.
    """

    def __init__(self, file: str, text: str):
        self.file, self.sites = file, list[Site]()
        self._data, self._begins = text.encode(), line_starts(text)
        self._depth = 0  # of functions
        self.visit(ast.parse(text))

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return span(node, self._begins)

    def _text(self, node: ast.AST) -> str:
        start, stop = self._span(node)
        return self._data[start:stop].decode()

    def _add(self, kind: str, start: int, stop: int, new: str) -> None:
        line = self._data.count(b"\n", 0, start) + 1
        self.sites.append(Site(self.file, line, kind, start, stop, new))

    def _swap_token(self, kind: str, left: ast.AST, right: ast.AST, table: dict[str, str], pattern: str) -> None:
        """Replace the operator between two nodes, which may be in brackets."""
        begin, end = self._span(left)[1], self._span(right)[0]
        match = re.search(pattern, self._data[begin:end].decode())
        if match and (new := table.get(re.sub(r"\s+", " ", match[0]))):
            self._add(kind, begin + match.start(), begin + match.end(), new)

    def _each(self, *nodes: ast.AST | None) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in ("__repr__", "extra_repr"):
            return
        self._each(*node.args.defaults, *node.args.kw_defaults)
        self._depth += 1
        self._each(*node.body)
        self._depth -= 1

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._each(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """None: it is for what can't happen."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """None: words."""

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in self._text(node.test) or "__name__" in self._text(node.test):
            return
        self._condition(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def _condition(self, test: ast.expr) -> None:
        if not isinstance(test, (ast.Compare, ast.Constant)):
            self._add("condition", *self._span(test), f"not ({self._text(test)})")

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right in pairwise([node.left, *node.comparators]):
            self._swap_token("comparison", left, right, COMPARISONS, _TOKEN)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        words = (ast.Constant, ast.JoinedStr)
        if not any(isinstance(side, words) and not _is_number(side) for side in (node.left, node.right)):
            self._swap_token("sign", node.left, node.right, ARITHMETIC, _TOKEN)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in pairwise(node.values):
            self._swap_token("and/or", left, right, {"and": "or", "or": "and"}, r"\band\b|\bor\b")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        start, _ = self._span(node)
        if isinstance(node.op, (ast.Not, ast.USub)):
            self._add("sign", start, start + (1 if isinstance(node.op, ast.USub) else len("not ")), "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add("constant", *self._span(node), str(not value))
        elif isinstance(value, int):
            self._add("constant", *self._span(node), str(value + 1))
            if value > 0:
                self._add("constant", *self._span(node), str(value - 1))
        elif isinstance(value, float):
            self._add("constant", *self._span(node), repr(2 * value or 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if len(plain) == len(node.args) and (name not in SYMMETRIC or len(plain) > 2):
            for first, second in pairwise(plain):
                if self._text(first) != self._text(second):
                    between = self._data[self._span(first)[1] : self._span(second)[0]].decode()
                    new = f"{self._text(second)}{between}{self._text(first)}"
                    self._add("arguments", self._span(first)[0], self._span(second)[1], new)
        parts = sorted([*node.args, *node.keywords], key=self._span)
        for before, part, after in zip([None, *parts], parts, [*parts[1:], None], strict=False):
            if isinstance(part, ast.keyword) and part.arg is not None and part.arg not in LEFT_OUT:
                start = self._span(part)[0] if before is None else self._span(before)[1]
                stop = self._span(after)[0] if before is None and after is not None else self._span(part)[1]
                self._add("arguments", start, stop, "")
        self._each(node.func, *node.args, *(part for part in node.keywords if part.arg not in LEFT_OUT))

    def visit_Return(self, node: ast.Return) -> None:
        value = node.value
        if isinstance(value, (ast.Compare, ast.BoolOp)) or (
            isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)
        ):
            self._add("return", *self._span(value), f"not ({self._text(value)})")
        elif value is not None and not (isinstance(value, ast.Constant) and value.value is None):
            self._add("return", *self._span(value), "None")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._add("statement", *self._span(node), "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add("statement", *self._span(node), "break")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        self._delete(node)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._delete(node)
        self._each(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._delete(node)
        self._each(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._delete(node)

    def _delete(self, node: ast.stmt) -> None:
        if self._depth:
            self._add("statement", *self._span(node), "pass")


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


_C = {"<=": "<", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&", "<<": ">>", ">>": "<<"}
_C |= {" < ": " <= ", " > ": " >= ", " + ": " - ", " - ": " + ", " * ": " / ", " / ": " * ", "+=": "-=", "-=": "+="}
_C_TOKEN = re.compile("|".join(map(re.escape, sorted(_C, key=len, reverse=True))) + r"|(?<![\w.])\d+(?![\w.])")
_C_STATEMENT = re.compile(r"^\s+([\w.>\[\]*-]+(?: [-+*/|&^]?= [^;{}]+|\([^;{}]*\));)$")


def _of_c(file: str, text: str) -> Iterator[Site]:
    """Tokens and statements of C; no comments, preprocessor lines or declarations."""
    code = re.sub(r"/\*.*?\*/|//[^\n]*|\"[^\"\n]*\"", lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.S)
    begin = 0
    for number, line in enumerate(code.splitlines(keepends=True), 1):
        if not line.startswith("#") and not line.rstrip().endswith("\\"):
            for match in _C_TOKEN.finditer(line):
                news = [_C[match[0]]] if match[0] in _C else [str(int(match[0]) + 1)]
                kind = "constant" if match[0].isdigit() else "sign" if match[0].strip() in "+-*/" else "comparison"
                for new in news:
                    at = len(text[: begin + match.start()].encode())
                    yield Site(file, number, kind, at, at + len(match[0]), new)
            if match := _C_STATEMENT.match(line.rstrip("\n")):
                at = len(text[: begin + match.start(1)].encode())
                yield Site(file, number, "statement", at, at + len(match[1].encode()), "")
        begin += len(line)

"""Which tests run: `make test` leaves out long ones and what repeats others in more cases, `make test-all` nothing.

`long` marks a test that is left out; `one_in(n)` a test of which each n-th case runs, from the first on. n shares no
divisor with the numbers of its parameters' values, so that each value is in some case. What the command line names,
a test or a case of it, runs.
"""

from collections import Counter
from collections.abc import Iterable

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run long tests and all cases too, as `make test-all` does")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: repeats more of what others hold in less time: make test-all")
    config.addinivalue_line("markers", "one_in(n): each n-th of its cases; make test-all runs all of them")


@pytest.hookimpl(tryfirst=True)  # before they are sorted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        named = {argument.split("::", 1)[1] for argument in config.args if "::" in argument}
        left_out = set(repeated(items, named))
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def repeated(items: Iterable[pytest.Item], named: Iterable[str] = ()) -> list[pytest.Item]:
    """Those that are left out, in their order; named: tests of the command line, what follows their file's name."""
    cases: Counter[str] = Counter()
    left_out = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        case = cases[test]
        cases[test] += 1
        marker = item.get_closest_marker("one_in")
        if item.get_closest_marker("long") or (marker and case % marker.args[0]):
            tail = item.nodeid.partition("::")[2]
            if not any(tail == name or tail.startswith((f"{name}[", f"{name}::")) for name in named):
                left_out.append(item)
    return left_out

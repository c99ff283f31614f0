"""Which tests run: `make test` leaves out long ones and what repeats others in more cases, `make test-all` nothing.

`long` marks a test that is left out; `one_in(n)` a test of which each n-th case runs, from the first on. n shares no
divisor with the numbers of its parameters' values, so that each value is in some case. What the command line names,
a test or a case of it, runs.
"""

from collections import Counter

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run long tests and all cases too, as `make test-all` does")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: repeats more of what others hold in less time: make test-all")
    config.addinivalue_line("markers", "one_in(n): each n-th of its cases; make test-all runs all of them")


@pytest.hookimpl(tryfirst=True)  # before they are sorted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    named = [argument.split("::", 1)[1] for argument in config.args if "::" in argument]
    cases: Counter[str] = Counter()
    kept, left_out = [], []
    for item in items:
        test, _, _ = item.nodeid.partition("[")
        marker = item.get_closest_marker("one_in")
        is_left_out = item.get_closest_marker("long") or (marker and cases[test] % marker.args[0])
        cases[test] += 1
        tail = item.nodeid.partition("::")[2]
        is_named = any(tail == name or tail.startswith((f"{name}[", f"{name}::")) for name in named)
        (left_out if is_left_out and not is_named else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept

"""`--workers N`: run the tests in so many forks of the process that has collected them, each file in one of them.

Processes of pytest-xdist each import torch and collect ten thousand tests, which is 15 s of CPU time. They are for
tests on GPUs, which a fork can't use once the process that it is a fork of has looked for them.
"""

import os
import signal
import traceback
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, metavar="N", help="processes that run the tests; 0: this one")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    option = session.config.option
    if not option.workers or option.collectonly or option.usepdb or session.testsfailed:
        return None  # as pytest does it
    left = session.items
    while left:
        begun = _run(session, left)
        assert begun, "each worker ended before its first test"
        left = [item for item in left if item not in begun]  # of workers that have crashed
    return True


def _run(session: pytest.Session, items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Run tests until they or the workers have ended; return those that have begun."""
    session.config._tmp_path_factory.getbasetemp()  # made by this process, which also removes those of earlier runs
    files = [list(file) for _, file in groupby(enumerate(items), key=lambda item: item[1].path)]
    read, write = os.pipe()  # numbers of files: the worker that reads one runs it
    os.write(write, b"".join(number.to_bytes(2) for number in range(len(files))))
    os.close(write)
    workers: dict[Connection, int] = {}  # what they say, and their process
    running: dict[Connection, pytest.Item] = {}
    begun = set()
    try:
        for _ in range(session.config.option.workers):
            reader, process = _start(session, _tests(files, read), workers)
            workers[reader] = process
        while workers:
            for reader in wait(list(workers)):
                try:
                    said = reader.recv()
                except EOFError:
                    said = None
                if said is None:
                    code = os.waitstatus_to_exitcode(os.waitpid(workers.pop(reader), 0)[1])
                    reader.close()
                    how = f"by signal {-code}" if code < 0 else f"with {code}"
                    if reader in running:
                        _log(session, running[reader], [_crash(session.config, running[reader], how)])
                    elif code:
                        raise RuntimeError(f"a worker ended {how} between two tests")
                elif isinstance(said, int):
                    running[reader] = items[said]
                    begun.add(items[said])
                else:
                    _log(session, running.pop(reader), said)
    except KeyboardInterrupt:  # of this process alone, it may be
        for process in workers.values():
            os.kill(process, signal.SIGINT)
        raise
    finally:
        os.close(read)
        for reader, process in workers.items():
            reader.close()  # it ends after its test
            os.waitpid(process, 0)
    return begun


def _start(
    session: pytest.Session, tests: Iterator[tuple[int, pytest.Item]], others: Iterable[Connection]
) -> tuple[Connection, int]:
    """Fork a worker; return what it says, and its process."""
    reader, writer = Pipe(duplex=False)
    process = os.fork()
    if not process:
        for other in (reader, *others):
            other.close()
        _work(session, tests, writer)
    writer.close()
    return reader, process


def _log(session: pytest.Session, item: pytest.Item, reports: Sequence[dict[str, Any]]) -> None:
    """Have the reports of a test printed, counted and written."""
    hook = session.config.hook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for data in reports:
        report = hook.pytest_report_from_serializable(config=session.config, data=data)
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)


def _crash(config: pytest.Config, item: pytest.Item, how: str) -> dict[str, Any]:
    report = pytest.TestReport(item.nodeid, item.location, {}, "failed", f"its process ended {how}", "call")
    return config.hook.pytest_report_to_serializable(config=config, report=report)


class _Sender:
    """In a worker: sends the reports of each test once it has ended."""

    def __init__(self, config: pytest.Config, to: Connection):
        self._config, self._to = config, to
        self._reports: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports.append(data)

    def pytest_runtest_logfinish(self) -> None:
        self._to.send(self._reports)
        self._reports = []


def _work(session: pytest.Session, tests: Iterator[tuple[int, pytest.Item]], to: Connection) -> NoReturn:
    """In the fork."""
    config, code = session.config, 1
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # whose files are those of all
        capture.start_global_capturing()
        folders = config._tmp_path_factory
        folders._basetemp = folders.getbasetemp() / f"{os.getpid()}"
        folders._basetemp.mkdir()
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(_Sender(config, to))
        following = next(tests, None)
        while following:
            (number, item), following = following, next(tests, None)
            to.send(number)
            config.hook.pytest_runtest_protocol(item=item, nextitem=following and following[1])
        to.send(None)  # a process that a test has left may hold the pipe too, and then it has no end
        code = 0
    except (BrokenPipeError, KeyboardInterrupt):
        session._setupstate.teardown_exact(None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _interrupt(*_: object) -> NoReturn:
    """Once: a terminal interrupts each process, and the first one its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _tests(files: Sequence[list[tuple[int, pytest.Item]]], numbers: int) -> Iterator[tuple[int, pytest.Item]]:
    while number := os.read(numbers, 2):
        yield from files[int.from_bytes(number)]

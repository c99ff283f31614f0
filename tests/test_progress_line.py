"""What takes long says how far it is."""

import io
import itertools
import re
import subprocess
import sys
import time
from contextlib import redirect_stderr

import pytest

from tests.clone import CLONE, ROOT
from tests.terminal import Terminal
from widemix.evaluation.assessment import assess_network
from widemix.evaluation.networks import of_recipe
from widemix.models.registry import build_model
from widemix.progress_line import Display, ProgressLine, announce, announce_import, show_clock, show_rate, track
from widemix.recipe import load_recipe

BAR = "\N{BOX DRAWINGS HEAVY HORIZONTAL}"


@pytest.fixture
def clock(system):
    """A clock that goes on by so many seconds at each look: clock(seconds)."""

    def go(seconds: float) -> None:
        now = itertools.count(step=seconds)
        system({"time.perf_counter": lambda: next(now)})

    return go


@pytest.mark.parametrize(
    ("items", "seconds", "given", "said"),
    [
        # Not of its pace after the first, which took the start too, nor of the time left when none is.
        ("abcd", 1.5, {}, ["letters: 2 of 4, 0.67 letters/s, 0:00:03 left", "letters: 4 of 4, 0.4 letters/s"]),
        ("cd", 1.5, {"done": 2}, ["letters: 4 of 4, 0.67 letters/s"]),
        ("abcd", 0, {}, []),
    ],
)
def test_what_takes_long_says_how_far_it_is(items, seconds, given, said, capsys, clock):
    clock(seconds)
    assert list(track(items, "letters", 4, "letters", **given)) == list(items)
    assert capsys.readouterr().err.splitlines() == said


@pytest.mark.parametrize(
    ("total", "done", "added", "seconds", "said"),
    [
        (1437, 400, [1], 1, ["train: 401 of 1,437"]),
        (3, 0, [1, 2], 0, ["train: 1 of 3", "train: 3 of 3"]),  # a clock that stands gives no pace
        (3, 0, [1, 4], 1, ["train: 1 of 3", "train: 5 of 3, 1 images/s"]),  # more than all leaves no time
    ],
)
def test_a_tally_says_no_more_than_it_knows(total, done, added, seconds, said, capsys, clock):
    clock(seconds)
    with (
        ProgressLine("train", total, "images", done, after=0.0) as shown,
        ProgressLine("none", 3, after=0.0, enabled=False) as none,
    ):
        for number in added:
            shown.add(number)
            none.add(number)
    assert [re.sub(r", [\d.]+ images", ", 1 images", line) for line in capsys.readouterr().err.splitlines()] == said


COUNT = """
import sys
from widemix.progress_line import ProgressLine, print_status
with ProgressLine("blocks [bold]", 4000, "blocks", after=0.0) as progress:
    for number in range(4):
        progress.add(1000)
        print(f"stdout {number}", flush=True)
        print_status(f"status [bold] {number}")
"""


def test_a_terminal_has_a_bar_below_what_is_printed():
    lines = Terminal("-c", COUNT).read_to_end().split("\r\n")
    assert len(lines) == 10  # eight lines, the bar once after them, and the cursor shown again
    printed = [re.sub(r".*\[2K", "", line) for line in lines[1:8:2]]
    assert printed == [f"status [bold] {number}" for number in range(4)]
    assert "blocks [bold]: 1,000 of 4,000" in lines[0]
    assert BAR in lines[8]
    assert re.search(r"blocks \[bold\]: 4,000 of 4,000, [\d,]+ blocks/s", lines[8])
    assert lines[9] == "\x1b[?25h"


def count(**options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", COUNT], cwd=CLONE, text=True, check=True, **options)


def test_a_log_and_a_terminal_that_only_appends_have_lines(monkeypatch):
    """The log's service may want colour."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    log = count(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE).stderr
    monkeypatch.setenv("TERM", "dumb")
    for said in (log, Terminal("-c", COUNT).read_to_end()):
        found = [line.partition(", ")[0] for line in said.splitlines() if line.startswith("blocks")]
        assert found == [f"blocks [bold]: {number},000 of 4,000" for number in (1, 4)]
        assert "\x1b" not in said


def test_a_bar_keeps_its_width_beside_a_long_text():
    run = (
        "from widemix.progress_line import Display; display = Display(2); display.show(1, 'ab' * 99); display.close()"
    )
    last = Terminal("-c", run).read_to_end().split("\r\n")[0].rpartition("\x1b[2K")[2]
    shown = f"{BAR * 6}\N{BOX DRAWINGS HEAVY LEFT}{BAR * 6} {'ab' * 32}"
    assert re.sub(r"\x1b\[\d+m", "", last) == shown


def test_the_stdout_of_a_terminals_bar_may_be_a_file(tmp_path):
    file = tmp_path / "out"
    said = Terminal("-c", f"import sys; sys.stdout = open({str(file)!r}, 'w')\n" + COUNT).read_to_end()
    assert file.read_text().splitlines() == [f"stdout {number}" for number in range(4)]
    assert "stdout" not in said


def test_a_bar_is_drawn_ten_times_a_second():
    run = "import sys, time; sys.stdout = None; now = [0.0]; time.perf_counter = lambda: now[0]\n"
    run += "from widemix.progress_line import Display; display = Display(2)\n"
    run += "for now[0] in (0.0, 0.05, 0.2, 0.25, 0.5): display.show(1, f'at {now[0]}.')\n"
    said = Terminal("-c", run).read_to_end()
    assert [f"at {seconds}." in said for seconds in (0.0, 0.05, 0.2, 0.25, 0.5)] == [True, False, True, False, True]


def test_full_disks_and_logs_nobody_reads_stop_no_work():
    """The latter as after Ctrl-C at `2>&1 | tee log`, which ends tee first."""
    with open("/dev/full", "w") as full:
        code = COUNT.replace("print_status(", "str(")
        done = subprocess.run([sys.executable, "-c", code], cwd=CLONE, stdout=subprocess.PIPE, stderr=full, text=True)
    assert done.stdout.splitlines() == [f"stdout {number}" for number in range(4)]
    closed = (
        "from widemix.progress_line import Display; display = Display(2); display.print('one'); display.print('two')"
    )
    closed += "; print('here', flush=True)"
    with subprocess.Popen([sys.executable, "-c", closed], cwd=CLONE, stdout=subprocess.PIPE, stderr=-1) as process:
        process.stderr.close()
        assert process.stdout.read() == b"here\n"


def test_a_line_of_a_log_is_the_text(capsys):
    """Of any length, and whatever rich makes of some words on a terminal."""
    display, line = Display(2), "class :ant: of [bold]train[/bold] " + "long " * 60 + "line"
    display.show(1, line, at_once=True)
    display.print("https://host/a 1,000")
    assert capsys.readouterr().err == f"{line}\nhttps://host/a 1,000\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_display_may_be_silent_or_have_lines(terminal, monkeypatch, system, capsys):
    monkeypatch.setenv("TERM", "xterm")
    system({"sys.stderr.isatty": lambda: terminal})
    displays = [Display(2, enabled=False), Display(2, bar=False)]
    for display in displays:
        display.show(1, "half", at_once=True)
        display.print("all")
        display.close()
    assert [display.has_bar for display in displays] == [False, False]
    assert capsys.readouterr().err == "half\nall\n"


def test_a_rate_has_two_digits_or_all_before_the_point():
    shown = {0.0123: "0.012", 0.5: "0.5", 1.25: "1.2", 9.6: "9.6", 10.0: "10", 10.6: "11", 12345.6: "12,346"}
    assert {rate: show_rate(rate) for rate in shown} == shown


def test_a_block_is_announced_once_it_takes_long():
    deadline = time.monotonic() + 300
    with redirect_stderr(io.StringIO()) as said:
        with announce("a short block", after=60.0):
            pass
        with pytest.raises(KeyboardInterrupt), announce("a block that fails", after=0.3):
            raise KeyboardInterrupt
        with announce("a long block", after=0.5):
            while not said.getvalue().endswith("\n") and time.monotonic() < deadline:
                time.sleep(0.01)
    assert said.getvalue() == "a long block\n"


@pytest.mark.parametrize(
    ("terminal", "rank", "said"), [(False, "0", 0), (True, "1", 0), (True, "0", 1), (True, "", 1)]
)
def test_the_import_is_announced_on_a_terminal_by_one_rank(terminal, rank, said, monkeypatch, system):
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
    started = []
    system({"sys.stderr.isatty": lambda: terminal, "threading.Timer.start": lambda timer: started.append(timer)})
    with announce_import():
        assert [(timer.interval, timer.args) for timer in started] == [(5.0, ["importing PyTorch"])] * said


def test_an_evaluation_says_how_far_it_is(digits, clock, capsys):
    recipe = load_recipe(ROOT / "recipes/digits/mixer.yaml", [("data.path", str(digits)), ("model.depth", "1")])
    network = of_recipe("mixer", recipe, build_model(recipe.model, 8, 10))
    clock(10)  # each batch takes ten seconds
    assess_network(network, batch=100)
    assert [line.partition(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"samples evaluated: {number} of 360" for number in (100, 200, 300, 360)
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0:00:00"), (59.9, "0:00:59"), (60, "0:01:00"), (3661, "1:01:01"), (90_000, "25:00:00")],
)
def test_a_duration_is_in_hours_minutes_and_seconds(seconds, shown):
    assert show_clock(seconds) == shown

"""What takes long says how far it is."""

import io
import itertools
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tests.clone import CLONE, ROOT
from tests.terminal import Terminal
from widemix import tally
from widemix.evaluation.assessment import assess_network
from widemix.evaluation.networks import of_recipe
from widemix.models.registry import build_model
from widemix.recipe import load_recipe
from widemix.tally import Display, Tally, announce, show_clock, track


def test_what_takes_long_says_how_far_it_is(capsys, monkeypatch):
    """Not of its pace after the first, which took the start too, nor of the time left when none is."""
    now = iter(range(0, 1000, 3))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now) / 2)  # two looks at the clock an item
    assert list(track("abcd", "letters", 4, "letters")) == list("abcd")
    assert capsys.readouterr().err.splitlines() == [
        "letters: 2 of 4, 0.67 letters/s, 0:00:03 left",
        "letters: 4 of 4, 0.4 letters/s",
    ]
    now = iter(range(0, 1000, 3))
    assert list(track("cd", "letters", 4, "letters", done=2)) == list("cd")
    assert capsys.readouterr().err == "letters: 4 of 4, 0.67 letters/s\n"
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    assert list(track("abcd", "letters", 4)) == list("abcd")
    assert capsys.readouterr().err == ""


def test_a_long_start_says_nothing_of_the_pace(capsys, monkeypatch):
    with Tally("train", 1437, "images", done=400, after=0.0) as tally:
        tally.add()
    assert capsys.readouterr().err == "train: 401 of 1,437\n"


def test_more_than_all_leaves_no_time_and_a_clock_that_stands_gives_no_pace(capsys, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
    with Tally("blocks", 3, "blocks", after=0.0) as shown, Tally("none", 3, after=0.0, enabled=False) as hidden:
        for number in (1, 2):
            for each in (shown, hidden):
                each.add(number)
    assert capsys.readouterr().err == "blocks: 1 of 3\nblocks: 3 of 3\n"
    now = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    with Tally("blocks", 3, "blocks", after=0.0) as shown:
        shown.add(1)
        shown.add(4)
    _, last = capsys.readouterr().err.splitlines()
    assert last.startswith("blocks: 5 of 3, ")
    assert "left" not in last


COUNT = """
import sys
from widemix.tally import Tally, print_status
with Tally("blocks [bold]", 4000, "blocks", after=0.0) as tally:
    for number in range(4):
        tally.add(1000)
        print(f"stdout {number}", flush=True)
        print_status(f"status [bold] {number}")
"""


def test_a_terminal_has_a_bar_below_what_is_printed():
    said = Terminal("-c", COUNT).read_to_end()
    lines = said.split("\r\n")
    assert len(lines) == 10  # eight lines, the bar once after them, and the cursor shown again
    assert [re.sub(r".*\[2K", "", line) for line in lines[1:8:2]] == [
        f"status [bold] {number}" for number in range(4)
    ]
    assert "blocks [bold]: 1,000 of 4,000" in lines[0]
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in lines[8]
    assert re.search(r"blocks \[bold\]: 4,000 of 4,000, [\d,]+ blocks/s", lines[8])
    assert lines[9] == "\x1b[?25h"


def test_a_terminal_that_only_appends_and_a_log_whose_service_wants_colour_have_lines(monkeypatch):
    expected = [f"blocks [bold]: {number},000 of 4,000" for number in (1, 4)]
    monkeypatch.setenv("FORCE_COLOR", "1")
    log = subprocess.run(
        [sys.executable, "-c", COUNT], cwd=CLONE, stderr=subprocess.PIPE, text=True, check=True
    ).stderr
    monkeypatch.setenv("TERM", "dumb")
    for said in (log, Terminal("-c", COUNT).read_to_end()):
        assert [line.partition(", ")[0] for line in said.splitlines() if line.startswith("blocks")] == expected
        assert "\x1b" not in said


def test_a_bar_keeps_its_width_beside_a_long_text():
    run = "from widemix.tally import Display; display = Display(2); display.show(1, 'ab' * 99); display.close()"
    last = Terminal("-c", run).read_to_end().split("\r\n")[0].rpartition("\x1b[2K")[2]
    assert re.sub(
        r"\x1b\[\d+m", "", last
    ) == "\N{BOX DRAWINGS HEAVY HORIZONTAL}" * 6 + "\N{BOX DRAWINGS HEAVY LEFT}" + (
        "\N{BOX DRAWINGS HEAVY HORIZONTAL}" * 6 + " " + "ab" * 32
    )


def test_the_stdout_of_a_terminals_bar_may_be_a_file(tmp_path):
    file = tmp_path / "out"
    redirected = f"import sys; sys.stdout = open({str(file)!r}, 'w')\n" + COUNT
    said = Terminal("-c", redirected).read_to_end()
    assert file.read_text().splitlines() == [f"stdout {number}" for number in range(4)]
    assert "stdout" not in said


def test_a_full_disk_stops_no_work_and_a_terminal_has_its_bar_without_a_stdout(monkeypatch):
    """Which is drawn ten times a second, where a log has a line every five."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    now, drawn = [0.0], []
    monkeypatch.setattr(tally, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    log = Display(2)
    monkeypatch.setattr(log._console, "print", full)
    log.show(1, "half", at_once=True)
    log.print("all")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", None)
    bar = Display(2)
    monkeypatch.setattr(
        bar, "_bar", SimpleNamespace(update=lambda *_, **__: None, refresh=lambda: drawn.append(now[0]))
    )
    for now[0] in (0.0, 0.05, 0.2, 0.25):
        bar.show(1, "half")
    monkeypatch.undo()
    bar.close()
    assert (log.has_bar, bar.has_bar, drawn) == (False, True, [0.0, 0.2])


def test_a_line_of_a_log_is_the_text_as_it_is(capsys):
    """Of any length, and whatever rich makes of some words on a terminal."""
    display, line = Display(2), "class :ant: of [bold]train[/bold] " + "long " * 60 + "line"
    display.show(1, line, at_once=True)
    display.print("https://host/a 1,000")
    assert capsys.readouterr().err == f"{line}\nhttps://host/a 1,000\n"


def test_a_display_that_is_not_wanted_is_silent_and_a_terminal_may_have_lines_in_place_of_a_bar(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        displays = [Display(2, enabled=False), Display(2, bar=False)]
        for display in displays:
            display.show(1, "half", at_once=True)
            display.print("all")
            display.close()
        assert [display.has_bar for display in displays] == [False, False]
        assert capsys.readouterr().err == "half\nall\n"


def test_a_log_that_nobody_reads_any_more_stops_no_work(monkeypatch):
    """As after Ctrl-C at `2>&1 | tee log`, which ends tee first."""
    asked = []

    class Closed(io.StringIO):
        def write(self, text):
            asked.append(text)
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    display = Display(2)
    display.print("one")
    display.print("two")
    assert [text.strip() for text in asked] == ["one"]


def test_a_rate_has_two_digits_or_all_before_the_point():
    shown = {0.0123: "0.012", 0.5: "0.5", 1.25: "1.2", 9.6: "9.6", 10.0: "10", 10.6: "11", 12345.6: "12,346"}
    assert {rate: tally.show_rate(rate) for rate in shown} == shown


def test_a_block_is_announced_once_it_takes_long(capsys):
    with announce("a short block", after=60.0):
        pass
    assert capsys.readouterr().err == ""
    said, deadline = "", time.monotonic() + 300
    with announce("a long block", after=0.0):
        while not said.endswith("\n") and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert said == "a long block\n"


def test_a_block_that_fails_is_not_announced_later(monkeypatch):
    done: list[str] = []
    timer = SimpleNamespace(start=lambda: done.append("starts"), cancel=lambda: done.append("is cancelled"))
    monkeypatch.setattr(tally, "Timer", lambda *_: timer)
    with pytest.raises(KeyboardInterrupt), announce("a block"):
        raise KeyboardInterrupt
    assert done == ["starts", "is cancelled"]


def test_the_import_is_announced_on_a_terminal_by_one_rank(monkeypatch):
    said = []
    monkeypatch.setattr(tally, "announce", lambda what, after: said.append(what) or nullcontext())
    for terminal, rank in ((False, "0"), (True, "1"), (True, "0")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with tally.announce_import():
            assert len(said) == (terminal and rank == "0")
    monkeypatch.delenv("RANK")
    with tally.announce_import():
        assert len(said) == 2


def test_an_evaluation_says_how_far_it_is(digits, tmp_path, monkeypatch, capsys):
    recipe = load_recipe(ROOT / "recipes/digits/mixer.yaml", [("data.path", str(digits)), ("model.depth", "1")])
    network = of_recipe("mixer", recipe, build_model(recipe.model, 8, 10))
    clock = itertools.count(step=10)  # each batch takes ten seconds
    monkeypatch.setattr("widemix.tally.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assess_network(network, batch=100)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "samples evaluated: 100 of 360",
        "samples evaluated: 200 of 360, 5 samples/s, 0:00:32 left",
        "samples evaluated: 300 of 360, 5 samples/s, 0:00:12 left",
        "samples evaluated: 360 of 360, 4.3 samples/s",
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0:00:00"), (59.9, "0:00:59"), (60, "0:01:00"), (3661, "1:01:01"), (90_000, "25:00:00")],
)
def test_a_duration_is_in_hours_minutes_and_seconds(seconds, shown):
    assert show_clock(seconds) == shown

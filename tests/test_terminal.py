"""What strangers name their files, classes and keys: a terminal obeys none of it, and a spreadsheet computes none."""

import csv
import json

import pytest

from tests.terminal import Terminal
from widemix.cli.commands import run_command
from widemix.cli.parser import make_parser
from widemix.files import csv_text
from widemix.recipe import dump_recipe, load_recipe

TITLE = "\x1b]0;owned\x07"  # sets the title of the window
EVIL = f"{TITLE}\x1b[8mhidden\r\x9b2J\x08\u202eslevel"


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs, the first with hostile names."""
    for name, keys in ((EVIL, [("data.path", json.dumps(EVIL))]), ("=cmd|' C'!A0", [])):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "recipe.yaml").write_text(dump_recipe(load_recipe("digits/mixer", keys)))
        (run / "environment.json").write_text("{}")
        (run / "metrics.jsonl").write_text("")
    monkeypatch.chdir(tmp_path / "runs")


def said(capsys, *words: str) -> str:
    run_command(make_parser(), None, words)
    return "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "words",
    [
        ("runs", "."),
        ("runs", "csv", "."),
        ("runs", "diff", EVIL, "=cmd|' C'!A0"),
        ("report", EVIL, "--to", f"{EVIL}.html"),
        ("report", f"no {EVIL}"),
        ("cost", f"no {EVIL}"),
        ("train", "digits/mixer", f"--model.kind={EVIL}"),
        ("prep", "image-folder", "--from", EVIL, "--to", "new"),
        ("verify", EVIL),
        ("eval", EVIL),
        ("verify", "owned \udcc2\udc9b2J"),  # bytes that are a control character in UTF-8
        (EVIL,),
    ],
    ids=lambda words: " ".join(words[:2]) if words[0] != EVIL else "no command",
)
def test_control_characters_of_names_are_shown_not_obeyed(runs, capsys, words):
    text = said(capsys, *words)
    assert "owned" in text, text
    assert not [character for character in text if not character.isprintable() and character != "\n"]


def test_bars_and_tables_on_terminals_show_control_characters():
    program = f"""if True:
        import rich.table
        from widemix.progress_line import Console, ProgressLine
        table = rich.table.Table({EVIL!r})
        table.add_row({EVIL!r})
        Console().print(table)
        with ProgressLine({EVIL!r}, 2, after=0) as progress:
            progress.add()
            progress.add()
    """
    text = Terminal("-c", program).read_to_end()
    assert text.count(r"\x1b]0;owned") >= 4  # heading and cell, and the bar more than once
    assert TITLE not in text
    assert "\x1b[" in text  # rich's own: the bar


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        ("=1+1", "'=1+1"),
        ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
        ("-1+1", "'-1+1"),
        ("@SUM(1)", "'@SUM(1)"),
        ("\uff1d1", "'\uff1d1"),
        ("a;=1", "a;'=1"),
        ("a\t=1", "a\t'=1"),
        ("a\n=1", "a\n'=1"),
        *((text, text) for text in ("-0.5", "+1e-3", "-", "-inf", "a=1", "1-2", "-1,234.5", "", "'")),
        (-0.5, "-0.5"),
        (None, ""),
    ],
)
def test_a_spreadsheet_computes_no_text_of_a_csv_file(cell, written):
    assert list(csv.reader(csv_text([["name", cell]]).splitlines(keepends=True))) == [["name", written]]


def test_a_run_named_as_a_formula_is_text(runs, capsys):
    rows = list(csv.DictReader(said(capsys, "runs", "csv", "=cmd|' C'!A0").splitlines()))
    assert [row["run"] for row in rows] == ["'=cmd|' C'!A0"]

"""The help of every command: all options, examples that parse, further options by section."""

import argparse
import importlib.util
import re
import shlex
import subprocess
import sys
import threading

import pytest

from tests.clone import CLONE
from widemix.cli import main, parser
from widemix.cli.arguments import Parser, describe_section
from widemix.cli.commands import split_overrides
from widemix.cli.completion import make_completed
from widemix.cli.parser import make_parser
from widemix.cli.reference import commands_of
from widemix.errors import InputError
from widemix.recipe import SECTIONS, keys

COMMANDS = make_parser()
PARSERS = {parser.prog: parser for parser in commands_of(COMMANDS)}


@pytest.mark.parametrize("name", PARSERS)
def test_help_and_its_sections_have_every_option_within_80_columns(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parser = PARSERS[name]
    assert isinstance(parser, Parser)
    text = parser.format_help()
    sections = re.findall(r"^  (\w+)", text.partition("sections, printed by")[2].partition("\n\n")[0], re.MULTILINE)
    said = text + "".join(map(parser.format_section, sections))
    assert [line for line in said.splitlines() if len(line) > 80] == []
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    options = [option for action in actions for option in action.option_strings]
    assert [option for option in options if not re.search(rf"^  .*{option}\b", said, re.MULTILINE)] == []


def test_every_command_is_listed_with_a_line():
    above: list[argparse.ArgumentParser] = [COMMANDS]
    for command in above:
        for action in command._actions:
            if isinstance(action, argparse._SubParsersAction):
                listed = {choice.dest: choice.help for choice in action._get_subactions()}
                assert listed.keys() == action.choices.keys(), command.prog
                assert all(listed.values()), command.prog
                above += action.choices.values()
    assert len(above) > len(PARSERS)


def test_a_default_that_help_says_is_the_options():
    said, own = {}, {}
    for name, command in PARSERS.items():
        for action in command._actions:
            found = re.search(r"\(default: ([^)]+)\)", (action.help or "").replace("%%", "%"))
            if action.dest == "ranks" and action.default is None:
                continue  # 1, or as many as the launcher has started
            if found and (re.fullmatch(r"[\d.]+%?", found[1]) or found[1] in (action.choices or ())):
                option, default = f"{name} {action.option_strings[0]}", action.default
                said[option], own[option] = found[1], f"{default:g}" if isinstance(default, float) else str(default)
    assert own == said
    assert {"widemix prep --max-bad", "widemix prep --encoding", "widemix cost --gamma"} <= {*said}


@pytest.mark.parametrize("name", parser.COMMANDS)
def test_a_command_alone_is_as_among_the_others(name):
    alone, among = (
        {each.prog: each.format_help() for each in commands_of(made)} for made in (make_parser(name), COMMANDS)
    )
    assert alone == {prog: text for prog, text in among.items() if prog.split()[1] == name}


def test_a_command_does_not_import_the_others():
    code = "from widemix.cli.parser import make_parser; import sys; make_parser('train'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=CLONE, capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert "widemix.cli.train" in modules
    assert not {"widemix.cli.study", "widemix.cli.bench", "widemix.cli.prep"} & {*modules}


def test_examples_in_help_parse(monkeypatch):
    monkeypatch.chdir(CLONE)
    text = "".join(parser.format_help() for parser in PARSERS.values()).replace("\\\n", "")
    examples = re.findall(r"^  widemix (.+?)(?:   .*)?$", text, re.MULTILINE)
    assert {example.split()[0] for example in examples} >= {*parser.COMMANDS} - {"bench"}
    for example in examples:
        words, overrides = split_overrides(shlex.split(example.partition(" > ")[0]))
        arguments = COMMANDS.parse_args(words)
        assert not overrides or hasattr(arguments, "recipe"), example


@pytest.mark.parametrize(
    ("name", "terminal", "said"),
    [
        ("torch.slow", True, True),
        ("timm.slow", True, True),
        ("other.slow", True, False),
        ("torch.slow", False, False),
    ],
)
def test_a_long_import_is_named_on_a_terminal_alone(name, terminal, said, tmp_path, system, capsys):
    """In the place of the timer is one that fires while that module is imported."""
    done = []

    class Timer:
        def __init__(self, seconds, function):
            self.function = function

        def start(self):
            (tmp_path / "slow.py").write_text("fire()\n")
            spec = importlib.util.spec_from_file_location(name, tmp_path / "slow.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            module.fire = self.fire
            spec.loader.exec_module(module)

        def fire(self):
            thread = threading.Thread(target=self.function)
            thread.start()
            thread.join()

        def cancel(self):
            done.append("cancelled")

    system({"threading.Timer": Timer, "sys.argv": ["widemix", "--version"], "sys.stderr.isatty": lambda: terminal})
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    assert done == ["cancelled"]
    assert capsys.readouterr().err == ("importing torch and timm\n" if said else "")


def test_the_keys_of_sections_are_filled_to_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for section in SECTIONS:
        text = describe_section(section)
        assert [line for line in text.splitlines() if len(line) > 80 and not line.startswith("  --")] == []


def test_each_key_is_told_with_its_default():
    for key, default in (("epochs", None), ("seed", "0"), ("ema_decay", "null"), ("fp8", "false"), ("freeze", "[]")):
        _, _, told = describe_section("train").partition(f"  --train.{key} ")
        line = " ".join(told.partition("\n  --")[0].split())
        assert ("(default:" in line) is line.endswith(f"(default: {default})") is (default is not None), key


def test_a_key_of_every_kind_of_data_is_listed_once():
    listed = re.findall(r"^  --(\S+)", describe_section("data"), re.MULTILINE)
    assert listed.count("data.path") == listed.count("data.workers") == 1
    assert listed.count("data.kind") == 2
    assert set(listed) == {name for name in keys() if name.startswith("data.")}


def test_completion_knows_recipes_studies_and_keys():
    completed = make_completed()
    given = completed.parse_args(["train", "digits/rp_mixer", "--optim.lr", "1"])
    assert (given.recipe, vars(given)["optim.lr"]) == ("digits/rp_mixer", "1")
    assert completed.parse_args(["study", "plan", "figure7"]).recipe == "figure7"
    with pytest.raises(InputError):
        completed.parse_args(["train", "digits/none"])

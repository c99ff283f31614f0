"""How a command ends: its exit code, the lines that it prints, and on which rank; what is checked at first."""

import errno
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import pytest

from widemix import cli
from widemix.cli import commands
from widemix.cli.arguments import Parser
from widemix.cli.commands import check_least, check_most, load_from_arguments, run_command, split_overrides
from widemix.cli.parser import make_parser
from widemix.distributed.startup_timing import VARIABLE
from widemix.errors import Exit, InputError, LauncherError, RunError


def run(error: BaseException | int, *words: str) -> int:
    """The exit code of a command that ends so."""

    def command(arguments: Namespace):
        if isinstance(error, BaseException):
            raise error
        return error

    return run_command(Parser(), command, words)


@pytest.fixture
def statuses(tmp_path, monkeypatch):
    """The folder in which rank 1 of 2 writes its status."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WIDEMIX_RANK_STATUS_DIR", str(tmp_path / "status"))
    return tmp_path / "status"


def test_what_is_started_imports_nothing_from_the_current_folder(monkeypatch):
    """Started by `python -m`, or with an empty item of PYTHONPATH; tests/test_processes.py starts processes."""
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "/a b", "", "/c", ""]))
    assert run(0) == 0
    assert os.environ["PYTHONSAFEPATH"] == "1"
    assert os.environ["PYTHONPATH"] == os.pathsep.join(["/a b", "/c"])


FULL, QUOTA = OSError(errno.ENOSPC, "No space"), OSError(errno.EDQUOT, "Quota exceeded")
UNWRITTEN = "error: the output could not be written:"
# How a command ends, its exit code and what it prints; whether each rank prints it, and the code that torchrun gets.
ENDINGS = [
    (0, 0, "", True, 0),
    (Exit.FAILED, 1, "", True, 1),
    (Exit.REQUEUE, 75, "", True, 0),
    (InputError("a.yaml: two\nlines"), 2, "error: a.yaml: two\\nlines\n", False, 0),  # rank 0 makes the same mistake
    (LauncherError("WORLD_SIZE: what"), 2, "error: WORLD_SIZE: what\n", True, 0),
    (RunError("the loss\nis nan"), 1, "error: the loss\\nis nan\n", True, 1),
    (KeyboardInterrupt(), 1, "interrupted\n", True, 1),
    (FileNotFoundError(errno.ENOENT, "No such file", "a\nb"), 1, "error: a\\nb: No such file\n", True, 1),
    (OSError(errno.ENOSPC, "No space", "a.json"), 1, "error: a.json: No space; free some space\n", True, 1),
    (FULL, 1, f"{UNWRITTEN} No space; free some space\n", True, 1),
    (QUOTA, 1, f"{UNWRITTEN} Quota exceeded; free some space\n", True, 1),
]


@pytest.mark.parametrize(("error", "code", "said", "own", "returned"), ENDINGS, ids=lambda value: repr(value)[:40])
def test_what_is_no_bug_is_a_line_and_a_code(error, code, said, own, returned, statuses, capsys, monkeypatch):
    """Which a rank writes down too."""
    assert run(error) == returned
    assert capsys.readouterr().err == (said if own else "")
    status = json.loads((statuses / "rank-1.json").read_text())
    assert (status["code"], status["message"]) == (code, said.removeprefix("error: ").strip())
    monkeypatch.delenv("WIDEMIX_RANK_STATUS_DIR")
    for rank in ("0", None):
        monkeypatch.setenv("RANK", rank) if rank else monkeypatch.delenv("RANK")
        assert run(error) == code
        assert capsys.readouterr().err == said


def test_a_command_whose_last_lines_are_lost_has_failed(tmp_path, system, capsys):
    class Full(io.StringIO):
        def flush(self) -> None:
            raise FULL

        def fileno(self) -> int:
            return file.fileno()

    with (tmp_path / "out").open("w") as file:
        system({"sys.stdout": Full()})
        assert run(0) == 1
        assert os.readlink(f"/proc/self/fd/{file.fileno()}") == os.devnull  # Python's own try at the end succeeds
    assert capsys.readouterr().err == f"{UNWRITTEN} No space; free some space\n"


@pytest.mark.parametrize("error", [OSError("socket"), BrokenPipeError(errno.EPIPE, "Broken pipe"), KeyError("x")])
def test_a_bug_shows_where_it_is(error, tmp_path, capsys, monkeypatch, system):
    """To torchrun too; and a broken pipe that is not the command's output is one."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    run(RunError("diverged"))
    assert [*tmp_path.iterdir()] == []
    capsys.readouterr()
    with open(os.devnull, "w") as output:
        system({"sys.stdout": output})
        assert run(error) == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert type(error).__name__ in said
    assert str(error) in json.loads((tmp_path / "error.json").read_text())["message"]["message"]


def test_a_restarted_rank_knows_it_and_removes_statuses_of_others(digits, tmp_path, monkeypatch):
    for name, value in {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WIDEMIX_RANK_STATUS_DIR", str(tmp_path))
    own, other = tmp_path / "rank-2.json", tmp_path / "rank-7.json"
    found = []

    def train(*_) -> int:
        parts = [part.partition("=")[0] for part in os.environ[VARIABLE].split(";")]
        found.append((parts, json.loads(own.read_text())["code"], other.exists()))
        return 75

    monkeypatch.setattr("widemix.trainer.train", train)
    for _ in range(2):
        monkeypatch.setenv(VARIABLE, "submitted=1.5")
        words = ["train", "digits/mixer", "--data.path", str(digits)]
        assert run_command(make_parser("train"), argv=words) == 0  # torchrun would start it again
        other.write_text(json.dumps(json.loads(own.read_text()) | {"rank": 7}))
    assert found == [(["submitted", "ranks"], None, False), (["ranks"], None, False)]
    assert json.loads(own.read_text())["code"] == 75


@pytest.mark.parametrize("rank", ["", "1"])
def test_the_process_ends_with_the_commands_code(rank, monkeypatch, system, capsys):
    """A rank ends at once, after the exit handlers and all that is printed."""
    done: list[object] = []
    monkeypatch.setenv("RANK", rank)

    class Stream(io.TextIOWrapper):
        def flush(self) -> None:
            done.append("flushed")

    stream = Stream(io.BytesIO(), "ascii")
    system({"sys.argv": ["widemix", "eval", "nowhere"], "sys.stdout": stream})
    system({"os._exit": done.append, "atexit._run_exitfuncs": lambda: done.append("handlers")})
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert stream.errors == "widemix"  # so that any file's name can be printed
    assert done[-3:] == ["handlers", "flushed", 2] if rank else 2 not in done

    def interrupt():
        raise KeyboardInterrupt

    capsys.readouterr()
    system({"gc.isenabled": interrupt})  # which is asked first
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert capsys.readouterr().err == "interrupted\n"


ENDS = """
import atexit, sys, threading, time
from widemix import __main__, cli

class Left:
    def __del__(self):
        print("finalised")

def print_later():
    time.sleep(0.3)
    print("by a thread")

def run():
    print("before")
    sys.left = Left()
    atexit.register(print, "by a handler")
    threading.Thread(target=print_later).start()
    sys.exit(75)

cli.main = run
__main__.main()
"""


def test_a_process_ends_as_python_does_without_finalising():
    """And what stdout does not take is said."""
    words = [sys.executable, "-c", ENDS]
    environ = os.environ | {"PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        ends = [
            subprocess.Popen(words, env=environ, stdout=stdout, stderr=subprocess.PIPE, text=True)
            for stdout in (subprocess.PIPE, full)
        ]
    (said, errors), (_, refused) = (each.communicate() for each in ends)
    assert (ends[0].returncode, said, errors) == (75, "before\nby a thread\nby a handler\n", "")
    assert ends[1].returncode == 120
    assert "OSError: [Errno 28] No space left on device" in refused


@pytest.mark.parametrize(
    ("before", "enabled", "after"), [(700, True, 100_000), (200_000, True, 200_000), (700, False, 700)]
)
def test_garbage_is_collected_more_rarely(before, enabled, after, system):
    """But not where it is off, or rarer already."""
    given: list[tuple[int, ...]] = []
    system({"gc.isenabled": lambda: enabled, "gc.get_threshold": lambda: (before, 10, 7)})
    system({"gc.set_threshold": lambda *values: given.append(values)})
    commands.tune_garbage_collector()
    assert (given or [(before, 10, 7)]) == [(after, 10, 7)]


def test_a_command_that_fails_leaves_the_file_to_write(tmp_path, monkeypatch, capsys):
    """And is not there where it was not."""
    monkeypatch.chdir(tmp_path)
    Path("old.json").write_text("numbers")
    for words in ("--json old.json", "--json new.json", "--details --to a/b"):
        assert run_command(make_parser("eval"), argv=["eval", "nowhere", *words.split()]) == 2
        assert "nowhere: no such run" in capsys.readouterr().err
    assert Path("old.json").read_text() == "numbers"
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]


STARTED = "nowhere: no such run or checkpoint folder"


def test_a_socket_is_neither_a_file_nor_a_folder(tmp_path, monkeypatch, capsys):
    """Other mistakes that are refused before any work: tests/messages/commands.yaml."""
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for words, said in (
            ("--json", "is not an ordinary file; name another"),
            ("--to", "is a file; name a folder"),
        ):
            assert run_command(make_parser("eval"), argv=["eval", "nowhere", "--details", words, "socket"]) == 2
            assert f"{words} socket: {said}" in capsys.readouterr().err


def test_a_folder_to_write_to_is_tried(tmp_path, monkeypatch, system, capsys):
    """Or where it is; it may be a link."""
    monkeypatch.chdir(tmp_path)
    tried, try_it = [], tempfile.TemporaryDirectory
    system({"tempfile.TemporaryDirectory": lambda dir: tried.append(dir) or try_it(dir=dir)})
    Path("folder").mkdir()
    Path("link").symlink_to("folder")
    for name in ("folder", "link", "folder/new/er"):
        assert run_command(make_parser("eval"), argv=["eval", "nowhere", "--details", "--to", name]) == 2
        assert STARTED in capsys.readouterr().err
    assert tried == [Path("folder"), Path("link"), tmp_path / "folder"]
    assert [*Path("folder").iterdir()] == []


def test_a_file_that_another_rank_has_removed_is_no_error(tmp_path, system, capsys):
    system({"pathlib.Path.open": lambda *_: io.BytesIO()})
    assert run_command(make_parser("eval"), argv=["eval", "nowhere", "--json", str(tmp_path / "a.json")]) == 2
    assert STARTED in capsys.readouterr().err


def test_options_are_held_to_their_least_and_their_most():
    given = Namespace(ranks=1, at_once=None, threads=[3, 1], samples=1e12)
    check_least(given, 1, "ranks", "at_once", "threads", "absent")
    check_most(given, 1e12, "samples", "at_once")
    for name, least, words in (("ranks", 2, "--ranks 1: must be at least 2"), ("threads", 2, "--threads 1: must be")):
        with pytest.raises(InputError, match=words):
            check_least(given, least, "at_once", name)
    with pytest.raises(InputError, match=r"--at-once 0: must be at least 1"):
        check_least(Namespace(at_once=0), 1, "at_once")
    with pytest.raises(InputError, match=r"--samples 1e\+12: must be at most 1e\+11"):
        check_most(given, 1e11, "at_once", "samples")


@pytest.mark.parametrize(
    ("words", "rest", "overrides"),
    [
        (["train", "--optim.lr=", "r.yaml"], ["train", "r.yaml"], [("optim.lr", "")]),
        (["--data.path", " a\nb ", "--a.b.c", "-v"], ["--a.b.c", "-v"], [("data.path", " a\nb ")]),
        (["--log.every=--3", "--to=x.y"], ["--to=x.y"], [("log.every", "--3")]),
        (["--optim.lr", ""], [], [("optim.lr", "")]),
        (["--data.path=a\nb=c"], [], [("data.path", "a\nb=c")]),
        (
            ["a.yaml", "--train.head_bias", "-6.9", "--to", "b"],
            ["a.yaml", "--to", "b"],
            [("train.head_bias", "-6.9")],
        ),
        (["--train.epochs", "3", "--train.epochs", "4"], [], [("train.epochs", "3"), ("train.epochs", "4")]),
        (["a.yaml", "--train.epochs", "--to", "b"], None, "--train.epochs: needs a value"),
        (["a.yaml", "--train.epochs"], None, "--train.epochs: needs a value"),
    ],
)
def test_overrides_are_taken_out_wherever_they_stand(words, rest, overrides):
    """Their values may be negative, but no option."""
    if rest is None:
        with pytest.raises(InputError, match=overrides):
            split_overrides(words)
    else:
        assert split_overrides(words) == (rest, overrides)


def test_a_commands_recipe_has_its_overrides_and_classes(digits):
    overrides = [("data.path", str(digits)), ("data.num_classes", "0"), ("train.epochs", "7")]
    recipe = load_from_arguments(Namespace(recipe="digits/mixer", overrides=overrides))
    assert (recipe.train.epochs, recipe.data.num_classes) == (7, 10)

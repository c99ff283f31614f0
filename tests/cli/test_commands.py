"""How a command ends: its exit code, the lines that it prints, and on which rank; what is checked at first."""

import argparse
import errno
import gc
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
from widemix.cli.parser import make_parser
from widemix.command_line import commands
from widemix.command_line.arguments import Parser
from widemix.command_line.commands import check_least, check_most, load_from_arguments, run_command, split_overrides
from widemix.distributed.start_times import VARIABLE
from widemix.errors import Exit, InputError, LauncherError, RunError


def ending(error: BaseException | int):
    """A command that ends so."""

    def command(arguments: Namespace):
        if isinstance(error, BaseException):
            raise error
        return error

    return command


def run(error: BaseException | int, *words: str) -> int:
    return run_command(Parser(), ending(error), words)


def test_what_a_command_starts_does_not_import_from_the_current_folder(monkeypatch):
    """Started by `python -m`, or with an empty item of PYTHONPATH; tests/test_processes.py starts processes."""
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "/a b", "", "/c", ""]))
    assert run(0) == 0
    assert os.environ["PYTHONSAFEPATH"] == "1"
    assert os.environ["PYTHONPATH"] == os.pathsep.join(["/a b", "/c"])


@pytest.fixture
def statuses(tmp_path, monkeypatch):
    """The folder in which rank 1 of 2 writes its status."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WIDEMIX_RANK_STATUS_DIR", str(tmp_path / "status"))
    return tmp_path / "status"


FULL, QUOTA = OSError(errno.ENOSPC, "No space"), OSError(errno.EDQUOT, "Quota exceeded")
ENDINGS = [
    (0, 0, ""),
    (Exit.FAILED, 1, ""),
    (Exit.REQUEUE, 75, ""),
    (InputError("a.yaml: two\nlines"), 2, "error: a.yaml: two\\nlines\n"),
    (LauncherError("WORLD_SIZE: what"), 2, "error: WORLD_SIZE: what\n"),
    (RunError("the loss\nis nan"), 1, "error: the loss\\nis nan\n"),
    (KeyboardInterrupt(), 1, "interrupted\n"),
    (FileNotFoundError(errno.ENOENT, "No such file", "a\nb"), 1, "error: a\\nb: No such file\n"),
    (OSError(errno.ENOSPC, "No space", "a.json"), 1, "error: a.json: No space; free some space\n"),
    (FULL, 1, "error: the output could not be written: No space; free some space\n"),
    (QUOTA, 1, "error: the output could not be written: Quota exceeded; free some space\n"),
]


@pytest.mark.parametrize(("error", "code", "said"), ENDINGS, ids=lambda value: repr(value)[:40])
def test_what_is_no_bug_is_a_line_and_an_exit_code(error, code, said, capsys, monkeypatch):
    for name in ("RANK", "WIDEMIX_RANK_STATUS_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert run(error) == code
    assert capsys.readouterr().err == said
    monkeypatch.setenv("RANK", "0")
    assert run(error) == code
    assert capsys.readouterr().err == said


def test_a_command_whose_last_lines_the_disk_does_not_take_has_failed(tmp_path, monkeypatch, capsys):
    class Full(io.StringIO):
        def flush(self) -> None:
            raise FULL

        def fileno(self) -> int:
            return file.fileno()

    monkeypatch.delenv("WIDEMIX_RANK_STATUS_DIR", raising=False)
    with (tmp_path / "out").open("w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Full())
        assert run(0) == 1
        assert os.readlink(f"/proc/self/fd/{file.fileno()}") == os.devnull  # Python's own try at the end succeeds
    assert capsys.readouterr().err == "error: the output could not be written: No space; free some space\n"


@pytest.mark.parametrize("error", [OSError("socket"), BrokenPipeError(errno.EPIPE, "Broken pipe"), KeyError("x")])
def test_a_bug_shows_where_it_is(error, capsys, monkeypatch):
    """Also a broken pipe that is not the command's output."""
    monkeypatch.delenv("WIDEMIX_RANK_STATUS_DIR", raising=False)
    with open(os.devnull, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert run(error) == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert type(error).__name__ in said


@pytest.mark.parametrize(
    ("error", "code", "message", "said", "returned"),
    [
        (0, 0, "", False, 0),
        (Exit.REQUEUE, 75, "", False, 0),
        (Exit.FAILED, 1, "", False, 1),
        (InputError("a: wrong"), 2, "a: wrong", False, 0),  # printed by rank 0, which makes the same mistake
        (LauncherError("RANK: wrong"), 2, "RANK: wrong", True, 0),
        (RunError("diverged"), 1, "diverged", True, 1),
        (KeyboardInterrupt(), 1, "interrupted", True, 1),
        (FileNotFoundError(errno.ENOENT, "No such file", "a"), 1, "a: No such file", True, 1),
    ],
    ids=str,
)
def test_a_rank_writes_how_it_ended_and_prints_what_is_its_own(
    error, code, message, said, returned, statuses, capsys
):
    assert run(error) == returned
    status = json.loads((statuses / "rank-1.json").read_text())
    assert (status["code"], status["message"]) == (code, message)
    assert bool(capsys.readouterr().err) == said


def test_a_rank_that_is_started_again_knows_it_and_removes_the_statuses_of_those_that_are_no_more(
    digits, tmp_path, monkeypatch
):
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


def test_torchrun_is_given_the_traceback_of_a_bug(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    run(KeyError("lost"))
    assert "lost" in json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    (tmp_path / "error.json").unlink()
    run(RunError("diverged"))
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("rank", "ended"), [("", "exit 75"), ("0", "rank 75")])
def test_the_process_ends_with_the_commands_code(rank, ended, monkeypatch, capsys):
    """Of a rank by `exit_rank`."""

    def exit_rank(code):
        raise SystemExit(f"rank {code}")

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(commands, "exit_rank", exit_rank)
    monkeypatch.setattr(commands, "run_command", lambda parser: 75)
    monkeypatch.setattr(commands, "tune_garbage_collector", lambda: None)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert sys.stdout.errors == "widemix"  # so that any file's name can be printed
    assert ended == (caught.value.code if rank else f"exit {caught.value.code}")

    def interrupt(parser):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "run_command", interrupt)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == "interrupted\n"


def test_a_rank_ends_after_the_exit_handlers_and_all_that_is_printed(monkeypatch):
    done = []
    monkeypatch.setattr(commands.atexit, "_run_exitfuncs", lambda: done.append("handlers"))
    monkeypatch.setattr(os, "_exit", done.append)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Namespace(flush=lambda name=name: done.append(name)))
    commands.exit_rank(75)
    monkeypatch.undo()
    assert done == ["handlers", "stdout", "stderr", 75]


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


def end(stdout) -> subprocess.CompletedProcess:
    environ = os.environ | {"PYTHONUNBUFFERED": ""}
    return subprocess.run([sys.executable, "-c", ENDS], env=environ, stdout=stdout, stderr=subprocess.PIPE, text=True)


def test_a_process_ends_as_python_does_without_finalising():
    done = end(subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (75, "before\nby a thread\nby a handler\n", "")


def test_what_stdout_does_not_take_is_said():
    with open("/dev/full", "w") as full:
        done = end(full)
    assert done.returncode == 120
    assert "OSError: [Errno 28] No space left on device" in done.stderr


def test_garbage_is_collected_more_rarely_but_not_where_it_is_off_or_rarer_already():
    before = gc.get_threshold()
    try:
        for given, expected in (((700, 10, 7), (100_000, 10, 7)), ((200_000, 5, 5), (200_000, 5, 5))):
            gc.set_threshold(*given)
            commands.tune_garbage_collector()
            assert gc.get_threshold()[:2] == expected[:2]
        gc.set_threshold(700, 10, 10)
        gc.disable()
        commands.tune_garbage_collector()
        assert gc.get_threshold()[0] == 700
    finally:
        gc.set_threshold(*before)
        gc.enable()


def test_the_file_to_write_is_left_as_it_is_by_a_command_that_fails(tmp_path, monkeypatch, capsys):
    """And is not there where it was not."""
    monkeypatch.chdir(tmp_path)
    Path("old.json").write_text("numbers")
    for name in ("old.json", "new.json"):
        assert run_command(make_parser("eval"), argv=["eval", "nowhere", "--json", name]) == 2
        assert "nowhere: no such run" in capsys.readouterr().err
    assert Path("old.json").read_text() == "numbers"
    words = ["eval", "nowhere", "--details", "--to", "a/b"]
    assert run_command(make_parser("eval"), argv=words) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]


@pytest.mark.parametrize("option", ["--json", "--exclude"])
def test_a_file_that_could_not_be_written_is_refused_before_any_work(option, tmp_path):
    words = {"--json": "eval nowhere --json", "--exclude": "doctor --cluster --exclude"}[option].split()
    for path, words_of_error in ((tmp_path, "is a folder; name a file"), (tmp_path / "no/x", "there is no folder")):
        with pytest.raises(InputError, match=words_of_error):
            commands._check_outputs(make_parser().parse_args([*words, str(path)]))
    commands._check_outputs(make_parser().parse_args([*words, str(tmp_path / "x")]))
    commands._check_outputs(Namespace(exclude="n1,n2", json=None))  # of submit: names of nodes


def test_a_folder_to_write_to_is_tried_where_it_is_or_will_be_and_may_be_a_link(tmp_path, monkeypatch):
    tried, try_it = [], tempfile.TemporaryDirectory
    monkeypatch.setattr(commands.tempfile, "TemporaryDirectory", lambda dir: tried.append(dir) or try_it(dir=dir))
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "lost").symlink_to("nowhere")
    for option in ("to", "report"):
        for name in ("folder", "link", "folder/new/er"):
            commands._check_outputs(Namespace(**{option: tmp_path / name}))
        with pytest.raises(InputError, match=rf"^--{option} .*lost: is a link to nothing"):
            commands._check_outputs(Namespace(**{option: tmp_path / "lost"}))
    assert tried == 2 * [tmp_path / "folder", tmp_path / "link", tmp_path / "folder"]
    assert [*(tmp_path / "folder").iterdir()] == []


def test_no_device_pipe_or_socket_is_replaced_by_a_file(tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "a"))
        for file in (Path("/dev/null"), tmp_path / "a"):
            with pytest.raises(InputError, match=f"^--json {file}: is not an ordinary file; name another$"):
                commands._check_outputs(Namespace(json=file))


@pytest.mark.parametrize(
    ("words", "empty"),
    [
        ("--to=", "--to:"),
        ("a --to=", "--to:"),
        ("--to|", "--to:"),
        ("--to| ", "--to:"),
        ("a|", "an argument"),
        ("|a", "an argument"),
        ("--to=b|--json|c", ""),
        ("--to|--json=c", ""),
    ],
)
def test_an_empty_word_is_refused_by_the_option_that_it_is_the_value_of(words, empty):
    given = words.split("|") if "|" in words else words.split()
    if empty:
        with pytest.raises(InputError, match=f"^{empty} is empty"):
            commands._check_filled(given)
    else:
        commands._check_filled(given)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: --data; see `w --help`"),
        (["--kind=a"], "the following arguments are required: --data; see `w --help`"),
        (["--dta=x"], "unrecognized arguments: --dta=x; did you mean --data?"),
        (["-y"], "unrecognized arguments: -y; see `w --help`"),
        (["--data", "x", "--zzz"], "unrecognized arguments: --zzz; see `w --help`"),
        (["--data", "x", "--train.epoch"], "unrecognized arguments: --train.epoch; did you mean train.epochs?"),
        (["--data", "x", "--kind", "lniear"], "'linear'); did you mean linear?"),
        (["--data", "x", "--kind", "xy"], "'linear')"),
    ],
)
def test_what_was_mistyped_is_said_rather_than_what_is_missing(words, said):
    parser = Parser(prog="w")
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("--data", required=True)
    parser.add_argument("--kind", choices=("a", "linear"))
    with pytest.raises(InputError) as caught:
        parser.parse_args(words)
    assert said in str(caught.value)


def test_a_file_that_another_rank_has_tried_and_removed_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "open", lambda *_: io.BytesIO())
    commands._check_outputs(Namespace(json=tmp_path / "a.json"))


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_no_option_is_infinite(value, capsys):
    parser = Parser()
    parser.add_argument("--at-most", type=float)
    assert run_command(parser, ending(0), [f"--at-most={value}"]) == 2
    assert f"--at-most {value}: must be a finite number" in capsys.readouterr().err


def test_overrides_are_taken_out_wherever_they_stand():
    words = [
        "train",
        "--optim.lr=",
        "--data.path",
        " a\nb ",
        "r.yaml",
        "--log.every=--3",
        "--a.b.c",
        "--to=x.y",
        "-v",
    ]
    rest, overrides = split_overrides(words)
    assert rest == ["train", "r.yaml", "--a.b.c", "--to=x.y", "-v"]
    assert overrides == [("optim.lr", ""), ("data.path", " a\nb "), ("log.every", "--3")]
    assert split_overrides(["--optim.lr", ""]) == ([], [("optim.lr", "")])
    assert split_overrides(["--data.path=a\nb=c"]) == ([], [("data.path", "a\nb=c")])


def test_the_recipe_of_a_command_has_its_overrides_and_its_number_of_classes(digits):
    overrides = [("data.path", str(digits)), ("data.num_classes", "0"), ("train.epochs", "7")]
    recipe = load_from_arguments(Namespace(recipe="digits/mixer", overrides=overrides))
    assert (recipe.train.epochs, recipe.data.num_classes) == (7, 10)


@pytest.mark.parametrize("word", ["--local-rank=3", "--local_rank=3"])
def test_what_launchers_put_before_all_words_is_taken(word):
    assert make_parser("verify").parse_args([word, "verify", "a"]).folder == Path("a")


def test_options_are_not_shortened_and_paths_are_no_urls():
    parser = Parser()
    parser.add_argument("--batches", type=int)
    parser.add_argument("--to", type=Path)
    with pytest.raises(InputError, match=r"unrecognized arguments: --batch 3; did you mean --batches\?"):
        parser.parse_args(["--batch", "3"])
    with pytest.raises(InputError, match="s3://a is a URL, where a path on this machine is needed"):
        parser.parse_args(["--to", "s3://a"])
    assert parser.parse_args(["--to", "s3:/a"]).to == Path("s3:/a")
    assert isinstance(parser, argparse.ArgumentParser)

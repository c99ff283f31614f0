"""Wrong input: an error of one line, exit code 2, nothing created and nothing lost."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from tests.clone import CLONE, ROOT
from tests.conftest import Command, Fork
from tests.forked_popen import ForkedPopen
from tests.forks import Forks
from widemix.errors import InputError
from widemix.recipe import load_recipe
from widemix.trainer import _check_something_is_left

RECIPE = "recipes/digits/rp_mixer.yaml"


def refused(command: Command, words: str) -> None:
    code, output = command.wait()
    lines = [line for line in output.splitlines() if line and not line.startswith("[Gloo]")]  # torch 2.8's own
    assert code == 2, output
    assert len(lines) == 1, output
    assert lines[0].startswith("error: ")
    assert words in lines[0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "recipes/digits/rp_mixr.yaml"], "did you mean recipes/digits/rp_mixer.yaml?"),
        (["train", "nowhere/x.yaml"], "there is no folder nowhere either"),
        (["train", RECIPE, "--train.epoch", "3"], "did you mean train.epochs?"),
        (["train", RECIPE, "--epochs", "3"], "did you mean train.epochs?"),
        (["train", RECIPE, "--train.epochs"], "--train.epochs: needs a value"),
        (["train", RECIPE, "--engine.zero_stage", "3"], "engine.zero_stage"),
        (["train", RECIPE, "--ranks", "3"], "does not divide by 3 ranks"),
        (["train", RECIPE, "--ranks", "-2"], "must be at least 1"),
        (["train", RECIPE, "--train.global_batch", "60"], "48 or 64 would"),
        (["trian", RECIPE], "invalid choice: 'trian'"),
        (["prep", "digit", "--to", "x"], "did you mean digits?"),
        (["prep", "imagenet", "--from", "nowhere", "--to", "x"], "nowhere"),
        (["prep", "digits", "--to", "x", "--fraction", "lots"], "is not a fraction"),
        (["eval", "nowhere"], "no such run or checkpoint folder"),
        (["verify", "nowhere"], "no such folder"),
        (["cost", RECIPE, "--gpus", "0"], "must be at least 1"),
        (["doctor", "--train.epochs", "3"], "recipe keys are options only of commands that take a recipe"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_a_wrong_command_line(words, expected, tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    answer = subprocess.run(
        [sys.executable, "-m", "widemix", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path if not words[1].startswith("recipes") else CLONE,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        check=False,
    )
    assert answer.returncode == 2, answer.stderr
    assert expected in answer.stderr
    assert answer.stderr.count("\n") == 1, answer.stderr
    assert answer.stdout == ""
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 60  # of CPU, whatever else runs
    assert not list(tmp_path.iterdir())


def test_a_network_that_is_not_there_is_told_before_torch_is_imported(tmp_path):
    analyses = ("cka nowhere nowhere", "spectrum nowhere", "weights nowhere", "pixels nowhere", "filters nowhere")
    commands = ["eval nowhere", f"predict nowhere {tmp_path}", "bench inference nowhere"]
    (tmp_path / "a.png").touch()
    program = """
        import sys
        from widemix.cli import main
        for words in sys.argv[1:]:
            sys.argv[1:] = words.split()
            try:
                main()
            except SystemExit as end:
                assert end.code == 2, end.code
        assert "torch" not in sys.modules
    """
    words = [*commands, *(f"analyse {analysis} --json x.json" for analysis in analyses)]
    start = [sys.executable, "-c", textwrap.dedent(program), *words]
    answer = subprocess.run(start, capture_output=True, text=True, cwd=CLONE, check=False)
    assert answer.returncode == 0, answer.stderr
    lines = answer.stderr.splitlines()
    assert len(lines) == len(words)
    assert all("nowhere: no such run or checkpoint folder; give a run" in line for line in lines)


def test_data_that_is_not_there(train, tmp_path):
    refused(train("run", "--data.path", str(tmp_path / "nothing")), "no such folder; `widemix prep")
    assert not (tmp_path / "run").exists()


def test_a_truncated_beton_is_reported_once_by_two_ranks(train, digits, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(digits, cut)
    with (cut / "train.beton").open("r+b") as file:
        file.truncate(8_600_000)
    refused(
        train("run", "--data.path", str(cut), "--ranks", "2"), "train.beton: has 8600000 bytes, the manifest says"
    )
    assert not (tmp_path / "run").exists()


def test_a_policy_that_does_not_exist(train, tmp_path):
    refused(train("run", "--augment.auto_augment", "rnd-m9"), "'rnd': no such policy; known are rand")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_something_else(train, tmp_path):
    thesis = tmp_path / "run" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    refused(train("run"), "is not empty and not a run folder")
    assert [path.name for path in thesis.parent.iterdir()] == ["thesis.tex"]
    assert thesis.read_text() == "years of work"


def test_a_folder_that_cannot_be_written(train):
    refused(train("/proc/run"), "/proc/run: cannot be written to")


def test_a_file_where_the_folder_should_be(train, tmp_path):
    (tmp_path / "run").write_text("a file")
    refused(train("run"), "is a file; name a folder")


def test_another_recipe_and_another_resumption_are_kept_out_of_a_run(train, tmp_path):
    run = tmp_path / "run"
    short = ("--train.max_steps", "2")
    assert train("run", *short).wait()[0] == 0
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file() and path.name != ".lock"}
    refused(train("run", *short, "--optim.lr", "1e-4"), "was started with another recipe (optim.lr differ)")
    refused(train("run", *short, "--resume", "never"), "holds a run already")
    refused(train("fresh", "--resume", str(tmp_path / "nothing")), "no such run or checkpoint folder")
    refused(
        train("fresh", "--resume", str(run), "--model.channels", "32"), "is of another model (model.channels differ)"
    )
    refused(
        train("fresh", "--resume", str(run), "--optim.name", "sgd"),
        "of another optimizer, whose state it holds (optim",
    )
    refused(
        train("fresh", "--resume", str(run), "--train.global_batch", "32"),
        "counts batches of another order (train.global_batch differ)",
    )
    refused(
        train("fresh", "--resume", str(run), *short),
        "is at step 2, and this run would end at step 2; raise train.max",
    )
    refused(train("fresh", "--resume", str(run), "--train.max_steps", "1"), "end at step 1; raise train.max_steps")
    for content in ("", "[1]"):
        (run / "done.json").write_text(content)
        before[run / "done.json"] = content.encode()
        refused(train("run", *short), "done.json: cannot be read")
    assert {
        path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file() and path.name != ".lock"
    } == before


@pytest.mark.parametrize(("max_steps", "named"), [(None, "epochs"), (9, "epochs"), (3, "max_steps")])
def test_what_ends_a_run_before_it_goes_on_is_named(max_steps, named):
    """Three epochs of a step each: max_steps beyond them changes nothing, and is not what to raise."""
    overrides = [("train.epochs", "3"), *([("train.max_steps", str(max_steps))] if max_steps else [])]
    start = SimpleNamespace(checkpoint=SimpleNamespace(path="there"), is_of_another_run=True, step=4, done=False)
    with pytest.raises(InputError, match=rf"there: is at step 4, .* end at step 3; raise train\.{named}, or take"):
        _check_something_is_left(load_recipe("digits/mixer", overrides), start, 3)


def test_a_second_run_on_a_live_folder_is_refused(train, tmp_path):
    first = train("run", "--train.epochs", "10000")
    first.wait_for_step(tmp_path / "run", 3)
    refused(train("run", "--train.epochs", "10000"), " is writing there; name another folder")
    first.kill()


def test_a_damaged_checkpoint_is_named(train, tmp_path):
    run = tmp_path / "run"
    assert train("run", "--train.max_steps", "2").wait()[0] == 0
    model = run / "checkpoints/00000002/model.safetensors"
    damaged = bytearray(model.read_bytes())
    damaged[-5] ^= 1
    model.write_bytes(damaged)
    refused(Fork("eval", run, log=tmp_path / "one.log"), "model.safetensors: is damaged")
    (model.parent / "COMPLETE").write_text("[]")
    refused(Fork("eval", run, log=tmp_path / "other.log"), "COMPLETE: is damaged (it holds no hashes)")


def into_nothing(*words: str) -> None:
    """In a fork: write how the command ends when nobody reads its output, and when the disk is full."""
    start = [sys.executable, "-m", "widemix", *words]
    reader, writer = os.pipe()
    os.close(reader)
    closed = ForkedPopen(start, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    with open("/dev/full", "w") as full:
        refused = ForkedPopen(start, stdout=full, stderr=subprocess.PIPE, text=True)
    print(json.dumps([(process.communicate()[1], process.returncode) for process in (closed, refused)]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("words", [["study", "plan", "figure7"], ["cost", "digits/mixer", "--samples", "1000"]])
def test_a_closed_pipe_and_a_full_disk_as_the_output(words, tmp_path):
    """The first ends a command without a word, as `head` expects it; the second with a line."""
    codes, said = Forks(into_nothing, *words, log=tmp_path / "log").wait()
    assert codes == [0], said
    closed, refused = json.loads(said)
    assert closed[0] == ""
    assert closed[1] in (128 + signal.SIGPIPE, 1)  # 1: of rich, which prints the table of cost
    assert refused == ["error: the output could not be written: No space left on device; free some space\n", 1]

"""Wrong input: an error of one line, exit code 2, nothing created and nothing lost."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.clone import CLONE, ROOT
from tests.conftest import Command, Fork
from tests.forked_popen import ForkedPopen
from tests.forks import Forks

RECIPE = "recipes/digits/rp_mixer.yaml"


def refused(command: Command, words: str) -> None:
    code, output = command.wait()
    lines = [line for line in output.splitlines() if line and not line.startswith("[Gloo]")]  # torch 2.8's own
    assert code == 2, output
    assert len(lines) == 1, output
    assert lines[0].startswith("error: ")
    assert words in lines[0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "recipes/digits/rp_mixr.yaml"], "did you mean recipes/digits/rp_mixer.yaml?"),
        (["train", RECIPE, "--train.global_batch", "60"], "48 or 64 would"),
        (["prep", "imagenet", "--from", "nowhere", "--to", "x"], "nowhere"),
        (["cost", RECIPE, "--gpus", "0"], "must be at least 1"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_a_wrong_command_line(words, expected, tmp_path):
    """In processes, which import no torch; tests/messages has the others."""
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


def test_a_missing_network_is_told_before_torch_is_imported(tmp_path):
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


def test_a_truncated_beton_is_reported_once_by_two_ranks(train, digits, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(digits, cut)
    with (cut / "train.beton").open("r+b") as file:
        file.truncate(8_600_000)
    refused(
        train("run", "--data.path", str(cut), "--ranks", "2"), "train.beton: has 8600000 bytes, the manifest says"
    )
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_something_else(train, tmp_path):
    thesis = tmp_path / "run" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    refused(train("run"), "is not empty and not a run folder")
    assert [path.name for path in thesis.parent.iterdir()] == ["thesis.tex"]
    assert thesis.read_text() == "years of work"


def contents(run) -> dict:
    return {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file() and path.name != ".lock"}


# Of a run that has done 25 steps, 22 of which are an epoch.
ENDS = "{run}/checkpoints/00000025: is at step 25, and this run would end at step"
SHORT = "fresh --resume {run} --schedule.warmup_epochs 0 --train.epochs 1"
KEPT_OUT = [
    ("run --optim.lr 1e-4", "was started with another recipe (optim.lr differ)"),
    ("run --resume never", "holds a run already"),
    ("fresh --resume {run}/nothing", "no such run or checkpoint folder"),
    ("fresh --resume {run} --model.channels 32", "is of another model (model.channels differ)"),
    ("fresh --resume {run} --optim.name sgd", "of another optimizer, whose state it holds (optim"),
    ("fresh --resume {run} --train.global_batch 32", "counts batches of another order (train.global_batch differ)"),
    ("fresh --resume {run}", f"{ENDS} 25; raise train.max_steps"),
    ("fresh --resume {run} --train.max_steps 1", f"{ENDS} 1; raise train.max_steps"),
    # max_steps beyond the epochs changes nothing, and is not what to raise.
    (f"{SHORT} --train.max_steps 99", f"{ENDS} 22; raise train.epochs"),
    (f"{SHORT} --train.max_steps null", f"{ENDS} 22; raise train.epochs"),
]


def test_another_recipe_and_another_resumption_are_kept_out(train, tmp_path):
    run, short = tmp_path / "run", ("--train.max_steps", "25")
    assert train("run", *short).wait()[0] == 0
    before = contents(run)
    for words, said in KEPT_OUT:
        folder, *options = words.format(run=run).split()
        refused(train(folder, *short, *options), said.format(run=run))
    for content in ("", "[1]"):
        (run / "done.json").write_text(content)
        before[run / "done.json"] = content.encode()
        refused(train("run", *short), "done.json: cannot be read")
    assert contents(run) == before


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

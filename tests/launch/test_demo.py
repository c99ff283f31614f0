"""What `make demo` shows of its four runs, with commands that write their results at once."""

import json
import subprocess
from pathlib import Path

import pytest

from widemix.launch import demo

LOSSES = {"mixer-ddp": 0.5, "mixer-deepspeed": 0.25, "rp_mixer-ddp": 1.0, "rp_mixer-deepspeed": 1.0}
TOPS = {"mixer-ddp": 97.25, "mixer-deepspeed": 96.5, "rp_mixer-ddp": 95.0, "rp_mixer-deepspeed": 98.0}


@pytest.fixture
def commands(monkeypatch, tmp_path, system):
    """The commands that were run; `failing` is the exit code of those for each word that they hold."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    run, failing = [], {}

    def pretend(command, **_):
        words = command[3:]
        run.append(words)
        if words[0] == "train":
            folder = Path(words[words.index("--run-dir") + 1])
            folder.mkdir(parents=True)
            name = folder.name
            train = [{"split": "train", "epoch": epoch, "loss": epoch * LOSSES[name] / 2} for epoch in (1, 2)]
            lines = [train[0], {"split": "eval", "epoch": 1, "top1": TOPS[name]}, train[1]]
            (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
            (folder / "done.json").write_text(json.dumps({"top1": TOPS[name], "seconds": 12.34}))
        codes = [code for word, code in failing.items() if any(word in each for each in words)]
        return subprocess.CompletedProcess(command, codes[0] if codes else 0)

    system({"subprocess.run": pretend})
    return run, failing


def test_table_and_plot_have_the_numbers_of_the_runs(commands, monkeypatch, capsys):
    figures = []
    monkeypatch.setattr(demo, "save", lambda figure, paths: figures.append((figure, paths)))
    assert demo.main() == 0
    assert commands[0][0] == ["prep", "digits", "--to", "datasets/digits"]
    assert [words[1] for words in commands[0][1:]] == [f"recipes/digits/{m}.yaml" for m in demo.MODELS for _ in "ab"]
    assert [words[-2:] == ["--engine.kind", "deepspeed"] for words in commands[0][1:]] == [False, True, False, True]
    assert all(words[words.index("--train.epochs") + 1] == str(demo.EPOCHS) for words in commands[0][1:])
    assert all(words[words.index("--ranks") + 1] == "2" for words in commands[0][1:])
    printed = (line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines())
    rows = [words for words in printed if words and words[0] in demo.MODELS]
    assert rows == [
        ["mixer", "ddp", "97.25", "%", "12.3"],
        ["mixer", "deepspeed", "96.50", "%", "12.3", "-5.0e-01"],
        ["rp_mixer", "ddp", "95.00", "%", "12.3"],
        ["rp_mixer", "deepspeed", "98.00", "%", "12.3", "+0.0e+00"],
    ]
    [(figure, [path])] = figures
    assert path.name == "curves.png"
    losses, tops = ({line.get_label(): line for line in panel.lines} for panel in figure.axes)
    for name, loss in LOSSES.items():
        label = ", ".join(name.rsplit("-", 1))
        assert [*zip(*losses[label].get_data(), strict=True)] == [(1, loss / 2), (2, loss)]
        assert [*zip(*tops[label].get_data(), strict=True)] == [(1, TOPS[name])]


def test_an_accuracy_that_is_too_low_is_an_error(commands, monkeypatch, capsys):
    monkeypatch.setitem(TOPS, "rp_mixer-ddp", 94.99)
    assert demo.main() == 1
    assert "94.99 % is below 95 %" in capsys.readouterr().out
    assert next(Path("runs").glob("demo-*/curves.png")).is_file()


def test_a_failing_command_ends_the_demo_with_its_code(commands):
    run, failing = commands
    failing["deepspeed"] = 75
    with pytest.raises(SystemExit) as ended:
        demo.main()
    assert ended.value.code == 75
    assert [words[0] for words in run] == ["prep", "train", "train"]

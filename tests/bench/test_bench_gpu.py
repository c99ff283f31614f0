"""`widemix bench gpu`: its parts' commands, what it keeps of them, and how it goes on."""

import argparse
import json
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.conftest import ON_GPUS, ROOT
from widemix.bench import gpu
from widemix.bench.gpu import PARTS, Part, Where, run_parts
from widemix.cli.bench import GPU_PARTS
from widemix.cli.parser import make_parser
from widemix.command_line.commands import run_command
from widemix.errors import Exit, InputError


@pytest.mark.parametrize("small", [False, True])
def test_every_part_is_a_command(tmp_path, monkeypatch, small):
    monkeypatch.setattr(gpu, "prepared", lambda where: where.to / "data")
    assert tuple(PARTS) == GPU_PARTS
    parsed: list[argparse.Namespace] = []
    for name, part in PARTS.items():
        (tmp_path / name).mkdir()
        module, *words = map(str, part.words(Where(tmp_path, tmp_path, small), tmp_path / name))
        if module == "widemix":
            assert run_command(make_parser(), lambda arguments: parsed.append(arguments) or Exit.DONE, words) == 0, (
                name
            )
            assert str(tmp_path / name) in str(vars(parsed.pop())), name
        else:
            assert module == "pytest"
            assert [word for word in words if word.startswith("tests/")] == [
                str(path.relative_to(ROOT)) for path in ON_GPUS[: 1 if small else None]
            ]


def test_large_parts_measure_the_networks_of_their_titles(tmp_path, monkeypatch):
    """Each in batches of its recipe's order of size; compiled ones too, where nothing is loaded."""
    monkeypatch.setattr(gpu, "prepared", lambda where: where.to / "data")
    batches = {"imagenet/mixer_b16": 256, "imagenet/mixer_b_w": 256, "cifar10/figure7": 128}
    steps = {"b16": "imagenet/mixer_b16", "b_w": "imagenet/mixer_b_w", "figure7": "cifar10/figure7"}
    for name in (*steps, "wait", "fp8"):
        parsed: list[argparse.Namespace] = []
        _, *words = map(str, PARTS[name].words(Where(tmp_path, tmp_path, False), tmp_path))
        run_command(make_parser(), lambda arguments, parsed=parsed: parsed.append(arguments) or Exit.DONE, words)
        [given] = parsed
        recipe = steps.get(name, "imagenet/mixer_b16")
        assert (given.recipe, given.batch) == (recipe, batches[recipe])
        if name in steps:
            assert given.compiled
        else:
            keys = {"data.path": str(tmp_path / "data")}
            keys |= {"train.fp8": "true", "train.compile": "true"} if name == "fp8" else {}
            assert dict(given.overrides) == keys


@pytest.mark.parametrize("small", [False, True])
def test_parts_are_as_long_as_a_part_may_take(tmp_path, monkeypatch, small):
    """In small they are only tried."""
    monkeypatch.setattr(gpu, "prepared", lambda where: where.to / "data")
    monkeypatch.setattr(gpu, "usable_cpus", lambda: 16)
    where, found = Where(tmp_path / "to", tmp_path / "from", small), {}
    for name in ("b16", "mixup", "wait", "fp8", "loader", "checkpoint", "study"):
        parsed: list[argparse.Namespace] = []
        _, *words = map(str, PARTS[name].words(where, tmp_path))
        run_command(make_parser(), lambda arguments, parsed=parsed: parsed.append(arguments) or Exit.DONE, words)
        found[name] = vars(parsed[0])
    read = {"b16": "recipe batch", "mixup": "rounds", "checkpoint": "rounds", "wait": "recipe batch steps to"}
    read |= {"fp8": "steps", "loader": "samples rounds threads origin", "study": "only at_once to report"}
    folder = tmp_path / "runs"
    expected = {
        "b16": ["imagenet/mixer_b16", 256],
        "mixup": [5],
        "wait": ["imagenet/mixer_b16", 256, 40, tmp_path],
        "fp8": [40],
        "loader": [1000, 2, [1, 16], tmp_path / "from"],
        "checkpoint": [2],
        "study": ["*seed-0*", 4, folder, tmp_path],
    }
    if small:
        expected |= {"b16": ["digits/mixer", 8], "mixup": [1], "checkpoint": [1], "fp8": [4]}
        expected["wait"] = ["digits/mixer", 32, 4, tmp_path]
        expected |= {"loader": [100, 1, [1], tmp_path / "from"], "study": ["*depth-2*seed-0*", 1, folder, tmp_path]}
        assert found["b16"]["rounds"] == 2
        assert found["study"]["overrides"] == [("train.epochs", "1")]
    assert {name: [found[name][key] for key in keys.split()] for name, keys in read.items()} == expected
    words = list(map(str, PARTS["tests"].words(where, tmp_path)))
    assert ("-n" in words) is not small
    assert small or words[words.index("-n") + 1] == "8"
    assert "--all" in words
    monkeypatch.setattr(gpu, "usable_cpus", lambda: 3)
    words = list(map(str, PARTS["tests"].words(where, tmp_path)))
    assert small or words[words.index("-n") + 1] == "3"


@pytest.mark.parametrize("small", [False, True])
def test_data_is_prepared_once_in_large_fifty_batches_of_the_sample(tmp_path, monkeypatch, small):
    calls = []
    monkeypatch.setattr(gpu, "jpegs", lambda origin: [origin / "a.JPEG"])
    monkeypatch.setattr(gpu, "link_repeatedly", lambda *given: calls.append(given))
    monkeypatch.setattr(gpu, "prepare", lambda *given: calls.append(given))
    where, data = Where(tmp_path, tmp_path / "from", small), tmp_path / "data"
    (tmp_path / "images/train").mkdir(parents=True)  # of a start that was cut off
    assert gpu.prepared(where) == data
    if small:
        assert calls == [("digits", None, data)]
    else:
        images = tmp_path / "images"
        assert calls == [([tmp_path / "from/a.JPEG"], images, 50 * 256), ("image-folder", images, data)]
        assert not images.exists()
    data.mkdir()
    (data / "train.beton").touch()
    calls.clear()
    assert (gpu.prepared(where), calls) == (data, [])


def test_a_gpu_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="--small"):
        run_parts(["b16"], Where(tmp_path / "to", tmp_path, False), 10)
    assert not (tmp_path / "to").exists()


def rows_of(file, row):
    file.write_text(json.dumps({"rows": [row]}))
    return lambda where, folder: ("json.tool", file, folder / "rows.json")


def test_what_has_ended_is_kept_and_not_repeated(tmp_path, monkeypatch, capfd):
    where = Where(tmp_path / "to", tmp_path, True)
    parts = {
        "good": Part("Good", rows_of(tmp_path / "in", {"name": "a|b", "images_per_s": 12.5, "parts": {"x": 1}})),
        "bad": Part("Bad", lambda where, folder: ("json.tool", tmp_path / "none")),
        "absent": Part("Absent", lambda where, folder: ("json.tool",), absent=lambda where: "it needs a cat"),
    }
    monkeypatch.setattr(gpu, "PARTS", parts)
    assert run_parts(list(parts), where, 1) is Exit.FAILED
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("good: json.tool")
    assert lines[1].startswith("good: done")
    assert lines[3].startswith("bad: exit code 2")
    assert lines[3].endswith(f"its output: {where.to / 'bad' / 'output.txt'}")
    assert "none" in (where.to / "bad" / "output.txt").read_text()
    assert lines[4] == "absent: left out, as it needs a cat"
    table = (where.to / "table.md").read_text()
    assert "## Good" in table
    assert "| name | images_per_s |\n| --- | ---: |\n| a\\|b | 12.5 |\n" in table
    assert f"## Bad\n\n`json.tool {tmp_path / 'none'}`: exit code 2, " in table  # of which there are no rows
    assert "Absent" not in table
    (where.to / "bad.json").write_text(
        json.dumps({"command": "x", "state": "exit code 1", "seconds": 1.0, "machine": "m", "rows": [{"name": "b"}]})
    )
    (where.to / "bad/rows.json").write_text('{"rows": [{"name": "of an earlier try"}]}')
    parts["bad"] = Part("Bad", lambda where, folder: ("json.tool", tmp_path / "none"))
    assert run_parts(["bad"], where, 1) is Exit.FAILED
    assert "earlier" not in (where.to / "table.md").read_text()
    capfd.readouterr()
    parts["bad"] = Part("Bad", rows_of(tmp_path / "in2", {"name": "c", "x": None}))
    assert run_parts(["good", "bad"], where, 1) is Exit.DONE
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == f"good: in {where.to} already"
    assert lines[2].startswith("bad: done")
    assert (where.to / "table.md").read_text().startswith(table.partition("## Bad")[0])
    assert "| c | - |" in (where.to / "table.md").read_text()


def test_a_part_that_takes_too_long_is_ended_with_what_it_started(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(gpu, "_GRACE_S", 1)
    code = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', 'import time; time.sleep(99)'])"
    monkeypatch.setattr(gpu, "PARTS", {"slow": Part("Slow", lambda *_: ("timeit", "-n1", "-r1", code))})
    began = time.monotonic()
    assert run_parts(["slow"], Where(tmp_path, tmp_path, True), 1 / 60) is Exit.FAILED
    assert time.monotonic() - began < 60
    assert "slow: ran past 0.0166667 minutes" in capfd.readouterr().out
    assert "`: ran past 0.0166667 minutes, " in (tmp_path / "table.md").read_text()


def test_tests_run_in_the_clone_and_other_parts_where_they_are_asked_for(tmp_path, monkeypatch):
    clone, user = tmp_path / "clone", tmp_path / "user"
    (clone / "tests/gpu").mkdir(parents=True)
    (clone / "tests/gpu/conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--all', action='store_true')"
    )
    (clone / "tests/gpu/test_a.py").write_text("def test_x(): pass")
    user.mkdir()
    monkeypatch.chdir(user)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(gpu, "ROOT", clone)
    monkeypatch.setattr(
        gpu, "PARTS", {"tests": PARTS["tests"], "good": Part("Good", rows_of(Path("in"), {"name": "c"}))}
    )
    assert run_parts(["tests", "good"], Where(Path("to"), tmp_path, True), 1) is Exit.DONE
    assert "| all | 1 | 0 | 0 | 0 |" in (user / "to/table.md").read_text()
    assert [*clone.iterdir()] == [clone / "tests"]


@pytest.mark.parametrize(("part", "package"), [("loader", "ffcv"), ("checkpoint", "deepspeed")])
def test_what_a_part_needs_is_named(tmp_path, monkeypatch, part, package):
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    assert PARTS[part].absent(Where(tmp_path, tmp_path, False)) == f"{package} is not installed"


def test_so_is_the_data_that_a_part_needs(tmp_path, monkeypatch):
    """ImageNet's JPEGs, which in small only the loader reads, and CIFAR-10."""
    monkeypatch.setattr(gpu, "find_spec", lambda name: name)
    monkeypatch.setattr(gpu, "CIFAR", tmp_path / "cifar")
    for small, expected in ((False, {"wait", "fp8", "loader", "study"}), (True, {"loader", "study"})):
        where = Where(tmp_path, tmp_path / "none", small)
        absent = {name: part.absent(where) for name, part in PARTS.items()}
        assert {name for name, reason in absent.items() if reason} == expected
    assert f"{tmp_path / 'none'}: " in absent["loader"]
    assert absent["study"].startswith(f"{tmp_path / 'cifar'}: not there; widemix prep cifar10 --from DIR --to ")
    assert absent["study"].endswith(" --per-class 500 --holdout 10%")
    (tmp_path / "cifar").mkdir()
    (tmp_path / "cifar/holdout.beton").touch()
    (tmp_path / "none").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "none/a.jpg")
    for name in ("wait", "fp8", "loader", "study"):
        assert PARTS[name].absent(Where(tmp_path, tmp_path / "none", False)) is None


def test_the_studys_rows_are_those_of_its_table(tmp_path):
    lines = [{"run": "a", "metrics": {"top1": 50.0, "loss": 1.0}, "seconds": 3.5}, {"run": "b", "metrics": {}}]
    lines[1]["seconds"] = None
    (tmp_path / "figure7-small.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [{"name": "a", "top1": 50.0, "seconds": 3.5}, {"name": "b", "top1": None, "seconds": None}]
    assert PARTS["study"].rows(tmp_path) == rows


def test_tests_that_failed_are_named(tmp_path):
    cases = '<testcase classname="tests.a" name="test_x"><failure/></testcase><testcase classname="b" name="y"/>'
    cases += (
        '<testcase classname="c" name="z"><error/></testcase><testcase classname="d" name="s"><skipped/></testcase>'
    )
    counts = 'tests="4" failures="1" errors="1" skipped="1"'
    (tmp_path / "junit.xml").write_text(f"<testsuites><testsuite {counts}>{cases}</testsuite></testsuites>")
    rows = PARTS["tests"].rows(tmp_path)
    assert rows == [
        {"name": "all", "tests": 4, "failures": 1, "errors": 1, "skipped": 1},
        *({"name": f"failed: {name}"} | dict.fromkeys(("tests", "failures", "errors", "skipped"))
          for name in ("tests.a::test_x", "c::z")),
    ]  # fmt: skip


@pytest.mark.parametrize(("cpus", "threads"), [(1, [1]), (16, [1, 16])])
def test_the_loader_is_timed_on_one_thread_and_on_all(tmp_path, monkeypatch, cpus, threads):
    """On every power of two between them it would be stopped before it has written a row."""
    monkeypatch.setattr(gpu, "usable_cpus", lambda: cpus)
    words = list(PARTS["loader"].words(Where(tmp_path, tmp_path, False), tmp_path))
    start = words.index("--threads") + 1
    assert words[start : words.index("--json")] == threads

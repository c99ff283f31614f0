"""`widemix bench gpu`: its parts' commands, what it keeps of them, and how it goes on."""

import argparse
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from tests.conftest import ON_GPUS, ROOT, System
from widemix.bench import gpu
from widemix.bench.gpu import PARTS, Part, Where, prepared, run_parts
from widemix.cgroups import usable_cpus
from widemix.cli.bench import GPU_PARTS
from widemix.cli.commands import run_command
from widemix.cli.parser import make_parser
from widemix.errors import Exit, InputError

STUDIES = ("figure2d", "figureS8", "figureS1_left")


@pytest.fixture
def parse(tmp_path, system: System):
    """parse(name, small) -> (the folder of a part, its command as the parser has read it), on 16 CPUs."""
    system({"os.sched_getaffinity": lambda process: set(range(16))})
    (tmp_path / "to/data").mkdir(parents=True)
    (tmp_path / "to/data/train.beton").touch()  # as if prepared

    def parsed(name: str, small: bool) -> tuple[Path, argparse.Namespace]:
        folder, found = tmp_path / name, []
        folder.mkdir(exist_ok=True)
        module, *words = PARTS[name].words(Where(tmp_path / "to", tmp_path / "from", small), folder)
        assert module == "widemix", name
        code = run_command(make_parser(), lambda arguments: found.append(arguments) or Exit.DONE, words)
        assert (code, str(folder) in str(vars(found[0]))) == (0, True), name
        return folder, found[0]

    return parsed


@pytest.mark.parametrize("small", [False, True])
def test_every_part_is_a_command(tmp_path, parse, small):
    """Those that train read what was prepared, in small as on a GPU."""
    assert tuple(PARTS) == GPU_PARTS
    for name in PARTS:
        if name == "tests":
            continue
        folder, found = parse(name, small)
        if name in ("wait", "fp8"):
            assert found.to == (folder / "runs" if name == "wait" else folder)
            assert dict(found.overrides)["data.path"] == str(tmp_path / "to/data")
        if name.startswith("loader"):
            assert (found.origin, found.threads) == (tmp_path / "from", [1 if small else int(name[7:])])
            assert found.samples == (100 if small else max(1000, 500 * found.threads[0]))
        if name in STUDIES:
            assert (found.recipe.stem, found.to, found.report) == (name, folder / "runs", folder)
    words = PARTS["tests"].words(Where(tmp_path, tmp_path, small), tmp_path)
    assert (words[0], "--all" in words, "-n" in words) == ("pytest", True, not small)
    assert small or words[words.index("-n") + 1] == str(min(8, usable_cpus()))
    files = [str(path.relative_to(ROOT)) for path in ON_GPUS[: 1 if small else None]]
    assert [word for word in words if word.startswith("tests/")] == files


@pytest.mark.parametrize("small", [False, True])
def test_data_is_prepared_once_in_fifty_batches(tmp_path, system: System, small):
    """Of the sample, which has two JPEGs; in small of the digits."""
    calls, links, where, data = [], {}, Where(tmp_path, tmp_path / "from", small), tmp_path / "data"

    def run(command, **_):
        calls.append(command[3:])
        return SimpleNamespace(returncode=0)

    for name in ("a", "b"):
        (tmp_path / "from/train" / name).mkdir(parents=True)
        (tmp_path / f"from/train/{name}/x.jpg").touch()
    (tmp_path / "images/train/cut").mkdir(parents=True)  # of a start that was cut off
    (tmp_path / "images/train/cut/0.JPEG").touch()
    system({"subprocess.run": run, "os.symlink": lambda target, link, *_: links.update({link: target})})
    assert prepared(where) == data
    source = ["digits"] if small else ["image-folder", "--from", str(tmp_path / "images")]
    words = ["prep", *source, "--to", str(data), "--no-shuffle"]
    assert (calls, len(links), len({*links.values()})) == ([words], *((0, 0) if small else (50 * 256, 2)))
    assert (tmp_path / "images/train/cut").exists() == small
    data.mkdir()
    (data / "train.beton").touch()
    assert (prepared(where), len(calls)) == (data, 1)


def test_a_gpu_is_asked_for(tmp_path, system: System):
    system({"torch.cuda.is_available": lambda: False})
    with pytest.raises(InputError, match="--small"):
        run_parts(["b16"], Where(tmp_path / "to", tmp_path, False), 10)
    assert not (tmp_path / "to").exists()


def part(command: str, **options) -> Part:
    return Part("Its title", command, command, **options)


def rows_of(file, row) -> Part:
    file.write_text(json.dumps({"rows": [row]}))
    return part(f"json.tool {file} {{folder}}/rows.json")


def test_what_has_ended_is_kept_and_not_repeated(tmp_path, capfd):
    where = Where(tmp_path / "to", tmp_path, True)
    parts = {
        "good": rows_of(tmp_path / "in", {"name": "a|b", "images_per_s": 12.5, "parts": {"x": 1}}),
        "bad": part(f"json.tool {tmp_path / 'none'}"),
        "absent": part("json.tool", absent=lambda where: "it needs a cat"),
    }
    assert run_parts(list(parts), where, 1, parts) is Exit.FAILED
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("good: json.tool")
    assert lines[1].startswith("good: done")
    assert lines[3].startswith("bad: exit code 2")
    assert lines[3].endswith(f"its output: {where.to / 'bad' / 'output.txt'}")
    assert "none" in (where.to / "bad" / "output.txt").read_text()
    assert lines[4] == "absent: left out, as it needs a cat"
    table = (where.to / "table.md").read_text()
    assert table.startswith("## Its title\n\n`json.tool ")
    assert "| name | images_per_s |\n| --- | ---: |\n| a\\|b | 12.5 |\n" in table
    assert f"## Its title\n\n`json.tool {tmp_path / 'none'}`: exit code 2, " in table  # of which there are no rows
    assert table.count("##") == 2
    (where.to / "bad.json").write_text(
        json.dumps({"command": "x", "state": "exit code 1", "seconds": 1.0, "machine": "m", "rows": [{"name": "b"}]})
    )
    (where.to / "bad/rows.json").write_text('{"rows": [{"name": "of an earlier try"}]}')
    assert run_parts(["bad"], where, 1, parts) is Exit.FAILED
    assert "earlier" not in (where.to / "table.md").read_text()
    capfd.readouterr()
    parts["bad"] = rows_of(tmp_path / "in2", {"name": "c", "x": None})
    assert run_parts(["good", "bad"], where, 1, parts) is Exit.DONE
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == f"good: in {where.to} already"
    assert lines[2].startswith("bad: done")
    assert (where.to / "table.md").read_text().startswith(table.rpartition("## ")[0])
    assert "| c | - |" in (where.to / "table.md").read_text()


def test_a_part_that_takes_too_long_is_ended(tmp_path, monkeypatch, capfd):
    code = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', 'import time; time.sleep(99)'])"
    (tmp_path / "sleeps.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    parts = {"slow": part("sleeps")}
    began = time.monotonic()
    assert run_parts(["slow"], Where(tmp_path, tmp_path, True), 1 / 60, parts) is Exit.FAILED
    assert time.monotonic() - began < 60
    assert "slow: ran past 0.0166667 minutes" in capfd.readouterr().out
    assert "`: ran past 0.0166667 minutes, " in (tmp_path / "table.md").read_text()


def test_tests_run_in_the_clone_and_others_where_asked(tmp_path, monkeypatch):
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
    parts = {"tests": PARTS["tests"], "good": rows_of(Path("in"), {"name": "c"})}
    assert run_parts(["tests", "good"], Where(Path("to"), tmp_path, True), 1, parts) is Exit.DONE
    assert "| all | 1 | 0 | 0 | 0 |" in (user / "to/table.md").read_text()
    assert [*clone.iterdir()] == [clone / "tests"]


def test_what_a_part_needs_is_named(tmp_path, monkeypatch, system: System):
    """ImageNet's JPEGs, which in small only the loader reads, CPUs, data sets and DeepSpeed."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.chdir(tmp_path)
    system({"os.sched_getaffinity": lambda process: set(range(8))})
    loaders, read = {name for name in PARTS if name.startswith("loader")}, {"wait", "fp8"}
    for small, expected in ((False, loaders | read), (True, loaders)):
        where = Where(tmp_path, tmp_path / "none", small)
        absent = {name: part.absent(where) for name, part in PARTS.items()}
        assert {name for name, reason in absent.items() if reason} == expected | {"checkpoint", *STUDIES}
    assert f"{tmp_path / 'none'}: " in absent["loader_16"]
    assert absent["checkpoint"] == "deepspeed is not installed"
    assert absent["figure2d"] == "datasets/mnist: not there; widemix prep mnist --from DIR --to datasets/mnist"
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__spec__="is installed"))
    for name in ("mnist", "cifar10"):
        Path("datasets", name).mkdir(parents=True)
        Path("datasets", name, "train.beton").touch()
    (tmp_path / "none").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "none/a.jpg")
    absent = {name: part.absent(Where(tmp_path, tmp_path / "none", False)) for name, part in PARTS.items()}
    assert {name: reason for name, reason in absent.items() if reason} == {"loader_16": "this process may use 8 CPUs"}


def test_the_studys_rows_are_those_of_its_table(tmp_path):
    tmp_path /= "figure2d"
    tmp_path.mkdir()
    lines = [{"run": "a", "metrics": {"top1": 50.0, "loss": 1.0}, "seconds": 3.5}, {"run": "b", "metrics": {}}]
    lines[1]["seconds"] = None
    (tmp_path / "figure2d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [{"name": "a", "top1": 50.0, "seconds": 3.5}, {"name": "b", "top1": None, "seconds": None}]
    assert PARTS["figure2d"].rows(tmp_path) == rows


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

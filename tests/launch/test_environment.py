"""A copy of the Python environment on a node's own disk."""

import os
import subprocess
import sys
import venv
from concurrent.futures import ThreadPoolExecutor

import pytest

from launch.environment import pack, unpack
from pipeline.cli.commands import run_command
from pipeline.cli.parser import make_parser
from pipeline.errors import InputError


@pytest.fixture
def environment(tmp_path):
    """An environment with a module of its own."""
    venv.create(tmp_path / "env", symlinks=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "only_here.py").write_text("import sys\nprint(sys.prefix)\n")
    return tmp_path / "env"


def test_an_unpacked_environment_runs_where_it_is(tmp_path, environment):
    archive = pack(tmp_path / "shared", environment)
    assert [path.name for path in (tmp_path / "shared").iterdir()] == [archive.name]
    place = unpack(archive, tmp_path / "local")
    environment.rename(tmp_path / "gone")
    found = subprocess.run([place / "bin/python", "-m", "only_here"], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(place)


def test_the_name_tells_the_content(tmp_path, environment):
    first = pack(tmp_path / "shared", environment)
    assert pack(tmp_path / "shared", environment) == first
    (environment / "more").touch()
    assert pack(tmp_path / "shared", environment) != first


def test_many_processes_unpack_once_and_later_ones_not_at_all(tmp_path, environment, capsys):
    archive = pack(tmp_path, environment)
    with ThreadPoolExecutor(4) as pool:
        places = set(pool.map(lambda _: unpack(archive, tmp_path / "local"), range(4)))
    assert len(places) == 1
    assert capsys.readouterr().err.count("unpacking") == 1


def test_a_damaged_archive_is_not_used(tmp_path, environment):
    archive = pack(tmp_path, environment)
    data = archive.read_bytes()
    place = data.index(b"sys.prefix")
    for damaged in (data[:place] + b"X" + data[place + 1 :], data[:-512], data[: len(data) // 2]):
        archive.write_bytes(damaged)
        with pytest.raises(InputError, match=r"is damaged|cannot be unpacked"):
            unpack(archive, tmp_path / "local")
        assert not list((tmp_path / "local").glob("environment-*[0-9]"))
    archive.write_bytes(data)
    assert unpack(archive, tmp_path / "local").is_dir()


def test_what_cannot_be_packed_is_told(tmp_path):
    with pytest.raises(InputError, match="is neither a virtual nor a conda environment"):
        pack(tmp_path, tmp_path)


def test_the_command_packs_the_environment_that_it_runs_in(tmp_path, environment, monkeypatch, capsys):
    monkeypatch.setattr("launch.environment.pack.__defaults__", (environment,))
    assert run_command(make_parser(), None, ["stage", "--environment", "--to", str(tmp_path / "shared")]) == 0
    assert capsys.readouterr().out.strip() == str(*(tmp_path / "shared").glob("environment-*.tar"))
    assert run_command(make_parser(), None, ["stage", "data", "--environment", "--to", str(tmp_path)]) == 2
    assert "--environment: packs the environment alone" in capsys.readouterr().err


def test_a_node_goes_on_with_the_local_python(tmp_path, environment, monkeypatch):
    from launch.slurm import node

    archive, started = pack(tmp_path, environment), []
    monkeypatch.setenv("DISK", str(tmp_path / "local"))
    monkeypatch.delenv(node.LOCAL_VARIABLE, raising=False)
    monkeypatch.setattr(os, "execv", lambda *words: started.append(words))
    monkeypatch.setattr(sys, "argv", ["node.py", "--stage", "$DISK"])
    node._use_local_python(str(archive), "$DISK")
    python = str(tmp_path / "local" / archive.stem / "bin/python")
    assert started == [(python, [python, "-m", "launch.slurm.node", "--stage", "$DISK"])]
    assert os.environ.pop(node.LOCAL_VARIABLE) == archive.stem

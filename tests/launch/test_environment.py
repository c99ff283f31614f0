"""A copy of the Python environment on a node's own disk."""

import io
import os
import shutil
import subprocess
import tarfile
import venv
from concurrent.futures import ThreadPoolExecutor

import pytest
from blake3 import blake3

from tests.launch.test_stage import OTHER, disk, give_away
from widemix.errors import InputError
from widemix.launch.environment import pack, unpack

assert disk  # in which every user may write


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
    (tmp_path / f"local/{archive.stem}.unfinished/lib").mkdir(parents=True)  # of a process that was killed
    (tmp_path / f"local/{archive.stem}.unfinished/lib/left").touch()
    place = unpack(archive, tmp_path / "local")
    assert {path.name for path in (tmp_path / "local").iterdir()} == {archive.stem, f".{archive.stem}.lock"}
    assert not (place / "lib/left").exists()
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


def test_nothing_is_unpacked_before_its_hash_is_right(tmp_path, environment, system):
    archive = pack(tmp_path, environment)
    archive = archive.rename(archive.with_name(archive.name.replace("environment-", "environment-0")))
    system({"tarfile.open": None})
    with pytest.raises(InputError, match="is damaged, or has another name"):
        unpack(archive, tmp_path / "local")
    assert [path.name for path in (tmp_path / "local").iterdir()] == [f".{archive.stem}.lock"]


def test_an_interrupted_process_leaves_nothing(tmp_path, environment, system):
    archive = pack(tmp_path, environment)

    def interrupted(member, folder):
        raise KeyboardInterrupt

    system({"tarfile.data_filter": interrupted})
    with pytest.raises(KeyboardInterrupt):
        unpack(archive, tmp_path / "local")
    assert [path.name for path in (tmp_path / "local").iterdir()] == [f".{archive.stem}.lock"]
    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path / "shared", environment)
    assert not list((tmp_path / "shared").iterdir())


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


HOSTILE = {
    "absolute": [member("/{outside}/new")],
    "above": [member("../outside/new")],
    "link to a file": [member("./lib/a", tarfile.SYMTYPE, "{outside}/old")],
    "link above": [member("./lib/a", tarfile.SYMTYPE, "../../../outside/old")],
    "through a link": [member("./a", tarfile.SYMTYPE, "{outside}"), member("./a/new")],
    "through the interpreter": [member("./bin/python", tarfile.SYMTYPE, "{outside}/old"), member("./bin/python")],
    "below the interpreter": [member("./bin/python", tarfile.SYMTYPE, "{outside}"), member("./bin/python/new")],
    "hard link": [member("./lib/a", tarfile.LNKTYPE, "{outside}/old"), member("./lib/a")],
    "hard link of the interpreter": [member("./bin/python", tarfile.LNKTYPE, "{outside}/old")],
    **{
        f"link of {name}": [member(name, tarfile.SYMTYPE, "{outside}/old")]
        for name in ("./bin/pip", "./bin/python/x", "./lib/bin/python", "./bin/xpython")
    },
    "device": [member("./lib/a", tarfile.CHRTYPE)],
    "pipe": [member("./lib/a", tarfile.FIFOTYPE)],
}


def named(folder, outside, members: list[tarfile.TarInfo]):
    """An archive of these members, whose name has its hash."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for info in members:
            own = info.replace(name=info.name.format(outside=outside), linkname=info.linkname.format(outside=outside))
            own.size = 3 if own.isreg() else 0
            archive.addfile(own, io.BytesIO(b"new"))
    data = packed.getvalue()
    path = folder / f"environment-{blake3(data).hexdigest(length=8)}-{len(data)}.tar"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_of_an_archive_leaves_its_folder(tmp_path, name):
    """Though its name has its hash."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "old").write_text("old")
    archive = named(tmp_path, outside, HOSTILE[name])
    if name == "absolute":  # as tar does, without the slash
        place = unpack(archive, tmp_path / "local")
        assert [path.read_text() for path in place.rglob("new")] == ["new"]
        shutil.rmtree(place)
    else:
        with pytest.raises(InputError, match="cannot be unpacked to"):
            unpack(archive, tmp_path / "local")
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"old": "old"}
    assert [path.name for path in (tmp_path / "local").iterdir()] == [f".{archive.stem}.lock"]


def test_the_interpreter_alone_links_to_the_systems(tmp_path):
    """As a link of this user's, whoever packed it."""
    links = {"./bin/python": "/usr/bin/python3", "bin/python3.11-config": "../../../outside"}
    members = [member(name, tarfile.SYMTYPE, link) for name, link in links.items()]
    for info in members:
        info.uid, info.gid, info.uname, info.gname = OTHER, OTHER, "someone", "theirs"
    place = unpack(named(tmp_path, tmp_path, members), tmp_path / "local")
    for name, link in links.items():
        assert os.readlink(place / name) == link
        assert (place / name).lstat().st_uid == os.getuid()


def test_nothing_is_unpacked_through_a_link_in_the_way(tmp_path, environment):
    """Others may write to the disk of a node."""
    archive, local, other = pack(tmp_path, environment), tmp_path / "local", tmp_path / "other"
    for folder in (local, other):
        folder.mkdir()
    (local / f"{archive.stem}.unfinished").symlink_to(other)
    with pytest.raises(InputError, match=r"cannot be unpacked to .*File exists"):
        unpack(archive, local)
    assert not list(other.iterdir())


def test_an_environment_that_another_user_unpacked_is_not_run(tmp_path, environment, disk):
    archive = pack(tmp_path, environment)
    (disk / archive.stem / "bin").mkdir(parents=True)
    (disk / archive.stem / "bin/python").write_text("#!/bin/sh\necho theirs\n")
    give_away(*disk.rglob("*"))
    place = unpack(archive, disk)
    assert (place.parent, place.parent.stat().st_mode & 0o777) == (disk / "widemix-0", 0o700)
    assert (place / "bin/python").is_symlink()
    give_away(place)
    with pytest.raises(InputError, match=r"widemix-0/environment-\S+: is not a folder of this user's alone"):
        unpack(archive, disk)
    place.rename(tmp_path / "theirs")
    place.symlink_to(tmp_path / "theirs")
    with pytest.raises(InputError, match="is not a folder of this user's alone"):
        unpack(archive, disk)


@pytest.mark.parametrize(("mode", "owner"), [(0o777, 0), (0o755, OTHER), (0o1777, OTHER)])
def test_no_code_is_unpacked_where_others_can_replace_it(tmp_path, environment, disk, mode, owner):
    disk.chmod(mode)
    os.chown(disk, owner, owner)
    with pytest.raises(InputError, match=r"disk: other users can replace what we write there; name a folder"):
        unpack(pack(tmp_path, environment), disk)
    assert not list(disk.iterdir())


def test_no_file_becomes_another_users_or_a_privileged_one(tmp_path, environment):
    (environment / "bin/tool").write_text("")
    (environment / "bin/tool").chmod(0o6777)
    place = unpack(pack(tmp_path, environment), tmp_path / "local")
    assert (place / "bin/tool").stat().st_mode & 0o7777 == 0o755
    assert (place / "bin/tool").stat().st_uid == os.getuid()


def test_an_environment_that_leads_elsewhere_cannot_be_packed(tmp_path, environment):
    (environment / "lib/other").symlink_to(tmp_path)
    with pytest.raises(InputError, match=r"env cannot be packed \('./lib/other' would be"):
        pack(tmp_path / "shared", environment)
    assert not list((tmp_path / "shared").iterdir())


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, environment):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"env cannot be packed into .*/file/shared \(Not a directory\)"):
        pack(tmp_path / "file/shared", environment)


def test_a_conda_environment_is_one_too(tmp_path):
    with pytest.raises(InputError, match="is neither a virtual nor a conda environment"):
        pack(tmp_path, tmp_path)
    (tmp_path / "env/conda-meta").mkdir(parents=True)
    assert (unpack(pack(tmp_path, tmp_path / "env"), tmp_path / "local") / "conda-meta").is_dir()


def test_the_command_packs_the_environment_that_it_runs_in(tmp_path, environment, monkeypatch, widemix):
    monkeypatch.setattr("widemix.launch.environment.pack.__defaults__", (environment,))
    code, said = widemix("stage", "--environment", "--to", tmp_path / "shared")
    assert (code, said.splitlines()[0]) == (0, str(*(tmp_path / "shared").glob("environment-*.tar")))
    code, said = widemix("stage", "data", "--environment", "--to", tmp_path)
    assert (code, "--environment: packs the environment alone" in said) == (2, True)

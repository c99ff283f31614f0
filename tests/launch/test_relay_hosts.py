"""Staging over hosts with slow links: from one server by all, and from host to host. `-rP` shows the seconds."""

import sys
import textwrap
import time

import pytest

from tests.conftest import ROOT
from tests.launch.hosts import Hosts, missing
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings

REASON = missing()
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(REASON), reason=REASON)]
NODES, KBIT = 8, 2000
# Stages with blocks of 4 KiB once the file `go` is there, then serves until `stop` is.
NODE = """
    import sys
    import time
    from pathlib import Path
    from widemix.launch import stage
    from widemix.launch.relay import Neighbour, Relay
    from widemix.formats import chunks, manifest

    chunks.CHUNK = manifest.CHUNK = stage.CHUNK = chunks.PIECE = stage.PIECE = 4096
    folder, local, neighbour, place = sys.argv[1:]
    if neighbour:  # what every node reads of the shared file system itself: the manifest and small files
        stage.Folder.read = lambda self, name, begin=0, end=None: whole(name) if end is None else sys.exit("no chain")
        whole = lambda name: Path(folder, name).read_bytes()
    Path(place, f"ready-{Path(local).name}").touch()
    while not Path(place, "go").exists():
        time.sleep(0.01)
    with Relay(Neighbour(neighbour, 20001, "t") if neighbour else None, 20001, "t") as relay:
        stage.stage(Path(folder), Path(local), relay)
        Path(place, f"done-{Path(local).name}").touch()
        while not Path(place, "stop").exists():
            time.sleep(0.01)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for place in ("formats.chunks.CHUNK", "formats.chunks.PIECE", "formats.manifest.CHUNK"):
        monkeypatch.setattr(f"widemix.{place}", 4096)
    monkeypatch.setattr("widemix.data_prep.beton_writer.PAGE", 8192)
    prepare("digits", None, tmp_path / "digits", PrepSettings())
    return tmp_path / "digits"


def seconds(folder, place, parents: dict[int, int]) -> float:
    """Seconds in which all hosts have staged, host 0 from the folder, each other one from its parent."""
    hosts = Hosts(NODES + 1)
    try:
        place.mkdir()
        (place / "node.py").write_text(textwrap.dedent(NODE))
        for host in range(NODES + 1):
            hosts.limit(host, KBIT)
            parent = hosts.address(parents[host]) if host else ""
            words = (sys.executable, place / "node.py", folder, place / f"n{host}", parent, place)
            hosts.start(host, *words, log=place / "log", PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        wait_for(place, "ready-*")
        (place / "go").touch()
        began = time.monotonic()
        wait_for(place, "done-*")
        return time.monotonic() - began
    finally:
        (place / "stop").touch()
        hosts.stop()


def wait_for(place, pattern: str) -> None:
    deadline = time.monotonic() + 300
    while len(list(place.glob(pattern))) <= NODES:
        assert time.monotonic() < deadline, (place / "log").read_text()
        time.sleep(0.01)


def test_a_chain_takes_little_longer_than_one_host(folder, tmp_path):
    """Host 0 is the shared file system's server."""
    star = seconds(folder, tmp_path / "star", dict.fromkeys(range(1, NODES + 1), 0))
    chain = seconds(folder, tmp_path / "chain", {host: host - 1 for host in range(1, NODES + 1)})
    needed = sum(path.stat().st_size for path in folder.glob("*.beton")) * 8 / 1000 / KBIT
    print(
        f"one copy at the rate of a link: {needed:.1f} s; {NODES} hosts from one: {star:.1f} s; chain: {chain:.1f} s"
    )
    assert chain < star / 2

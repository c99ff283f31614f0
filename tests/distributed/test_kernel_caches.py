"""Where ranks on several nodes keep what they compile."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import ROOT

RANK = """
    import os, shutil, sys, time
    from pathlib import Path
    from widemix.distributed.kernel_caches import use_node_caches
    copy = shutil.copytree
    def slowly(source, target, **options):
        print("copies", flush=True)
        time.sleep(0.5)  # as a shared disk
        copy(source, target, **options)
    shutil.copytree = slowly
    use_node_caches()
    for name in ("NUMBA", "TRITON", "TORCHINDUCTOR"):
        print(os.environ.get(f"{name}_CACHE_DIR"))
    for path in Path(os.environ["NUMBA_CACHE_DIR"]).rglob("*.nbi"):
        print(path.relative_to(path.parents[1]))
"""
SEVERAL_NODES = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "SLURM_JOB_ID": "77"}


@pytest.fixture
def node(tmp_path):
    """Ranks of a node with a disk and a home folder of their own: node(environ, ranks) -> what each prints."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk").chmod(0o1777)
    cache = tmp_path / "home/widemix/numba-1-of-sources"
    cache.mkdir(parents=True)
    (cache / "decode.nbi").touch()
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))

    def start(environ: dict[str, str], ranks: int = 1) -> list[list[str]]:
        own = {"TMPDIR": str(tmp_path / "disk"), "XDG_CACHE_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
        clean = {name: value for name, value in os.environ.items() if not name.endswith("_CACHE_DIR")}
        command = [sys.executable, tmp_path / "rank.py"]
        processes = [
            subprocess.Popen(command, env=clean | own | environ, stdout=subprocess.PIPE, text=True)
            for _ in range(ranks)
        ]
        return [process.communicate(timeout=300)[0].splitlines() for process in processes]

    return start


def test_one_rank_of_a_node_fills_its_caches(node, tmp_path):
    folder = tmp_path / f"disk/widemix-{os.geteuid()}/caches-77"
    lines = [f"{folder}/{kind}" for kind in ("numba", "triton", "inductor")] + ["numba-1-of-sources/decode.nbi"]
    ranks = node(SEVERAL_NODES, ranks=4)
    assert sorted(ranks, key=len) == [lines] * 3 + [["copies", *lines]]
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "triton").mkdir()
    (folder / "triton/kernel").touch()
    assert node(SEVERAL_NODES | {"SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "train-77-1"}) == [lines]
    assert (folder / "triton/kernel").exists()
    (folder / "numba/numba-1-of-sources/decode.nbi").rename(folder / "numba/numba-1-of-sources/resize.nbi")
    after = node(SEVERAL_NODES | {"SLURM_JOB_ID": "78"})[0]
    assert sorted(after[-2:]) == ["numba-1-of-sources/decode.nbi", "numba-1-of-sources/resize.nbi"]


def test_what_a_killed_rank_copied_is_copied_again(node, tmp_path):
    unfinished = tmp_path / f"disk/widemix-{os.geteuid()}/caches-a_b/numba.unfinished"
    unfinished.mkdir(parents=True)
    unfinished.parents[1].chmod(0o700)
    (unfinished / "half.nbi").touch()
    found = node(SEVERAL_NODES | {"SLURM_JOB_ID": "", "TORCHELASTIC_RUN_ID": "a/b"})
    assert found[0][-1] == "numba-1-of-sources/decode.nbi"
    assert not unfinished.exists()


@pytest.mark.parametrize(
    ("environ", "mode"),
    [
        ({"WORLD_SIZE": "4"}, 0o1777),  # on one machine
        ({}, 0o777),  # where another user could put code into the cache
        ({"TRITON_CACHE_DIR": "/t", "TORCHINDUCTOR_CACHE_DIR": "/i"}, 0o1777),
    ],
)
def test_what_the_user_set_or_is_unsafe_stays(node, tmp_path, environ, mode):
    (tmp_path / "disk").chmod(mode)
    own = {"NUMBA_CACHE_DIR": str(tmp_path / "mine")}
    [lines] = node(SEVERAL_NODES | environ | own)
    expected = [str(tmp_path / "mine"), environ.get("TRITON_CACHE_DIR", "None")]
    assert lines[:3] == [*expected, environ.get("TORCHINDUCTOR_CACHE_DIR", "None")]
    assert not list(Path(tmp_path / "disk").glob("*/*/numba"))

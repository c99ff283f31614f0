"""WIDEMIX_NATIVE picks the code, and each gives the same numbers."""

import json
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.conftest import ROOT
from widemix.errors import InputError
from widemix.native import BuildError, build, compiled, levels

RUNNABLE = levels.runnable()


def results(choice: str, folder, *, code=ROOT) -> dict:
    done = subprocess.run(
        [sys.executable, "-P", ROOT / "tests/native/level_results.py", folder],
        env=os.environ | {"WIDEMIX_NATIVE": choice, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr}


@pytest.fixture(scope="module")
def of_native(tmp_path_factory) -> dict:
    return results("native", tmp_path_factory.mktemp("native"))


@pytest.mark.long
@pytest.mark.parametrize("level", levels.LEVELS.get(platform.machine(), {}))
def test_each_level_gives_the_same_numbers(level, of_native, tmp_path) -> None:
    if level not in RUNNABLE:
        pytest.skip(f"this processor does not run code for {level}; it runs {', '.join(RUNNABLE)}")
    found = results(level, tmp_path)
    assert found["exact"] == of_native["exact"]
    assert np.allclose(found["block"], of_native["block"], rtol=1e-4, atol=1e-6)
    assert found["code"].startswith("compiled code: made on this machine")


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="torch knows AVX only")
def test_the_levels_that_run_are_those_that_torch_finds() -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    assert ("v3" in RUNNABLE) == (capability in ("AVX2", "AVX512"))
    assert ("v4" in RUNNABLE) == (capability == "AVX512")


def test_the_best_shipped_level_is_taken_unless_another_is_asked_for(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setattr(levels, "processor", lambda: "flags : " + " ".join(known("v4")))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for level in ("v2", "v3", "vbmi"):
        (tmp_path / f"{level}.so").touch()
    assert compiled() == tmp_path / "v3.so"  # there is none for v4, and vbmi asks for more
    monkeypatch.setenv("WIDEMIX_NATIVE", "v2")
    assert compiled() == tmp_path / "v2.so"
    monkeypatch.setenv("WIDEMIX_NATIVE", "none")
    with pytest.raises(BuildError, match=r"^WIDEMIX_NATIVE=none$"):
        compiled()


def known(last: str) -> set[str]:
    """What Linux lists of a processor that runs a level."""
    names = list(levels.LEVELS["x86_64"])
    return set().union(*(levels.LEVELS["x86_64"][name].features for name in names[: names.index(last) + 1]))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("v9", r"^WIDEMIX_NATIVE=v9: is none of v2, v3, v4, vbmi, native, none$"),
        ("v3", r"^WIDEMIX_NATIVE=v3: this processor has no avx2 fma; it runs v2$"),
        ("vbmi", r"^WIDEMIX_NATIVE=vbmi: this processor has no avx512vbmi pclmulqdq vpclmulqdq; it runs v2$"),
    ],
)
def test_what_the_processor_does_not_run_is_an_error(value, message, monkeypatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(levels, "processor", lambda: "flags : " + " ".join(known("v3") - {"avx2", "fma"}))
    monkeypatch.setenv("WIDEMIX_NATIVE", value)
    with pytest.raises(InputError, match=message):
        compiled()


@pytest.mark.parametrize(
    ("machine", "features", "runs"),
    [
        ("aarch64", "asimd", ["v8"]),
        ("aarch64", "asimdrdm asimd atomics crc32", ["v8", "v8.1"]),
        ("aarch64", "asimd atomics crc32", ["v8"]),
        ("x86_64", "avx avx2", []),
        ("riscv64", "asimd", []),
    ],
)
def test_a_level_needs_all_its_instructions_and_those_of_the_lower_ones(machine, features, runs, monkeypatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(levels, "processor", lambda: f"Features : {features}")
    assert list(levels.runnable()) == runs


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse4_2\nbugs\t\t: spectre\n\nflags\t\t: other\n", "flags\t\t: fpu sse4_2"),
        ("processor\t: 0\nFeatures\t: fp asimd\n", "Features\t: fp asimd"),
        ("processor\t: 0\n", ""),
        (None, ""),
    ],
)
def test_instructions_are_those_that_linux_lists(text, line, monkeypatch) -> None:
    info = SimpleNamespace(exists=lambda: text is not None, read_text=lambda: text)
    monkeypatch.setattr(levels, "Path", {"/proc/cpuinfo": info}.__getitem__)
    assert levels.processor() == line


def test_a_level_above_one_that_does_not_run_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(levels, "processor", lambda: "flags : " + " ".join(known("v4") - {"cx16"}))
    monkeypatch.setenv("WIDEMIX_NATIVE", "v3")
    with pytest.raises(InputError, match="this processor lacks instructions of a lower level; it runs none of them"):
        levels.wanted()


def test_the_version_says_which_code_is_in_use(tmp_path) -> None:
    def printed(choice: str) -> str:
        environ = os.environ | {"WIDEMIX_NATIVE": choice, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
        return subprocess.run([sys.executable, "-m", "widemix", "--version"], env=environ, capture_output=True).stdout

    assert printed("none").endswith(b" (no compiled code: WIDEMIX_NATIVE=none)\n")
    assert printed("native").endswith(b" (compiled code is made at its first use)\n")
    assert not list(tmp_path.rglob("*.so"))

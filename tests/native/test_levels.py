"""WIDEMIX_NATIVE picks the code, and each gives the same numbers."""

import json
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.conftest import ROOT
from widemix.errors import InputError
from widemix.native import BuildError, build, compiled

RUNNABLE = build.runnable()
ON_X86 = pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="of x86-64 on Linux")


def results(choice: str, folder) -> dict:
    done = subprocess.run(
        [sys.executable, "-P", ROOT / "tests/native/level_results.py", folder],
        env=os.environ | {"WIDEMIX_NATIVE": choice, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def of_native(tmp_path_factory) -> dict:
    return results("native", tmp_path_factory.mktemp("native"))


@pytest.mark.long
@pytest.mark.parametrize("level", build.LEVELS.get(platform.machine(), {}))
def test_each_level_gives_the_same_numbers(level, of_native, tmp_path) -> None:
    if level not in RUNNABLE:
        pytest.skip(f"this processor does not run code for {level}; it runs {', '.join(RUNNABLE)}")
    found = results(level, tmp_path)
    assert found["exact"] == of_native["exact"]
    assert np.allclose(found["block"], of_native["block"], rtol=1e-4, atol=1e-6)
    assert found["code"].startswith("compiled code: made on this machine")


@ON_X86
def test_the_levels_that_run_are_those_that_torch_finds() -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    assert ("v3" in RUNNABLE) == (capability in ("AVX2", "AVX512"))
    assert ("v4" in RUNNABLE) == (capability == "AVX512")


def known(last: str, *without: str) -> str:
    """What Linux lists of a processor that runs a level, without some."""
    names = list(build.LEVELS["x86_64"])
    features = set().union(*(build.LEVELS["x86_64"][name].features for name in names[: names.index(last) + 1]))
    return " ".join(sorted(features - {*without}))  # each process collects the same names


NONE_OF_X86 = "is none of v2, v3, v4, vbmi, native, none"
LACKS = "this processor lacks instructions of a lower level; it runs none of them"
# A machine, what Linux lists of its processor, a value of WIDEMIX_NATIVE, and the levels that run or what is wrong.
PROCESSORS: list[tuple[str, str | None, str, list[str] | str]] = [
    ("x86_64", None, "", []),  # it lists none
    ("x86_64", known("v4"), "v3", ["v2", "v3", "v4"]),
    ("x86_64", "avx avx2", "", []),
    ("x86_64", known("v3"), "v9", f"v9: {NONE_OF_X86}"),
    ("x86_64", known("v3", "avx2", "fma"), "v3", "v3: this processor has no avx2 fma; it runs v2"),
    ("x86_64", known("v2"), "vbmi", "vbmi: this processor has no avx512vbmi pclmulqdq vpclmulqdq; it runs v2"),
    ("x86_64", known("v4", "cx16"), "v3", f"v3: {LACKS}"),
    ("aarch64", "asimd", "v8", ["v8"]),
    ("aarch64", "asimdrdm asimd atomics crc32", "v8.1", ["v8", "v8.1"]),
    ("aarch64", "asimd atomics crc32", "none", ["v8"]),
    ("aarch64", "asimd", "v2", "v2: is none of v8, v8.1, native, none"),
    ("aarch64", "asimd crc32", "v8.1", "v8.1: this processor has no asimdrdm atomics; it runs v8"),
    ("riscv64", "asimd", "native", []),
    ("riscv64", "", "v2", "v2: is none of native, none"),
]


@pytest.mark.parametrize(("machine", "features", "value", "outcome"), PROCESSORS)
def test_a_level_needs_all_its_instructions_and_those_below(
    cpu, machine, features, value, outcome, monkeypatch
) -> None:
    line = "flags\t\t" if machine == "x86_64" else "Features\t"
    cpu(machine, None if features is None else f"processor\t: 0\n{line}: {features}\nbugs\t: none\n\n{line}: other\n")
    monkeypatch.setenv("WIDEMIX_NATIVE", value)
    if isinstance(outcome, list):
        assert (build.wanted(), list(build.runnable())) == (value, outcome)
        return
    for call in (build.wanted, compiled):
        with pytest.raises(InputError) as raised:
            call()
        assert str(raised.value) == f"WIDEMIX_NATIVE={outcome}"


def test_the_best_shipped_level_is_taken_by_default(monkeypatch, cpu, tmp_path) -> None:
    cpu("x86_64", f"flags : {known('v4')}")
    for level in ("v2", "v3", "vbmi"):
        (tmp_path / f"{level}.so").touch()
    assert compiled(tmp_path) == tmp_path / "v3.so"  # there is none for v4, and vbmi asks for more
    monkeypatch.setenv("WIDEMIX_NATIVE", "v2")
    assert compiled(tmp_path) == tmp_path / "v2.so"
    monkeypatch.setenv("WIDEMIX_NATIVE", "none")
    with pytest.raises(BuildError, match=r"^WIDEMIX_NATIVE=none$"):
        compiled(tmp_path)


MACROS = "SSSE3 SSE4_1 SSE4_2 POPCNT AVX AVX2 BMI BMI2 F16C FMA LZCNT MOVBE AVX512F AVX512BW AVX512CD"
MACROS += " AVX512DQ AVX512VL AVX512VBMI AVX512VBMI2 AVX512BITALG AVX512VNNI GFNI PCLMUL VPCLMULQDQ AES SHA"
AS_LINUX = {"LZCNT": "abm", "BMI": "bmi1", "PCLMUL": "pclmulqdq"}


@ON_X86
@pytest.mark.parametrize("level", build.LEVELS["x86_64"])
def test_a_level_needs_all_that_the_compiler_may_use(level) -> None:
    """By the macros that say to programs which instructions there are."""
    compiler = build.find_compiler() or pytest.skip("there is no compiler")
    command = [compiler, *build.LEVELS["x86_64"][level].flags, "-dM", "-E", "-x", "c", "/dev/null"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name for name in MACROS.split() if f"#define __{name}__ 1" in text}
    assert {AS_LINUX.get(name, name.lower()) for name in used} == {*known(level, "cx16", "lahf_lm").split()}
    assert "#define __GCC_HAVE_SYNC_COMPARE_AND_SWAP_16 1" in text


@pytest.mark.parametrize(
    ("choice", "words"),
    [("none", "no compiled code: WIDEMIX_NATIVE=none"), ("native", "compiled code is made at its first use")],
)
def test_the_version_says_which_code_is_in_use(choice, words, tmp_path) -> None:
    environ = os.environ | {"WIDEMIX_NATIVE": choice, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "widemix", "--version"]
    assert subprocess.run(command, env=environ, capture_output=True, text=True).stdout.endswith(f" ({words})\n")
    assert not list(tmp_path.rglob("*.so"))

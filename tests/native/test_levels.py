"""WIDEMIX_NATIVE picks the code, and each gives the same numbers."""

import ctypes
import json
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import ROOT
from tests.data.test_decode import KINDS, PACKED, by_pillow, scene
from widemix import native
from widemix.data.augment.affine import rotation
from widemix.data_prep.coefficients import pack
from widemix.data_prep.restart import WRITTEN, run_codec
from widemix.errors import InputError
from widemix.formats.beton import COEFFICIENTS, JPEG, RAW
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


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """The code of this machine, and that of the least processor of its kind."""
    mine, compiler = native.load(), build._compiler()
    if mine is None or not compiler:
        pytest.skip("there is no compiled code, or no compiler")
    target = tmp_path_factory.mktemp("plain") / "plain.so"
    build.compile_library([compiler], target, "-O0")
    return mine, ctypes.CDLL(str(target))


def address(array: np.ndarray) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def decoded(
    library: ctypes.CDLL, data: bytes, mode: int, size: tuple[int, int], box: list[int], cubic: bool
) -> bytes:
    """A box of an image of this width and height, 40 pixels wide and tall."""
    image, words = np.full((40, 40, 3), 7, np.uint8), [len(data), mode, *size[::-1]]
    place = np.array(box, np.int64)
    numbers = [ctypes.c_int64(number) for number in words]
    ends = ctypes.c_int64(cubic), address(image), ctypes.c_int64(40), ctypes.c_int64(0)
    library.decode_from_memory(data, *numbers, address(place), *ends)
    return image.tobytes()


@pytest.mark.parametrize("kind", [*PACKED, "pixels"])
def test_the_least_processor_decodes_the_same(both, kind, capfd):
    numbers = np.random.RandomState(0)
    for count, size in enumerate([(37, 53), (150, 100), (131, 70)]):
        image = scene(count, *size)
        data = image.tobytes() if kind == "pixels" else KINDS[kind](image)
        forms = [(data, RAW)] if kind == "pixels" else [(data, JPEG), (pack(data)[0], COEFFICIENTS)]
        for form, mode in forms:
            for _ in range(4):
                box = [numbers.randint(0, size[1] // 2), numbers.randint(0, size[0] // 2)]
                box += [numbers.randint(1, size[1] - box[0] + 1), numbers.randint(1, size[0] - box[1] + 1)]
                given = form, mode, size, [*box, numbers.randint(2)], bool(numbers.randint(2))
                first, second = (decoded(library, *given) for library in both)
                assert first == second, (size, mode, box)
    assert capfd.readouterr().err == ""


def test_the_least_processor_restores_coefficients_of_all_sizes(both):
    """Noise has blocks in which all differ from zero, some of them by 10 bits."""
    noise = np.random.RandomState(0).randint(0, 256, (70, 90, 3)).astype(np.uint8)
    images = [Image.fromarray(noise), Image.fromarray(noise // 128 * 255), scene(0, 90, 70)]
    for image in images:
        for quality in (100, 90, 50):
            data = by_pillow(image, quality=quality, subsampling=0)
            for library in both:
                outcome, found, count, _ = run_codec(library.restore_jpeg, pack(data)[0], len(data))
                assert (outcome, found[:count].tobytes()) == (WRITTEN, data)


def test_the_least_processor_makes_the_same_checksums(both):
    data = np.random.RandomState(0).bytes(30_000)
    for library in both:
        library.crc32c.restype = ctypes.c_uint32
    for size in (0, 1, 7, 8, 9, 767, 768, 12_287, 12_288, 12_300, 29_999):
        assert len({library.crc32c(0, data[1:], ctypes.c_size_t(size)) for library in both}) == 1


def test_the_least_processor_looks_up_and_counts_the_same(both):
    """Or leaves a single table to what compiles Python."""
    numbers = np.random.RandomState(0)
    for size in (3, 93, 96, 99, 192, 195, 3000):
        values, tables = (numbers.randint(0, 256, shape).astype(np.uint8) for shape in (size, (3, 256)))
        for library in both:
            found, one, counts = values.copy(), values.copy(), np.full((3, 256), -1, np.int32)
            assert library.look_up(address(found), ctypes.c_int64(size), address(tables))
            assert np.array_equal(found, tables[np.arange(size) % 3, values])
            done = library.look_up_one(address(one), ctypes.c_int64(size), address(tables))
            assert np.array_equal(one, tables[0][values] if done else values)
            assert library.count_values(address(values), ctypes.c_int64(size), address(counts))
            expected = [np.bincount(values[channel::3], minlength=256) for channel in range(3)]
            assert np.array_equal(counts, expected)


@pytest.mark.parametrize("cubic", [False, True])
def test_the_least_processor_moves_pixels_alike(both, cubic):
    matrices = [rotation(17.0, 61, 47), rotation(-3.0, 61, 47), (1.0, 0.21, -3.0, 0.0, 1.0, 0.0)]
    matrices += [(1.0, 0.0, 0.0, -0.3, 1.0, 2.5), (1.0, 0.0, 3.25, 0.0, 1.0, 0.0), (1.0, 0.0, 0.0, 0.0, 1.0, -4.5)]
    for matrix in matrices:
        found = []
        for library in both:
            image = np.array(scene(0, 47, 61))
            sizes = [ctypes.c_int64(61), ctypes.c_int64(47), *map(ctypes.c_double, matrix)]
            assert library.move_pixels(address(image), *sizes, ctypes.c_int64(cubic), ctypes.c_int64(0x102030))
            found.append(image.tobytes())
        assert found[0] == found[1], matrix


def test_every_colour_is_that_of_libjpegs_arithmetic(both):
    """Of all pairs of Cb and Cr, in 16 bits after the point, rounded (jdcolor.c)."""
    cr, cb = (np.ascontiguousarray(each.reshape(-1).astype(np.uint8)) for each in np.mgrid[:256, :256])
    red, blue = cr.astype(int) - 128, cb.astype(int) - 128
    changes = [
        (91881 * red + 32768) >> 16,
        (-22554 * blue - 46802 * red + 32768) >> 16,
        (116130 * blue + 32768) >> 16,
    ]
    for level in (0, 100, 255):
        y = np.full(len(cr) + 32, level, np.uint8)
        for library in both:
            found = np.empty((len(cr) + 32, 4), np.uint8)
            library.colour_row(address(y), address(cb), address(cr), len(cr), address(found))
            for channel, change in enumerate(changes):
                assert np.array_equal(found[: len(cr), channel], (level + change).clip(0, 255))


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
    ("machine", "features", "value", "message"),
    [
        ("aarch64", "asimd", "v2", r"^WIDEMIX_NATIVE=v2: is none of v8, v8\.1, native, none$"),
        ("aarch64", "asimd crc32", "v8.1", r"=v8\.1: this processor has no asimdrdm atomics; it runs v8$"),
        ("riscv64", "", "v2", r"^WIDEMIX_NATIVE=v2: is none of native, none$"),
    ],
)
def test_levels_are_those_of_the_kind_of_machine(machine, features, value, message, monkeypatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(levels, "processor", lambda: f"Features : {features}")
    monkeypatch.setenv("WIDEMIX_NATIVE", value)
    with pytest.raises(InputError, match=message):
        levels.wanted()


MACROS = "SSSE3 SSE4_1 SSE4_2 POPCNT AVX AVX2 BMI BMI2 F16C FMA LZCNT MOVBE AVX512F AVX512BW AVX512CD"
MACROS += " AVX512DQ AVX512VL AVX512VBMI AVX512VBMI2 AVX512BITALG AVX512VNNI GFNI PCLMUL VPCLMULQDQ AES SHA"
AS_LINUX = {"LZCNT": "abm", "BMI": "bmi1", "PCLMUL": "pclmulqdq"}


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="of compilers for x86-64")
@pytest.mark.parametrize("level", levels.LEVELS["x86_64"])
def test_a_level_asks_the_processor_for_all_that_the_compiler_may_use(level) -> None:
    """By the macros that say to programs which instructions there are."""
    compiler = build._compiler() or pytest.skip("there is no compiler")
    command = [compiler, *levels.LEVELS["x86_64"][level].flags, "-dM", "-E", "-x", "c", "/dev/null"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name for name in MACROS.split() if f"#define __{name}__ 1" in text}
    assert {AS_LINUX.get(name, name.lower()) for name in used} == known(level) - {"cx16", "lahf_lm"}
    assert "#define __GCC_HAVE_SYNC_COMPARE_AND_SWAP_16 1" in text


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

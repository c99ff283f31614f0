"""The checks of `widemix doctor`, each on an installation that really has the fault wherever a test can cause it."""

import logging
import os
import re
import subprocess
import sys
import sysconfig
import warnings
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from widemix import doctor
from widemix.doctor import CHECKS, Check, Finding, finding, run_check, software
from widemix.torch_support import runs_on

PIP = r"\S*bin/python\S* -m pip install"


def look(what: str) -> Finding:
    return run_check(CHECKS[what])


def python(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | {"COLUMNS": "100"} | environ
    )


# The whole command, in processes of its own.


@pytest.mark.long
def test_where_the_tests_run_training_can_run() -> None:
    script = "import sys; from widemix.doctor import run_doctor; code = run_doctor()"
    run = python(f"{script}; assert 'ffcv' not in sys.modules; sys.exit(code)")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr in (
        "",
        "importing what is installed, and timing the CPU: about half a minute\n",
    )  # if it takes long
    lines = run.stdout.splitlines()
    assert lines[0].split() == ["state", "what", "found,", "and", "how", "to", "fix", "it"]
    assert lines[-1] == "Training can run here."
    assert max(map(len, lines)) <= 100
    for what in CHECKS:
        assert re.search(rf"^(ok|note) +{what} ", run.stdout, re.MULTILINE), what


def test_where_nothing_is_installed_it_says_so_and_exits_1() -> None:
    blocked = ("torch", "torchvision", "cv2", "ffcv", "numba", "deepspeed", "timm", "torchmetrics")
    script = f"import sys; sys.modules.update(dict.fromkeys({blocked})); from widemix.doctor import run_doctor"
    run = python(f"{script}; sys.exit(run_doctor())")
    assert run.returncode == 1
    assert run.stderr == ""
    rows = ("torch", "torchvision", "GPUs", "NCCL", "numba", "DeepSpeed", "timm")
    for what in (*rows, "torchmetrics", "TensorBoard"):
        assert re.search(rf"^missing +{what} ", run.stdout, re.MULTILINE), what
    for what in ("FFCV", "OpenCV"):  # the benchmarks alone need them
        assert re.search(rf"^note +{what} ", run.stdout, re.MULTILINE), what
    assert re.search(r"^ok +disk ", run.stdout, re.MULTILINE)
    assert " ".join(run.stdout.split()).endswith(", torchmetrics, TensorBoard.")


# Packages.


@pytest.mark.parametrize(
    ("what", "module", "requirement"),
    [
        ("torch", "torch", "torch<[0-9.]+,>="),
        ("FFCV", "ffcv", "ffcv>="),
        ("OpenCV", "cv2", "opencv-python>="),
        ("DeepSpeed", "deepspeed", "deepspeed<[0-9.]+,>="),
        ("timm", "timm", "timm>="),
        ("torchmetrics", "torchmetrics", "torchmetrics>="),
        ("TensorBoard", "torch.utils.tensorboard", "tensorboard>="),
    ],
)
def test_a_package_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, what: str, module: str, requirement: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    finding = look(what)
    assert finding.state == ("note" if what in ("FFCV", "OpenCV") else "missing")
    assert re.fullmatch(f"{PIP} '{requirement}[0-9.]+'", finding.fix)


def test_a_package_that_breaks_when_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm.py").write_text("raise OSError('libgone.so.1: cannot open shared object file')")
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    finding = look("timm")
    assert (finding.state, finding.text) == ("missing", "OSError: libgone.so.1: cannot open shared object file")
    assert re.fullmatch(f"{PIP} --force-reinstall --no-cache-dir --no-deps 'timm>=[0-9.]+'", finding.fix)


def install_metadata(folder: Path, name: str, version: str, *requires: str) -> None:
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
    metadata.write_text("\n".join(lines) + "\n")


def test_numba_that_does_not_know_this_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_metadata(tmp_path, "numpy", "99.0")
    monkeypatch.syspath_prepend(tmp_path)
    finding = look("packages")
    assert finding.state == "note"
    assert re.search(r"numba requires numpy<[0-9.]+,>=[0-9.]+, found 99\.0", finding.text)
    assert re.search(r"pip install .*'numpy<[0-9.]+,>=[0-9.]+'", finding.fix)


def test_a_requirement_of_a_requirement_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_metadata(tmp_path, "torchmetrics", "99.0", "nowhere>=3", "elsewhere; extra == 'more'")
    monkeypatch.syspath_prepend(tmp_path)
    finding = look("packages")
    assert (finding.state, finding.text) == ("missing", "torchmetrics requires nowhere>=3, not installed")
    assert re.fullmatch(f"{PIP} 'nowhere>=3'", finding.fix)


# torch and the GPUs.


def test_torchvision_built_for_another_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torchvision

    monkeypatch.setattr(torchvision.version, "cuda", 11080)
    finding = look("torchvision")
    assert finding.state == "note"
    assert finding.text.endswith(f"built for CUDA 11.8, torch for {torch.version.cuda}")


def test_torchvision_built_for_the_same_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torchvision

    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torchvision.version, "cuda", 13020, raising=False)
    assert look("torchvision") == Finding(f"{torchvision.__version__}, built for the same CUDA")


def test_torch_without_cuda_trains_on_the_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    assert look("torch").state == "note"
    assert look("GPUs").state == "note"
    monkeypatch.setattr(software, "driver_cuda", lambda: (13, 2))
    assert look("GPUs") == Finding(
        "the driver supports CUDA 13.2, torch is built without CUDA", "missing", look("torch").fix
    )


def test_a_cpu_on_which_bf16_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from widemix.data import precision

    seconds, now = {torch.float32: 0.001, torch.bfloat16: 0.012}, 0.0

    def linear(a: torch.Tensor, _: torch.Tensor) -> None:
        nonlocal now
        now += seconds[a.dtype]

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    monkeypatch.setattr(precision, "time", SimpleNamespace(perf_counter=lambda: now))
    threads = torch.get_num_threads()
    assert precision.bf16_slowdown() == pytest.approx(12)
    assert torch.get_num_threads() == threads
    assert look("CPU").state == "note"
    assert look("CPU").fix == "train there in fp32"
    seconds[torch.bfloat16] = 0.001
    assert look("CPU").state == "ok"
    monkeypatch.setattr(precision, "bf16_slowdown", lambda: precision.SLOW)
    assert look("CPU") == Finding(f"a linear layer in bf16 takes {precision.SLOW:.1f} times as long as in fp32")


def test_a_driver_that_is_too_old_and_one_without_gpus(tmp_path: Path) -> None:
    """With a driver library whose version is set here, before torch's own."""
    source = '#include <stdlib.h>\nint cuDriverGetVersion(int *v) { *v = atoi(getenv("DRIVER")); return 0; }\n'
    (tmp_path / "cuda.c").write_text(source)
    subprocess.run(
        ["g++", "-x", "c", "-shared", "-fPIC", tmp_path / "cuda.c", "-o", tmp_path / "libcuda.so.1"], check=True
    )
    script = "import os; from widemix.doctor import CHECKS, run_check\n"
    script += (
        "for os.environ['DRIVER'] in ('12040', '99000'): print(*vars(run_check(CHECKS['GPUs'])).values(), sep='|')"
    )
    run = python(script, LD_LIBRARY_PATH=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    old, bare = run.stdout.splitlines()
    assert re.fullmatch(
        r"the driver supports CUDA 12\.4, torch is built for ([0-9.]+)\|missing\|"
        r"install .* CUDA \1, or .* install 'torch==2.8.0' 'torchvision==0.23.0'",
        old,
    )
    assert bare.startswith("the driver supports CUDA 99.0, but no GPU is visible")
    assert bare.endswith("|note|unset CUDA_VISIBLE_DEVICES")


def test_gpus_are_listed_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    device = namedtuple("device", "name total_memory major minor")
    devices = [device("H200", 140 << 30, 9, 0), device("H200", 140 << 30, 9, 0), device("T4", 15 << 30, 7, 5)]
    monkeypatch.setattr(software, "driver_cuda", lambda: (99, 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_properties", devices.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90", "compute_120"])
    assert look("GPUs") == Finding("2 x H200 (140 GiB), 1 x T4 (15 GiB); the driver supports CUDA 99.1")
    devices.append(device("V100", 32 << 30, 7, 0))
    found = look("GPUs")
    assert found.state == "missing"
    assert found.text.startswith("V100 is sm_70, torch ")
    assert found.text.endswith("is built for sm_75, sm_80, sm_90, compute_120")
    assert "torch==2.8.0" in found.fix


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((7, 0), ["sm_75", "sm_80"], False),
        ((7, 0), ["sm_70"], True),
        ((8, 6), ["sm_80"], True),  # code for 8.0 runs on 8.6
        ((8, 0), ["sm_86"], False),  # and not the other way round
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["sm_80", "compute_80"], True),  # PTX is compiled by the driver
        ((12, 0), ["sm_90a", "sm_120"], True),
        ((9, 1), ["sm_90a"], False),
        ((10, 0), ["sm_100f"], True),
        ((8, 9), ["compute_90"], False),
    ],
)
def test_builds_run_on_gpus_of_their_architectures(
    capability: tuple[int, int], architectures: list[str], runs: bool
) -> None:
    assert runs_on(capability, architectures) == runs


@pytest.mark.parametrize(("gpus", "state"), [(0, "note"), (1, "note"), (2, "missing")])
def test_torch_without_nccl(monkeypatch: pytest.MonkeyPatch, gpus: int, state: str) -> None:
    import torch

    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert look("NCCL").state == state


# FFCV and what it stands on.


@pytest.mark.parametrize(
    ("library", "content", "says"),
    [
        (None, b"", "its compiled library is missing"),
        ("_libffcv.cpython-38-x86_64-linux-gnu.so", b"", r"compiled for another Python: _libffcv\.cpython-38-.*"),
        (f"_libffcv{sysconfig.get_config_var('EXT_SUFFIX')}", b"cut short", "OSError: .*_libffcv.*"),
    ],
)
def test_ffcv_whose_library_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str | None, content: bytes, says: str
) -> None:
    (tmp_path / "ffcv").mkdir()
    (tmp_path / "ffcv/__init__.py").write_text("raise AssertionError('the doctor imported FFCV')")
    if library:
        (tmp_path / "ffcv" / library).write_bytes(content)
    monkeypatch.delitem(sys.modules, "ffcv", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    finding = look("FFCV")
    assert finding.state == "note"
    assert re.fullmatch(f"{says}; only widemix.ffcv and the benchmarks against FFCV need it", finding.text)
    assert re.fullmatch(f"{PIP} --force-reinstall --no-cache-dir --no-deps 'ffcv>=[0-9.]+'", finding.fix)


def test_opencv_without_the_systems_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cv2.py").write_text("raise ImportError('libGL.so.1: cannot open shared object file')")
    monkeypatch.delitem(sys.modules, "cv2", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert look("OpenCV").fix == "apt-get install --no-install-recommends libgl1 libglib2.0-0"


def test_deepspeed_without_ninja(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look("DeepSpeed").state == "ok"
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = look("DeepSpeed")
    assert finding.state == "note"
    assert re.fullmatch(f"{PIP} 'ninja>=[0-9.]+'", finding.fix)


# The command without the checks, and what all checks have in common.


def test_it_ends_with_1_if_training_cannot_run_and_names_all_that_is_in_its_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    checks = {
        "good": Check(lambda: Finding("found it")),
        "so so": Check(lambda: Finding("half of it", "note", "get more")),
        "for few": Check(lambda: Finding("none", "missing", "get it"), only_for="few need it"),
    }
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(doctor, "CHECKS", checks)
    assert doctor.run_doctor() == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    rows = ["ok good found it", "note so so half of it", "get more", "note for few none; few need it", "get it"]
    assert lines == ["state what found, and how to fix it", *rows, "", "Training can run here."]
    for name in ("first", "second"):
        checks[name] = Check(lambda: Finding("none", "missing"))
    assert doctor.run_doctor() == 1
    assert capsys.readouterr().out.endswith("\nTraining cannot run here before these are fixed: first, second.\n")


def test_a_check_is_silent_and_what_it_raises_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    """By the first line of what it says; then the log is as it was before."""

    def raises(error: Exception) -> Finding:
        warnings.warn("of what is imported", stacklevel=1)
        logging.getLogger("other").critical("of what is imported")
        raise error

    monkeypatch.setattr(logging.root.manager, "disable", logging.DEBUG)
    found = run_check(Check(lambda: raises(ValueError("\n no\nmore")), "timm"))
    assert (found.text, found.state) == ("ValueError: no", "missing")
    assert re.fullmatch(f"{PIP} --force-reinstall --no-cache-dir --no-deps 'timm>=[0-9.]+'", found.fix)
    assert run_check(Check(lambda: raises(OSError()))) == Finding("OSError: ", "missing")
    found = run_check(Check(lambda: raises(ModuleNotFoundError("No module named 'x'")), "timm", "few need it"))
    assert (found.text, found.state) == ("No module named 'x'; few need it", "note")
    assert re.fullmatch(f"{PIP} 'timm>=[0-9.]+'", found.fix)
    assert run_check(Check(lambda: Finding("a", "note", "b"), only_for="few")) == Finding("a", "note", "b")
    assert logging.root.manager.disable == logging.DEBUG
    assert (capsys.readouterr(), caplog.records) == (("", ""), [])


def test_commands_name_this_python_and_torch_with_its_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "a b/bin/python"))
    alone = f"'{tmp_path}/a b/bin/python' -m pip install"
    assert finding.install("x", "y z") == f"{alone} 'x' 'y z'"
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")  # whose path begins alike
    options = "--force-reinstall --no-cache-dir"
    assert finding.repair("x") == f"{alone} {options} --no-deps 'x'"
    monkeypatch.chdir(tmp_path)
    inside = "'a b/bin/python' -m pip install"
    assert finding.install("x") == f"{inside} 'x'"
    found = finding.repair("torch", "torchvision")
    assert re.fullmatch(f"{inside} {options} 'torch[<>][^ ]+' 'torchvision[<>][^ ]+'", found)


def test_requirements_are_those_of_this_platform_and_of_the_extra(tmp_path: Path, monkeypatch) -> None:
    lines = (
        "a>=1",
        "b; extra == 'more'",
        "c; extra == 'other'",
        "d; sys_platform == 'none'",
        "e; python_version > '3'",
    )
    install_metadata(tmp_path, "tiny", "1.0", *lines)
    monkeypatch.syspath_prepend(tmp_path)
    assert [r.name for r in finding.requirements("tiny")] == ["a", "e"]
    assert [r.name for r in finding.requirements("tiny", "more")] == ["a", "b", "e"]
    assert finding.requirements("nowhere-to-be-found") == []


@pytest.mark.parametrize(
    ("installed", "wanted", "unmet"),
    [("1.5", ">=1.5", ""), ("1.5", ">1.5", "found 1.5"), ("2.0.dev1", ">=1.9", ""), ("2.0+cu1", "==2.0", "")],
)
def test_a_requirement_is_met_by_versions_before_a_release_too(
    installed: str, wanted: str, unmet: str, tmp_path: Path, monkeypatch
) -> None:
    install_metadata(tmp_path, "tiny", installed)
    monkeypatch.syspath_prepend(tmp_path)
    assert software.unmet(Requirement(f"tiny{wanted}")) == unmet


def test_what_is_wrong_with_the_packages_is_told_once_by_each_requirement(monkeypatch) -> None:
    required = {
        "widemix": ["a>=2", "b", "c"],
        "a": ["x>=3"],
        "b": ["x>=3", "y<2"],
    }
    versions = {"a": "1.0", "b": "1.0", "c": "1.0", "x": "2.0", "y": "1.0"}
    wanted = {name: [Requirement(text) for text in texts] for name, texts in required.items()}
    monkeypatch.setattr(software, "requirements", lambda name: wanted.get(name, []))
    monkeypatch.setattr(software.importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(software.importlib.metadata, "PackageNotFoundError", KeyError)
    found = look("packages")
    assert (found.text, found.state) == ("widemix requires a>=2, found 1.0; b requires x>=3, found 2.0", "note")
    assert found.fix.endswith("install 'a>=2' 'x>=3'")
    del versions["c"]
    assert look("packages").state == "missing"
    versions |= {"a": "2.0", "c": "1.0", "x": "3.0"}
    assert look("packages") == Finding("3 requirements of widemix, and theirs, are met")
    wanted.clear()
    assert (look("packages").text, look("packages").state) == ("widemix itself is not installed", "note")


def test_torch_without_what_ranks_need(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.2")
    assert look("torch") == Finding(f"{torch.__version__}, built for CUDA 13.2")
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert (look("torch").text, look("torch").state) == (
        f"{torch.__version__}, built without torch.distributed",
        "missing",
    )
    assert "--no-deps" not in look("torch").fix


@pytest.mark.parametrize(
    ("driver", "built", "state"),
    [((12, 9), "13.0", "missing"), ((13, 0), "13.2", "ok"), ((14, 0), "13.2", "ok"), (None, "13.2", "note")],
)
def test_a_driver_supports_all_minor_versions_of_its_major_one(
    driver: tuple | None, built: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(software, "driver_cuda", lambda: driver)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    assert look("GPUs").state == state


def test_gpus_that_are_not_visible_and_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(software, "driver_cuda", lambda: (99, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (look("GPUs").state, look("GPUs").fix.partition(";")[0]) == ("note", "nvidia-smi")


def test_ffcv_without_distutils_and_turbojpeg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first left Python in 3.12."""
    find, library = software.importlib.util.find_spec, tmp_path / "lib.so"
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    finder = SimpleNamespace(find_spec=lambda name, folders: SimpleNamespace(origin=str(library)))
    monkeypatch.setattr(software, "PathFinder", finder)
    monkeypatch.setattr(software.ctypes, "CDLL", lambda name: loaded.append(name))
    monkeypatch.setattr(software.importlib.metadata, "version", lambda name: f"{name} 1.0")
    loaded: list[str] = []
    for absent, found in ((None, ("ffcv 1.0, its compiled library loads", "ok")),
                          ("distutils", ("imports distutils, which this Python lacks", "missing"))):  # fmt: skip
        specs = {"ffcv": package, "distutils": None if absent else package}
        monkeypatch.setattr(software.importlib.util, "find_spec", lambda name, specs=specs: specs.get(name) or None)
        finding = software.check_ffcv()
        assert (finding.text, finding.state) == found
    assert "'setuptools" in finding.fix
    assert loaded == [str(library)] * 2
    monkeypatch.setattr(software.importlib.util, "find_spec", find)

    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open\nmore")

    monkeypatch.setattr(software.ctypes, "CDLL", no_library)
    assert software.check_turbojpeg() == Finding(
        "libturbojpeg.so.0: cannot open", "missing", "apt-get install --no-install-recommends libturbojpeg0"
    )
    assert look("turbojpeg").state == "note"


def test_compiled_code_that_cannot_be_built_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    from widemix.native import BuildError, library

    def fails() -> None:
        raise BuildError("gcc: not found")

    monkeypatch.setattr(library, "open_library", lambda: None)
    monkeypatch.setattr(library, "description", lambda: "compiled for AVX2")
    assert look("native part") == Finding("compiled for AVX2")
    monkeypatch.setattr(library, "open_library", fails)
    found = look("native part")
    assert (found.state, found.fix) == ("note", "apt-get install --no-install-recommends gcc libjpeg-dev")
    assert found.text.startswith("gcc: not found: Pillow decodes instead")


def test_opencv_that_fails_otherwise_is_to_be_reinstalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cv2.py").write_text("raise ImportError('numpy is too new')")
    monkeypatch.delitem(sys.modules, "cv2", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    found = look("OpenCV")
    assert found.text.startswith("ImportError: numpy is too new; ")
    assert " --force-reinstall " in found.fix

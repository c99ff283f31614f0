"""The checks of `widemix doctor`, each on an installation that really has the fault wherever a test can cause it."""

import os
import re
import subprocess
import sys
import sysconfig
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from widemix.doctor import CHECKS, Finding, run_check, software
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
    ],
)
def test_builds_run_on_gpus_of_their_architectures(
    capability: tuple[int, int], architectures: list[str], runs: bool
) -> None:
    assert runs_on(capability, architectures) == runs


@pytest.mark.parametrize(("gpus", "state"), [(0, "note"), (2, "missing")])
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

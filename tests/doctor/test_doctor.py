"""`widemix doctor` on installations and machines that have a fault, or where the system says so."""

import logging
import os
import re
import resource
import subprocess
import sys
import sysconfig
import warnings
from collections import namedtuple
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchvision

from tests.conftest import System
from widemix.data.precision import SLOW, bf16_slowdown
from widemix.doctor import CHECKS, Check, Finding, run_check, run_doctor
from widemix.doctor.finding import install, repair
from widemix.versions import runs_on

PIP = r"\S*bin/python\S* -m pip install"
AGAIN = f"{PIP} --force-reinstall --no-cache-dir"
APT = "apt-get install --no-install-recommends"
FOR_FFCV = "; only widemix.ffcv and the benchmarks against FFCV need it"
GIB = 1 << 30


def check(what: str, text: str, state: str = "ok", fix: str = "") -> None:
    """Run a check of the command; text and fix are regular expressions."""
    found = run_check(CHECKS[what])
    assert found.state == state, found
    assert re.fullmatch(text, found.text), found
    assert re.fullmatch(fix, found.fix), found


def python(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | {"COLUMNS": "100"} | environ
    )


# The whole command.


@pytest.mark.long
def test_training_can_run_where_the_tests_run() -> None:
    run = python("import sys; from widemix.doctor import run_doctor; code = run_doctor()\n"
                 "assert 'ffcv' not in sys.modules; sys.exit(code)")  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr in ("", "importing what is installed, and timing the CPU: about half a minute\n")
    assert run.stdout.endswith("Training can run here.\n")
    assert max(map(len, run.stdout.splitlines())) <= 100
    for what in CHECKS:
        assert re.search(rf"^(ok|note) +{what} ", run.stdout, re.MULTILINE), what


def test_missing_packages_are_named_with_exit_code_1() -> None:
    blocked = ("torch", "torchvision", "cv2", "ffcv", "numba", "deepspeed", "timm", "torchmetrics")
    script = f"import sys; sys.modules.update(dict.fromkeys({blocked})); from widemix.doctor import run_doctor"
    run = python(f"{script}; sys.exit(run_doctor())")
    assert (run.returncode, run.stderr) == (1, "")
    missing = ("torch", "torchvision", "GPUs", "NCCL", "numba", "DeepSpeed", "timm", "torchmetrics", "TensorBoard")
    for state, names in {"missing": missing, "note": ("FFCV", "OpenCV"), "ok": ("disk",)}.items():
        for what in names:
            assert re.search(rf"^{state} +{what} ", run.stdout, re.MULTILINE), what
    assert " ".join(run.stdout.split()).endswith(", torchmetrics, TensorBoard.")


def test_the_table_has_a_row_a_check_and_a_verdict(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    checks = {
        "good": Check(lambda: Finding("found it")),
        "so so": Check(lambda: Finding("half of it", "note", "get more")),
        "for few": Check(lambda: Finding("none", "missing", "get it"), only_for="few need it"),
    }
    monkeypatch.setenv("COLUMNS", "100")
    assert run_doctor(checks) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    rows = ["ok good found it", "note so so half of it", "get more", "note for few none; few need it", "get it"]
    assert lines == ["state what found, and how to fix it", *rows, "", "Training can run here."]
    assert run_doctor(checks | dict.fromkeys(("first", "second"), Check(lambda: Finding("none", "missing")))) == 1
    assert capsys.readouterr().out.endswith("\nTraining cannot run here before these are fixed: first, second.\n")


@pytest.mark.parametrize(
    ("error", "package", "only_for", "text", "state", "fix"),
    [
        (ValueError("\n no\nmore"), "timm", "", "ValueError: no", "missing", f"{AGAIN} --no-deps 'timm>=[0-9.]+'"),
        (OSError(), "", "", "OSError: ", "missing", ""),
        (ModuleNotFoundError("No module named 'x'"), "timm", "few need it", "No module named 'x'; few need it",
         "note", f"{PIP} 'timm>=[0-9.]+'"),
    ],
)  # fmt: skip
def test_what_a_check_raises_is_a_finding_alone(error, package, only_for, text, state, fix, capsys, caplog) -> None:
    def run() -> Finding:
        warnings.warn("of what is imported", stacklevel=1)
        logging.getLogger("other").critical("of what is imported")
        raise error

    logging.disable(logging.DEBUG)
    try:
        found = run_check(Check(run, package, only_for))
        assert logging.root.manager.disable == logging.DEBUG
    finally:
        logging.disable(logging.NOTSET)
    assert (found.text, found.state) == (text, state)
    assert re.fullmatch(fix, found.fix)
    assert (capsys.readouterr(), caplog.records) == (("", ""), [])


def test_commands_name_this_python(system: System, monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()  # whose path begins like Python's
    options = "--force-reinstall --no-cache-dir"
    system({"sys.executable": str(tmp_path / "a b/bin/python")})
    for folder, name in ((tmp_path / "a", f"'{tmp_path}/a b/bin/python'"), (tmp_path, "'a b/bin/python'")):
        monkeypatch.chdir(folder)
        assert install("x", "y z") == f"{name} -m pip install 'x' 'y z'"
        assert repair("x") == f"{name} -m pip install {options} --no-deps 'x'"
        torch_too = f"{name} -m pip install {options} 'torch[<>][^ ]+' 'torchvision[<>][^ ]+'"
        assert re.fullmatch(torch_too, repair("torch", "torchvision"))


# Packages.

BROKEN = "raise ImportError('numpy is too new')"
UNLINKED = "raise ImportError('libGL.so.1: cannot open shared object file')"


@pytest.mark.parametrize(
    ("what", "module", "content", "state", "text", "fix"),
    [
        ("torch", "torch", None, "missing", ".*", f"{PIP} 'torch<[0-9.]+,>=[0-9.]+'"),
        ("FFCV", "ffcv", None, "note", f".*{FOR_FFCV}", f"{PIP} 'ffcv>=[0-9.]+'"),
        ("OpenCV", "cv2", None, "note", f".*{FOR_FFCV}", f"{PIP} 'opencv-python>=[0-9.]+'"),
        ("DeepSpeed", "deepspeed", None, "missing", ".*", f"{PIP} 'deepspeed<[0-9.]+,>=[0-9.]+'"),
        ("timm", "timm", None, "missing", ".*", f"{PIP} 'timm>=[0-9.]+'"),
        ("torchmetrics", "torchmetrics", None, "missing", ".*", f"{PIP} 'torchmetrics>=[0-9.]+'"),
        ("TensorBoard", "torch.utils.tensorboard", None, "missing", ".*", f"{PIP} 'tensorboard>=[0-9.]+'"),
        ("timm", "timm", "raise OSError('libgone.so.1: no\\nmore')", "missing", "OSError: libgone.so.1: no",
         f"{AGAIN} --no-deps 'timm>=[0-9.]+'"),
        ("OpenCV", "cv2", UNLINKED, "note", f"libGL.so.1: cannot .*{FOR_FFCV}", f"{APT} libgl1 libglib2.0-0"),
        ("OpenCV", "cv2", BROKEN, "note", f"ImportError: numpy is .*{FOR_FFCV}", f"{AGAIN} --no-deps 'opencv-.*'"),
    ],
)  # fmt: skip
def test_a_package_that_is_absent_or_breaks(
    what, module, content, state, text, fix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    if content:
        monkeypatch.delitem(sys.modules, module)
        (tmp_path / f"{module}.py").write_text(content)
        monkeypatch.syspath_prepend(tmp_path)
    check(what, text, state, fix)


@pytest.mark.parametrize(
    ("installed", "text", "state", "fix"),
    [
        ({"numpy 99.0": ()}, r".*numba requires numpy<[0-9.]+,>=[0-9.]+, found 99\.0.*", "note",
         r".*'numpy<[0-9.]+,>=[0-9.]+'.*"),
        ({"torchmetrics 99.0": ("nowhere>=3", "elsewhere; extra == 'more'")},
         "torchmetrics requires nowhere>=3, not installed", "missing", f"{PIP} 'nowhere>=3'"),
        # Each requirement once; those of another platform or extra not at all.
        ({"widemix 1": ("a>=2", "b", "c; extra == 'x'", "d; sys_platform == 'none'"), "a 1.0": ("x>=3",),
          "b 1.0": ("x>=3", "y<2", "z; python_version > '3'"), "x 2.0": (), "y 1.0": (), "z 1": ()},
         "widemix requires a>=2, found 1.0; b requires x>=3, found 2.0", "note", f"{PIP} 'a>=2' 'x>=3'"),
        ({"widemix 1": ("a>=2", "b"), "a 2.0": ("x>=3",), "b 1": (), "x 3.0": ()},
         "2 requirements of widemix, and theirs, are met", "ok", ""),
        # Versions before a release and of a build meet a requirement too.
        ({"widemix 1": ("a>=1.9", "b==2.0", "c>=1.5"), "a 2.0.dev1": (), "b 2.0+cu1": (), "c 1.5": ()},
         "3 requirements of widemix, and theirs, are met", "ok", ""),
        ({"widemix 1": ("c>1.5",), "c 1.5": ()}, "widemix requires c>1.5, found 1.5", "note", f"{PIP} 'c>1.5'"),
    ],
)  # fmt: skip
def test_requirements_are_met_by_what_is_installed(
    installed: dict, text: str, state: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package, requires in installed.items():
        name, version = package.split()
        metadata = tmp_path / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
        metadata.write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    check("packages", text, state, fix)


def test_packages_without_widemix_itself(system: System) -> None:
    def nothing(name: str) -> None:
        raise PackageNotFoundError(name)

    system({"importlib.metadata.requires": nothing})
    check("packages", "widemix itself is not installed", "note", f"{PIP} '-e' '.\\[dev]'")


@pytest.mark.parametrize(
    ("library", "text"),
    [
        (None, "its compiled library is missing"),
        ("_libffcv.cpython-38-x86_64-linux-gnu.so", r"compiled for another Python: _libffcv\.cpython-38-.*"),
        (f"_libffcv{sysconfig.get_config_var('EXT_SUFFIX')}", "OSError: .*_libffcv.*"),
    ],
)
def test_ffcv_without_a_usable_library(library: str | None, text: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "ffcv").mkdir()
    (tmp_path / "ffcv/__init__.py").write_text("raise AssertionError('the doctor imported FFCV')")
    if library:
        (tmp_path / "ffcv" / library).write_bytes(b"cut short")
    monkeypatch.delitem(sys.modules, "ffcv", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    check("FFCV", text + FOR_FFCV, "note", f"{AGAIN} --no-deps 'ffcv>=[0-9.]+'")


def test_ffcv_needs_distutils_and_turbojpeg(system: System, tmp_path: Path, monkeypatch) -> None:
    """Of which Python 3.12 has no more the first."""
    find, loaded = sys.modules["importlib.util"].find_spec, []
    (tmp_path / "ffcv").mkdir()
    for name in ("__init__.py", f"_libffcv{sysconfig.get_config_var('EXT_SUFFIX')}"):
        (tmp_path / "ffcv" / name).touch()
    monkeypatch.delitem(sys.modules, "ffcv", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    system({"ctypes.CDLL": loaded.append, "importlib.metadata.version": lambda name: f"{name} 1.0"})
    for has_distutils, expected in (
        (True, ("ffcv 1.0, its compiled library loads",)),
        (False, (f"imports distutils, which this Python lacks{FOR_FFCV}", "note", f"{PIP} 'setuptools>=[0-9]+'")),
    ):
        system({"importlib.util.find_spec": lambda name, here=has_distutils: find("os" if here else "ffcv_x")
                if name == "distutils" else find(name)})  # fmt: skip
        check("FFCV", *expected)
    assert len(loaded) == 2
    check("turbojpeg", "libturbojpeg.so.0 loads")

    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open\nmore")

    system({"ctypes.CDLL": absent})
    check("turbojpeg", f"libturbojpeg.so.0: cannot open{FOR_FFCV}", "note", f"{APT} libturbojpeg0")


def test_deepspeed_without_ninja(system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check("DeepSpeed", "[0-9.]+, with ninja, which builds its kernels")
    system({"sysconfig.get_path": lambda _: str(tmp_path)})
    monkeypatch.setenv("PATH", str(tmp_path))
    check("DeepSpeed", "[0-9.]+; without ninja its kernels cannot be built", "note", f"{PIP} 'ninja>=[0-9.]+'")


def test_compiled_code_that_cannot_be_built(tmp_path: Path) -> None:
    """Without a compiler, and with nothing that was compiled before."""
    script = "from widemix.doctor import *; print(*vars(run_check(CHECKS['native part'])).values(), sep='|')"
    text, state, fix = python(script, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path)).stdout.strip().split("|")
    assert text.endswith(": Pillow decodes instead, to the same pixels, 4 times slower")
    assert (state, fix) == ("note", f"{APT} gcc libjpeg-dev")
    check("native part", ".*libjpeg-turbo.*")


# torch and GPUs.

Device = namedtuple("Device", "name total_memory major minor")
H200, T4, V100 = Device("H200", 140 * GIB, 9, 0), Device("T4", 15 * GIB, 7, 5), Device("V100", 32 * GIB, 7, 0)
DRIVER = "the driver supports CUDA"
BARE = r", but no GPU is visible: training runs on the CPU"
TORCHES = f"{AGAIN} 'torch<[^ ]+' 'torchvision>[^ ]+'"


@pytest.mark.parametrize(
    ("driver", "built", "devices", "visible", "text", "state", "fix"),
    [
        (None, "13.2", (), None, "no NVIDIA driver: training runs on the CPU", "note", ""),
        (13020, None, (), None, f"{DRIVER} 13.2, torch is built without CUDA", "missing", TORCHES),
        (12090, "13.0", (H200,), None, f"{DRIVER} 12.9, torch is built for 13.0", "missing",
         f"install an NVIDIA driver for CUDA 13.0, or {PIP} 'torch==2.8.0' 'torchvision==0.23.0'"),
        (11080, "13.0", (H200,), None, f"{DRIVER} 11.8, torch is built for 13.0", "missing",
         "install an NVIDIA driver for CUDA 13.0"),
        (13000, "13.2", (H200,), None, f"1 x H200 .140 GiB.; {DRIVER} 13.0", "ok", ""),
        (14000, "13.2", (H200, H200, T4), None, f"2 x H200 .140 GiB., 1 x T4 .15 GiB.; {DRIVER} 14.0", "ok", ""),
        (99010, "13.2", (), None, f"{DRIVER} 99.1{BARE}", "note",
         "nvidia-smi; in a container: docker run --gpus all ..."),
        (99010, "13.2", (), "", f"{DRIVER} 99.1{BARE}", "note", "unset CUDA_VISIBLE_DEVICES"),
        (99010, "13.2", (H200, V100), None, "V100 is sm_70, torch .* is built for sm_75, sm_80, sm_90, compute_120",
         "missing", f"{PIP} 'torch==2.8.0' 'torchvision==0.23.0'"),
    ],
)  # fmt: skip
def test_gpus_their_driver_and_what_torch_is_built_for(
    driver, built, devices, visible, text, state, fix, system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    def library(name: str) -> SimpleNamespace:
        if driver is None:
            raise OSError(name)
        return SimpleNamespace(cuDriverGetVersion=lambda version: setattr(version._obj, "value", driver))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    system({
        "ctypes.CDLL": library,
        "torch.version.cuda": built,
        "torch.cuda.is_available": lambda: bool(devices),
        "torch.cuda.device_count": lambda: len(devices),
        "torch.cuda.get_device_properties": devices.__getitem__,
        "torch.cuda.get_arch_list": lambda: ["sm_75", "sm_80", "sm_90", "compute_120"],
    })  # fmt: skip
    check("GPUs", text, state, fix)


@pytest.mark.parametrize(
    ("what", "answers", "text", "state", "fix"),
    [
        ("torch", {"torch.version.cuda": "13.2"}, ".*, built for CUDA 13.2", "ok", ""),
        ("torch", {"torch.version.cuda": None}, ".*, built without CUDA: no GPU can be used", "note", TORCHES),
        ("torch", {"torch.distributed.is_available": lambda: False}, ".*, built without torch.distributed", "missing",
         f"{AGAIN} 'torch<[^ ]+'"),
        ("torchvision", {"torch.version.cuda": "13.2", "torchvision.version.cuda": 13020},
         ".*, built for the same CUDA", "ok", ""),
        ("torchvision", {"torch.version.cuda": "13.2", "torchvision.version.cuda": 11080},
         ".*, built for CUDA 11.8, torch for 13.2", "note", TORCHES),
        ("NCCL", {"torch.distributed.is_nccl_available": lambda: False, "torch.cuda.device_count": lambda: 1},
         "torch is built without NCCL", "note", f"{AGAIN} 'torch<[^ ]+'"),
        ("NCCL", {"torch.distributed.is_nccl_available": lambda: False, "torch.cuda.device_count": lambda: 2},
         "torch is built without NCCL", "missing", f"{AGAIN} 'torch<[^ ]+'"),
        ("NCCL", {"torch.distributed.is_nccl_available": lambda: True, "torch.cuda.nccl.version": lambda: (2, 27, 3)},
         "2.27.3", "ok", ""),
    ],
)  # fmt: skip
def test_how_torch_is_built(what, answers, text, state, fix, system: System) -> None:
    torchvision.version.cuda = getattr(torchvision.version, "cuda", None)  # some builds have none
    system(answers)
    check(what, text, state, fix)


def test_a_cpu_on_which_bf16_is_slow(system: System) -> None:
    now, seconds = [0.0], {torch.float32: 0.001, torch.bfloat16: 0.012}

    def linear(a: torch.Tensor, _: torch.Tensor) -> None:
        now[0] += seconds[a.dtype]

    threads = torch.get_num_threads()
    system({"torch.nn.functional.linear": linear, "time.perf_counter": lambda: now[0]})
    assert bf16_slowdown() == pytest.approx(12)
    assert torch.get_num_threads() == threads
    check("CPU", "a linear layer in bf16 takes 12 times as long as in fp32", "note", "train there in fp32")
    seconds[torch.bfloat16] = 0.001 * SLOW * (1 - 1e-6)
    check("CPU", f"a linear layer in bf16 takes {SLOW:.1f} times as long as in fp32")


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
def test_builds_run_on_gpus_of_their_architectures(capability, architectures, runs) -> None:
    assert runs_on(capability, architectures) == runs


# The machine, and what limits this process. Memory in GiB.


def free(gib: float) -> dict:
    return {"shutil.disk_usage": lambda _: namedtuple("usage", "free total")(int(gib * GIB), 9 * GIB)}


def cpus(allowed: int, every: int) -> dict:
    return {"os.sched_getaffinity": {0: set(range(allowed))}.__getitem__, "os.cpu_count": lambda: every}


def memory(gib: int) -> dict:
    return {"os.sysconf": {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": gib << 18}.__getitem__}


def open_files(limit: int) -> dict:
    return {"resource.getrlimit": {resource.RLIMIT_NOFILE: (limit, 1 << 20)}.__getitem__}


SHM = "docker run --shm-size=8g ..., or mount -o remount,size=8g /dev/shm"
WAIT = "more threads than the quota would wait"


@pytest.mark.parametrize(
    ("what", "answers", "cgroup", "text", "state", "fix"),
    [
        ("disk", free(1), {}, "1 GiB free in /.*", "ok", ""),
        ("disk", free(63 / 64), {}, "0.98 GiB free in /.*", "missing", "cd to a folder with 1 GiB free"),
        ("disk", {"os.access": lambda *_: False}, {}, "/.* cannot be written to", "missing",
         "cd to a folder that can be written to"),
        ("shared memory", {"os.path.isdir": lambda _: True} | free(1), {}, "1 GiB free in /dev/shm", "ok", ""),
        ("shared memory", {"os.path.isdir": lambda _: True} | free(63 / 64), {},
         "0.98 GiB free in /dev/shm: too little for several GPUs", "note", SHM),
        ("shared memory", {"os.path.isdir": lambda _: False}, {},
         "no /dev/shm: several GPUs of a machine cannot communicate by NCCL", "note", "mount /dev/shm"),
        ("CPUs", cpus(8, 8), {}, "8 of 8 allowed", "ok", ""),
        ("CPUs", cpus(8, 8), {"cpu.max": "800000 100000"}, "8 of 8 allowed, 8 by cgroup quota", "ok", ""),
        ("CPUs", cpus(8, 8), {"cpu.max": "350000 100000"}, f"8 of 8 allowed, 3.5 by cgroup quota: {WAIT}", "note",
         "--data.workers 3"),
        ("CPUs", cpus(1, 8), {"cpu.max": "50000 100000"}, f"1 of 8 allowed, 0.5 by cgroup quota: {WAIT}", "note",
         "--data.workers 1"),
        ("CPUs", cpus(4, 8), {}, "4 of 8 allowed", "note",
         "to allow more: srun --cpus-per-task=N, or docker run --cpus=N"),
        ("memory", memory(8), {}, "8 GiB", "ok", ""),
        ("memory", memory(8), {"memory.max": str(16 * GIB)}, "8 GiB", "ok", ""),
        ("memory", memory(8), {"memory.max": str(5 * GIB)}, "5 GiB by cgroup limit, of 8", "ok", ""),
        ("memory", memory(4), {}, "4 GiB", "ok", ""),
        ("memory", memory(8), {"memory.max": str(3 * GIB)}, "3 GiB by cgroup limit, of 8: too little for two ranks",
         "note", "train with one rank"),
        ("open files", open_files(-1), {}, "unlimited", "ok", ""),
        ("open files", open_files(1024), {}, "at most 1024", "ok", ""),
        ("open files", open_files(1023), {}, "at most 1023, which is low", "note", "ulimit -n 4096"),
    ],
)  # fmt: skip
def test_what_the_machine_allows(what, answers, cgroup, text, state, fix, system: System) -> None:
    read, given = Path.read_text, {"/proc/self/cgroup": "0::/job"}
    given |= {f"/sys/fs/cgroup/job/{name}": words for name, words in cgroup.items()}

    def read_text(path: Path, *rest: object) -> str:
        if str(path) in given:
            return given[str(path)]
        if str(path).startswith("/sys/fs/cgroup"):
            raise FileNotFoundError(path)
        return read(path, *rest)

    system(answers | {"pathlib.Path.read_text": read_text})
    check(what, text, state, re.escape(fix))

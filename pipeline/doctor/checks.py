"""The doctor's checks: Python and its packages; disk, memory and CPUs, within a container's or a Slurm job's limits.

FFCV itself is not imported, which would take seconds: loading its compiled library is test enough.
"""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path

from packaging.requirements import Requirement

from widemix.cgroups import allowed_cpus, cpu_quota, memory_limit, usable_cpus
from widemix.doctor.finding import APT, Check, Finding, first_line, install, repair, requirements
from widemix.versions import build_for, build_for_driver, runs_on

GIB = 1 << 30
ABSENT = "not installed"
FOR_FFCV = "only widemix.ffcv and the benchmarks against FFCV need it"


def check_python() -> Finding:
    """Report the version of Python."""
    return Finding(f"{platform.python_version()}, {sys.executable}")


def check_packages() -> Finding:
    """Check the versions that widemix requires, and those that its requirements require (numba of numpy, ...)."""
    ours = requirements("widemix")
    if not ours:
        return Finding("widemix itself is not installed", "note", install("-e", ".[dev]"))
    wrong = {
        str(r): f"{name} requires {r}, {installed}"
        for name in ("widemix", *(r.name for r in ours))
        for r in requirements(name)
        if (installed := unmet(r))
    }
    if wrong:
        absent = any(text.endswith(ABSENT) for text in wrong.values())
        return Finding("; ".join(wrong.values()), "missing" if absent else "note", install(*wrong))
    return Finding(f"{len(ours)} requirements of widemix, and theirs, are met")


def unmet(requirement: Requirement) -> str:
    """Return what is installed instead of a requirement; empty if it is met."""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT
    return "" if requirement.specifier.contains(version, prereleases=True) else f"found {version}"


def check_import(module: str, distribution: str) -> Finding:
    """Import a module and report the version of its distribution."""
    importlib.import_module(module)
    return Finding(importlib.metadata.version(distribution))


def check_torch() -> Finding:
    """Check that torch has CUDA and torch.distributed."""
    import torch

    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    if not torch.distributed.is_available():
        return Finding(f"{torch.__version__}, built without torch.distributed", "missing", repair("torch"))
    if not torch.version.cuda:
        return Finding(f"{torch.__version__}, {built}: no GPU can be used", "note", repair("torch", "torchvision"))
    return Finding(f"{torch.__version__}, {built}")


def check_torchvision() -> Finding:
    """Check that torchvision is built for the same CUDA as torch."""
    import torch
    import torchvision  # raises when its operators do not fit this torch

    number = getattr(torchvision.version, "cuda", None)  # 13020 is 13.2
    built = f"{number // 1000}.{number % 1000 // 10}" if number else None
    if built != torch.version.cuda:
        text = f"{torchvision.__version__}, built for CUDA {built}, torch for {torch.version.cuda}"
        return Finding(text, "note", repair("torch", "torchvision"))
    return Finding(f"{torchvision.__version__}, built for the same CUDA")


def driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA version that the NVIDIA driver supports; None without a driver."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return number.value // 1000, number.value % 1000 // 10


def check_gpus() -> Finding:
    """Check that the driver fits torch and that GPUs are visible."""
    import torch

    driver, built = driver_cuda(), torch.version.cuda
    if driver is None:
        return Finding("no NVIDIA driver: training runs on the CPU", "note")
    supported = f"the driver supports CUDA {driver[0]}.{driver[1]}"
    if not built:
        return Finding(f"{supported}, torch is built without CUDA", "missing", repair("torch", "torchvision"))
    if driver[0] < int(built.split(".")[0]):  # a driver supports every minor version of its major version
        build = build_for_driver(driver)
        older = f", or {install(*build.requirements)}" if build else ""
        fix = f"install an NVIDIA driver for CUDA {built}{older}"
        return Finding(f"{supported}, torch is built for {built}", "missing", fix)
    if not torch.cuda.is_available():
        hidden = "CUDA_VISIBLE_DEVICES" in os.environ
        fix = "unset CUDA_VISIBLE_DEVICES" if hidden else "nvidia-smi; in a container: docker run --gpus all ..."
        return Finding(f"{supported}, but no GPU is visible: training runs on the CPU", "note", fix)
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    built_for = torch.cuda.get_arch_list()
    for device in devices:
        if built_for and not runs_on((device.major, device.minor), built_for):
            kind = f"{device.name} is sm_{device.major}{device.minor}"
            text = f"{kind}, torch {torch.__version__} is built for {', '.join(built_for)}"
            build = build_for((device.major, device.minor))
            return Finding(text, "missing", install(*build.requirements) if build else "")
    names = [f"{device.name} ({device.total_memory / GIB:.0f} GiB)" for device in devices]
    listed = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return Finding(f"{listed}; {supported}")


def check_cpu() -> Finding:
    """Check whether the CPU multiplies bf16 at a speed that one can train with."""
    from widemix.data.precision import SLOW, bf16_slowdown

    slowdown = bf16_slowdown()
    if slowdown > SLOW:
        return Finding(
            f"a linear layer in bf16 takes {slowdown:.0f} times as long as in fp32", "note", "train there in fp32"
        )
    return Finding(f"a linear layer in bf16 takes {slowdown:.1f} times as long as in fp32")


def check_nccl() -> Finding:
    """Check that torch has NCCL."""
    import torch

    if not torch.distributed.is_nccl_available():
        several = torch.cuda.device_count() > 1
        return Finding("torch is built without NCCL", "missing" if several else "note", repair("torch"))
    return Finding(".".join(str(part) for part in torch.cuda.nccl.version()))


def check_ffcv() -> Finding:
    """Check that FFCV's compiled library is for this Python and loads."""
    package = importlib.util.find_spec("ffcv")
    if package is None or package.submodule_search_locations is None:
        return Finding(ABSENT, "missing", install("ffcv"))
    folders = list(package.submodule_search_locations)
    library = PathFinder.find_spec("ffcv._libffcv", folders)
    if library is None or library.origin is None:
        others = [path.name for folder in folders for path in Path(folder).glob("_libffcv*")]
        wanted = sysconfig.get_config_var("EXT_SUFFIX")
        text = (
            f"compiled for another Python: {others[0]}, not {wanted}" if others else "its compiled library is missing"
        )
        return Finding(text, "missing", repair("ffcv"))
    ctypes.CDLL(library.origin)  # the OSError names a library that it is linked to and that is missing
    if importlib.util.find_spec("distutils") is None:
        return Finding("imports distutils, which this Python lacks", "missing", install("setuptools"))
    return Finding(f"{importlib.metadata.version('ffcv')}, its compiled library loads")


def check_opencv() -> Finding:
    """Check that OpenCV imports."""
    try:
        return check_import("cv2", "opencv-python")
    except ImportError as error:
        if "shared object" not in str(error):
            raise
        return Finding(first_line(error), "missing", f"{APT} libgl1 libglib2.0-0")


def check_turbojpeg() -> Finding:
    """Check that libturbojpeg loads, which FFCV needs."""
    try:
        ctypes.CDLL("libturbojpeg.so.0")
    except OSError as error:
        return Finding(first_line(error), "missing", f"{APT} libturbojpeg0")
    return Finding("libturbojpeg.so.0 loads")


def check_native() -> Finding:
    """Check that the compiled code is there, or can be compiled."""
    from widemix.native import BuildError
    from widemix.native.library import description, open_library

    try:
        open_library()
        return Finding(description())
    except BuildError as error:
        return Finding(
            f"{error}: Pillow decodes instead, to the same pixels, 4 times slower", "note", f"{APT} gcc libjpeg-dev"
        )


def check_deepspeed() -> Finding:
    """Check that DeepSpeed imports and can build its kernels."""
    version = check_import("deepspeed", "deepspeed").text
    if shutil.which("ninja", path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}"):
        return Finding(f"{version}, with ninja, which builds its kernels")
    return Finding(f"{version}; without ninja its kernels cannot be built", "note", install("ninja"))


def check_disk() -> Finding:
    """Check that the current folder can be written and has 1 GiB free."""
    free = shutil.disk_usage(".").free
    if not os.access(".", os.W_OK):
        return Finding(f"{os.getcwd()} cannot be written to", "missing", "cd to a folder that can be written to")
    if free < GIB:
        return Finding(f"{free / GIB:.2f} GiB free in {os.getcwd()}", "missing", "cd to a folder with 1 GiB free")
    return Finding(f"{free / GIB:.0f} GiB free in {os.getcwd()}")


def check_shared_memory(folder: str = "/dev/shm") -> Finding:
    """Check that /dev/shm has the 1 GiB that NCCL needs for several GPUs."""
    if not os.path.isdir(folder):
        return Finding(
            f"no {folder}: several GPUs of a machine cannot communicate by NCCL", "note", f"mount {folder}"
        )
    free = shutil.disk_usage(folder).free
    if free < GIB:  # Docker's default of 64 MiB is too small for NCCL
        text = f"{free / GIB:.2f} GiB free in {folder}: too little for several GPUs"
        return Finding(text, "note", "docker run --shm-size=8g ..., or mount -o remount,size=8g /dev/shm")
    return Finding(f"{free / GIB:.0f} GiB free in {folder}")


def check_cpus() -> Finding:
    """Check which CPUs this process may use, and its cgroup quota."""
    allowed, every, quota = allowed_cpus(), os.cpu_count() or 1, cpu_quota()
    text = f"{allowed} of {every} allowed" + (f", {quota:g} by cgroup quota" if quota else "")
    if quota and quota < allowed:
        return Finding(f"{text}: more threads than the quota would wait", "note", f"--data.workers {usable_cpus()}")
    if allowed < every:
        return Finding(text, "note", "to allow more: srun --cpus-per-task=N, or docker run --cpus=N")
    return Finding(text)


def check_memory() -> Finding:
    """Check that memory is enough for two ranks."""
    total, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), memory_limit()
    usable = min(total, limit or total)
    text = f"{usable / GIB:.0f} GiB" + (f" by cgroup limit, of {total / GIB:.0f}" if usable < total else "")
    if usable < 4 * GIB:  # a rank takes 1 GiB before the first image
        return Finding(f"{text}: too little for two ranks", "note", "train with one rank")
    return Finding(text)


def check_open_files() -> Finding:
    """Check the limit of open files."""
    if importlib.util.find_spec("resource") is None:
        return Finding("this system has no such limit")
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= limit < 1024:  # RLIM_INFINITY is -1
        return Finding(f"at most {limit}, which is low", "note", "ulimit -n 4096")
    return Finding("unlimited" if limit < 0 else f"at most {limit}")


CHECKS = {
    "Python": Check(check_python),
    "packages": Check(check_packages),
    "torch": Check(check_torch, "torch"),
    "torchvision": Check(check_torchvision, "torchvision"),
    "GPUs": Check(check_gpus, "torch"),
    "CPU": Check(check_cpu, "torch"),
    "NCCL": Check(check_nccl, "torch"),
    "FFCV": Check(check_ffcv, "ffcv", FOR_FFCV),
    "OpenCV": Check(check_opencv, "opencv-python", FOR_FFCV),
    "turbojpeg": Check(check_turbojpeg, only_for=FOR_FFCV),
    "native part": Check(check_native),
    "numba": Check(lambda: check_import("numba", "numba"), "numba"),
    "DeepSpeed": Check(check_deepspeed, "deepspeed"),
    "timm": Check(lambda: check_import("timm", "timm"), "timm"),
    "torchmetrics": Check(lambda: check_import("torchmetrics", "torchmetrics"), "torchmetrics"),
    "TensorBoard": Check(lambda: check_import("torch.utils.tensorboard", "tensorboard"), "tensorboard"),
    "disk": Check(check_disk),
    "shared memory": Check(check_shared_memory),
    "CPUs": Check(check_cpus),
    "memory": Check(check_memory),
    "open files": Check(check_open_files),
}

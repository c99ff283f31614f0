"""The doctor's checks of Python and its packages. FFCV itself is never imported: that takes seconds, and its compiled
library tells as much."""

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

from pipeline.doctor.finding import APT, Check, Finding, first_line, install, repair, requirements

GIB = 1 << 30
ABSENT = "not installed"


def check_python() -> Finding:
    return Finding(f"{platform.python_version()}, {sys.executable}")


def check_packages() -> Finding:
    """Versions: what widemix asks for, and what each of those asks for in its turn (numba of numpy, ...)."""
    ours = requirements("widemix")
    if not ours:
        return Finding("widemix itself is not installed", "note", install("-e", ".[dev]"))
    askers = ["widemix", *(r.name for r in ours)]
    wrong = {
        str(r): f"{asker} wants {r}, {has}" for asker in askers for r in requirements(asker) if (has := unmet(r))
    }
    if wrong:
        absent = any(text.endswith(ABSENT) for text in wrong.values())
        return Finding("; ".join(wrong.values()), "missing" if absent else "note", install(*wrong))
    return Finding(f"widemix's {len(ours)} and theirs have the versions asked for")


def unmet(requirement: Requirement) -> str:
    """What there is instead of what is asked for; empty when it fits."""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT
    return "" if requirement.specifier.contains(version, prereleases=True) else f"found {version}"


def check_import(module: str, distribution: str) -> Finding:
    importlib.import_module(module)
    return Finding(importlib.metadata.version(distribution))


def check_torch() -> Finding:
    import torch

    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    if not torch.distributed.is_available():
        return Finding(f"{torch.__version__}, built without torch.distributed", "missing", repair("torch"))
    if not torch.version.cuda:
        return Finding(f"{torch.__version__}, {built}: no GPU can be used", "note", repair("torch", "torchvision"))
    return Finding(f"{torch.__version__}, {built}")


def check_torchvision() -> Finding:
    import torch
    import torchvision  # raises when its operators do not fit this torch

    number = getattr(torchvision.version, "cuda", None)  # 13020 is 13.2
    built = f"{number // 1000}.{number % 1000 // 10}" if number else None
    if built != torch.version.cuda:
        found = f"{torchvision.__version__}, built for CUDA {built}, torch for {torch.version.cuda}"
        return Finding(found, "note", repair("torch", "torchvision"))
    return Finding(f"{torchvision.__version__}, built for the same CUDA")


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version that the NVIDIA driver runs; None without a driver."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return number.value // 1000, number.value % 1000 // 10


def check_gpus() -> Finding:
    import torch

    driver, built = driver_cuda(), torch.version.cuda
    if driver is None:
        return Finding("no NVIDIA driver: training runs on the CPU", "note")
    has = f"the driver runs CUDA {driver[0]}.{driver[1]}"
    if not built:
        found = f"{has}, torch is built without CUDA"
        return Finding(found, "missing", repair("torch", "torchvision"))
    if driver[0] < int(built.split(".")[0]):  # a driver runs every minor version of its major one
        return Finding(f"{has}, torch is built for {built}", "missing", f"install an NVIDIA driver for CUDA {built}")
    if not torch.cuda.is_available():
        hidden = "CUDA_VISIBLE_DEVICES" in os.environ
        cure = "unset CUDA_VISIBLE_DEVICES" if hidden else "nvidia-smi; in a container: docker run --gpus all ..."
        return Finding(f"{has}, but no GPU is visible: training runs on the CPU", "note", cure)
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = [f"{device.name} ({device.total_memory / GIB:.0f} GiB)" for device in devices]
    listed = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return Finding(f"{listed}; {has}")


def check_nccl() -> Finding:
    import torch

    if not torch.distributed.is_nccl_available():
        several = torch.cuda.device_count() > 1
        return Finding("torch is built without it", "missing" if several else "note", repair("torch"))
    return Finding(".".join(str(part) for part in torch.cuda.nccl.version()))


def check_ffcv() -> Finding:
    package = importlib.util.find_spec("ffcv")
    if package is None or package.submodule_search_locations is None:
        return Finding(ABSENT, "missing", install("ffcv"))
    places = list(package.submodule_search_locations)
    library = PathFinder.find_spec("ffcv._libffcv", places)
    if library is None or library.origin is None:
        others = [path.name for place in places for path in Path(place).glob("_libffcv*")]
        wanted = sysconfig.get_config_var("EXT_SUFFIX")
        found = (
            f"compiled for another Python: {others[0]}, not {wanted}" if others else "its compiled library is missing"
        )
        return Finding(found, "missing", repair("ffcv"))
    ctypes.CDLL(library.origin)  # OSError names the library that it was linked to and that is gone
    if importlib.util.find_spec("distutils") is None:
        return Finding("imports distutils, which this Python lacks", "missing", install("setuptools"))
    return Finding(f"{importlib.metadata.version('ffcv')}, its compiled library loads")


def check_opencv() -> Finding:
    try:
        return check_import("cv2", "opencv-python")
    except ImportError as error:
        if "shared object" not in str(error):
            raise
        return Finding(first_line(error), "missing", f"{APT} libgl1 libglib2.0-0")


def check_turbojpeg() -> Finding:
    try:
        ctypes.CDLL("libturbojpeg.so.0")
    except OSError as error:
        return Finding(first_line(error), "missing", f"{APT} libturbojpeg0")
    return Finding("libturbojpeg.so.0 loads")


def check_native() -> Finding:
    from pipeline.native import BuildError
    from pipeline.native.library import open_library

    try:
        return Finding(f"built, with {open_library().jpeg_library().decode()}")
    except BuildError as error:
        return Finding(f"{error}: Pillow decodes, the same but slower", "note", f"{APT} gcc libjpeg-dev")


def check_deepspeed() -> Finding:
    found = check_import("deepspeed", "deepspeed").found
    if shutil.which("ninja", path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}"):
        return Finding(f"{found}, ninja for its own kernels")
    return Finding(f"{found}; no ninja, its own kernels cannot be built", "note", install("ninja"))


CHECKS = {
    "Python": Check(check_python),
    "packages": Check(check_packages),
    "torch": Check(check_torch, "torch"),
    "torchvision": Check(check_torchvision, "torchvision"),
    "GPUs": Check(check_gpus, "torch"),
    "NCCL": Check(check_nccl, "torch"),
    "FFCV": Check(check_ffcv, "ffcv"),
    "OpenCV": Check(check_opencv, "opencv-python"),
    "turbojpeg": Check(check_turbojpeg),
    "native part": Check(check_native),
    "numba": Check(lambda: check_import("numba", "numba"), "numba"),
    "DeepSpeed": Check(check_deepspeed, "deepspeed"),
    "timm": Check(lambda: check_import("timm", "timm"), "timm"),
    "torchmetrics": Check(lambda: check_import("torchmetrics", "torchmetrics"), "torchmetrics"),
    "TensorBoard": Check(lambda: check_import("torch.utils.tensorboard", "tensorboard"), "tensorboard"),
}

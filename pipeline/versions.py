"""Which versions of torch run on which GPUs, and which Pillow has our pixels: what the doctor advises and pages say.

Tested from `OLDEST` up to, but not including, `END`. No torch is imported here.
"""

from collections.abc import Sequence
from importlib.metadata import version
from typing import NamedTuple

import PIL
from packaging.version import Version

OLDEST, END = "2.8", "2.16"
# torchrun has --signals-to-handle and --shutdown-timeout; launch/torchrun.py does the same with an older one.
TORCHRUN_STOPS_RANKS = "2.12"


class Build(NamedTuple):
    """A version of torch on PyPI: the CUDA and the GPUs, by compute capability, that its wheel is built for."""

    torch: str
    torchvision: str
    cuda: str
    gpus: tuple[str, ...]

    @property
    def requirements(self) -> tuple[str, str]:
        """The arguments of pip."""
        return f"torch=={self.torch}", f"torchvision=={self.torchvision}"


# By `torch._C._cuda_getArchFlags()` of the wheels; the last one is that of the container's lock.
BUILDS = (
    Build("2.8.0", "0.23.0", "12.8", ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")),
    Build("2.15.0", "0.29.2", "13.2", ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")),
)


def build_for(capability: tuple[int, int]) -> Build | None:
    """Return the newest build that runs on a GPU of this compute capability, such as (7, 0); None if none does."""
    return next((build for build in reversed(BUILDS) if runs_on(capability, build.gpus)), None)


def build_for_driver(cuda: tuple[int, int]) -> Build | None:
    """Return the newest build that runs with a driver for this version of CUDA; None if none does."""
    return next((build for build in reversed(BUILDS) if int(build.cuda.split(".")[0]) <= cuda[0]), None)


def runs_on(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether a GPU of this compute capability runs a build for `architectures`, such as sm_75 or compute_90.

    Machine code (sm) runs on later minor versions of its major version, PTX (compute) on all later GPUs.
    """
    for kind, _, number in (name.partition("_") for name in architectures):
        digits = number.rstrip("af")  # sm_90a runs on 9.0 alone
        built = int(digits[:-1]), int(digits[-1])
        machine_code = capability == built if digits != number else built[0] == capability[0] and built <= capability
        if built <= capability if kind == "compute" else machine_code:
            return True
    return False


def torch_is_at_least(oldest: str) -> bool:
    """Whether the installed torch is this version or a newer one."""
    return Version(version("torch")).release >= Version(oldest).release


def table() -> str:
    """Return the builds as a Markdown table."""
    rows = ["| torch | CUDA | GPUs | torchrun waits while ranks save |", "|---|---|---|---|"]
    for build in BUILDS:
        gpus = ", ".join(build.gpus)
        own = Version(build.torch) >= Version(TORCHRUN_STOPS_RANKS)
        waits = "by its own options" if own else "by what `launch/torchrun.py` adds"
        rows.append(f"| {build.torch} | {build.cuda} | {gpus} | {waits} |")
    return "\n".join(rows)


def older_pillow() -> str | None:
    """Return the version of a Pillow whose `resize` gives other pixels than Pillow 13's; else None.

    Decoding, drafts, colours, rotation and blur are the same from Pillow 11 on.
    """
    return PIL.__version__ if int(PIL.__version__.partition(".")[0]) < 13 else None

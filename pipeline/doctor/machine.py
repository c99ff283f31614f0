"""The doctor's checks of the machine: disk, memory and CPUs, within the limits of a container or a Slurm job."""

import importlib.util
import os
import shutil

from widemix.cgroups import allowed_cpus, cpu_quota, memory_limit, usable_cpus
from widemix.doctor.finding import Check, Finding

GIB = 1 << 30


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
    "disk": Check(check_disk),
    "shared memory": Check(check_shared_memory),
    "CPUs": Check(check_cpus),
    "memory": Check(check_memory),
    "open files": Check(check_open_files),
}

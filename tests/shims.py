"""Disks that tests can't mount: a limit of the sizes of files, and libraries for LD_PRELOAD."""

import functools
import resource
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCES = {
    # Each process has every lock, as on machines whose locks hold on no other (Lustre's localflock).
    "no_locks": "int flock(int file, int operation) { return 0; }",
    # Flushing takes SLOW_S seconds.
    "slow_fsync": """
        #include <stdlib.h>
        #include <unistd.h>
        int fsync(int file) { usleep(1e6 * atof(getenv("SLOW_S"))); return 0; }
    """,
    # Below FAILING nothing can be written once FAILS_IF exists: errno is ERRNO.
    "failing_disk": """
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <errno.h>
        #include <stdio.h>
        #include <stdlib.h>
        #include <string.h>
        #include <unistd.h>
        static int fails(int file) {
            char link[64], path[4096];
            snprintf(link, sizeof link, "/proc/self/fd/%d", file);
            ssize_t size = readlink(link, path, sizeof path - 1);
            path[size > 0 ? size : 0] = 0;
            const char *folder = getenv("FAILING");
            if (strncmp(path, folder, strlen(folder)) || access(getenv("FAILS_IF"), F_OK)) return 0;
            errno = atoi(getenv("ERRNO"));
            return 1;
        }
        ssize_t write(int file, const void *data, size_t size) {
            static ssize_t (*real)(int, const void *, size_t);
            if (!real) real = dlsym(RTLD_NEXT, "write");
            return fails(file) ? -1 : real(file, data, size);
        }
        int fsync(int file) {
            static int (*real)(int);
            if (!real) real = dlsym(RTLD_NEXT, "fsync");
            return fails(file) ? -1 : real(file);
        }
    """,
}


@contextmanager
def disk_of(most: int) -> Iterator[None]:
    """In this block no file takes a byte beyond the first `most`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="shims-")


@functools.cache
def preload(name: str) -> dict[str, str]:
    """The variable with which a process that is started has this disk."""
    library = Path(_folder().name, f"{name}.so")
    words = ["cc", "-shared", "-fPIC", "-o", library, "-x", "c", "-", "-ldl"]
    subprocess.run(words, input=SOURCES[name], text=True, check=True)
    return {"LD_PRELOAD": str(library)}

"""Where ranks on several nodes keep what they compile: on each node's own disk.

The home folder, where Triton and numba keep it by default, is often one shared disk, on which all ranks of a job
read, write and rename the same files at once.
"""

import os
import re
import shutil
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from widemix.distributed.launchers import read_place
from widemix.errors import InputError
from widemix.files import check_ours, private_folder, wait_for_lock
from widemix.native.build import home_cache

_FOLDERS = {"NUMBA_CACHE_DIR": "numba", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
# The same after a requeue, before what differs then.
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID")


def use_node_caches(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables of the caches, but those that are set, to a folder on this node's disk named after the job.

    To be called before numba and torch are imported. One rank of a node fills the folder with what numba has compiled
    for this user before, while the others wait; it stays for the job's next start. Changes nothing where all ranks
    are on one machine, or the temporary folder is not safe from other users.
    """
    place = read_place(environ)
    if place.world == place.local_world:
        return
    job = re.sub(r"[^\w.-]", "_", next((environ[name] for name in _JOBS if environ.get(name)), "job"))
    try:
        folder = private_folder(Path(tempfile.gettempdir()), code=True) / f"caches-{job}"
        folder.mkdir(0o700, exist_ok=True)
        check_ours(folder)
        if "NUMBA_CACHE_DIR" not in environ:
            _fill_once(folder / "numba")
    except (OSError, InputError):
        return
    for name, kind in _FOLDERS.items():
        environ.setdefault(name, str(folder / kind))


def _fill_once(target: Path) -> None:
    """Copy what numba has compiled, for this user and in the job before on this node, unless another process has.

    The folder appears whole.
    """
    with (target.parent / ".lock").open("a") as lock:
        wait_for_lock(lock.fileno())
        if target.exists():
            return
        unfinished = target.with_name("numba.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
        unfinished.mkdir()
        before = sorted(target.parents[1].glob("caches-*/numba"), key=lambda path: path.stat().st_mtime)[-1:]
        for source in (path for place in (home_cache() or unfinished, *before) for path in place.glob("numba-*")):
            with suppress(OSError):  # a file that another job has just replaced; numba compiles what is missing
                shutil.copytree(source, unfinished / source.name, dirs_exist_ok=True)
        unfinished.rename(target)

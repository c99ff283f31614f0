"""mpirun and DeepSpeed's launcher over ssh, between two hosts with an sshd each."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, SMALL, train_lines
from tests.end_to_end.test_train import EPOCHS, assert_same_curve
from tests.launch.hosts import Hosts, missing
from tests.launch.test_slurm import undisturbed  # noqa: F401

_ABSENT = [
    name for name in ("sshd", "mpirun", "pdsh") if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
]
REASON = f"{_ABSENT} not installed: apt-get install openssh-server openmpi-bin pdsh" if _ABSENT else missing()
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(REASON), reason=REASON)]
PORT = 2222


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Two hosts that let each other in, and `ssh` first in PATH with the key."""
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f", folder / name], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    (folder / "sshd").write_text(
        f"Port {PORT}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\nStrictModes no\nUsePAM no\n"
        "PidFile none\nPermitRootLogin prohibit-password\nPermitUserEnvironment no\n"
    )
    (folder / "client").write_text(
        f"Port {PORT}\nIdentityFile {folder}/user\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n"
        "LogLevel ERROR\n"
    )
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/client "$@"\n')
    ssh.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)  # where it locks itself in
    found = Hosts(2)
    found.path = f"{ssh.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    for host in range(2):
        found.start(host, "/usr/sbin/sshd", "-D", "-e", "-f", folder / "sshd", log=folder / f"sshd-{host}.log")
    yield found
    found.stop()


def train(digits, run: Path) -> list[str]:
    words = ("recipes/digits/rp_mixer.yaml", "--run-dir", run, "--data.path", digits, *SMALL, *EPOCHS)
    return list(map(str, words))


def finish(process: subprocess.Popen, log: Path, code: int = 0) -> None:
    try:
        assert process.wait(900) == code, log.read_text()
    finally:
        process.kill()


def environment(hosts) -> dict[str, str]:
    return {"PATH": hosts.path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def mpirun(hosts, folder: Path, digits, run: Path) -> subprocess.Popen:
    hostfile = folder / "hosts"
    hostfile.write_text("".join(f"{hosts.address(i)} slots=2\n" for i in range(2)))
    network = ("--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0")
    passed = [word for name in ("PYTHONPATH", "OMP_NUM_THREADS") for word in ("-x", name)]
    command = (
        *("mpirun", "--allow-run-as-root", "--hostfile", hostfile),
        *("-np", "4", "--map-by", "ppr:2:node", "--bind-to", "none"),
        *(*network, *passed, "-x", f"MASTER_ADDR={hosts.address(0)}"),
        *(sys.executable, "-m", "widemix", "train", *train(digits, run)),
    )
    return hosts.start(0, *command, log=folder / "log", **environment(hosts))


def test_mpirun_over_two_hosts_goes_on_after_a_signal(hosts, digits, undisturbed, tmp_path):  # noqa: F811
    run, log = tmp_path / "run", tmp_path / "log"
    process = mpirun(hosts, tmp_path, digits, run)
    deadline = time.monotonic() + 600
    while not any(line["step"] >= 15 for line in train_lines(run)):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    finish(process, log, 75)
    finish(mpirun(hosts, tmp_path, digits, run), log)
    assert "steps on 4 ranks" in log.read_text()
    assert "/checkpoints/" in log.read_text()
    assert_same_curve(run, undisturbed, 1e-4)


def test_deepspeeds_launcher_over_two_hosts(hosts, digits, undisturbed, tmp_path):  # noqa: F811
    run, log, hostfile = tmp_path / "run", tmp_path / "log", tmp_path / "hosts"
    hostfile.write_text("".join(f"{hosts.address(i)} slots=1\n" for i in range(2)))
    command = (
        *("deepspeed", "--hostfile", hostfile, "--master_addr", hosts.address(0), "--module"),
        *("widemix", "train", *train(digits, run), "--engine.kind", "deepspeed"),
    )
    finish(hosts.start(0, *command, log=log, **environment(hosts)), log)
    assert "for 88 steps on 2 ranks" in log.read_text()
    assert_same_curve(run, undisturbed, 1e-4)

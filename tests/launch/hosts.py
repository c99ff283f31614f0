"""Hosts on this machine: network namespaces joined by a bridge, each with a host name that nobody can resolve.

Host i is 10.77.0.(10 + i).
"""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil


def missing() -> str:
    """Return why hosts cannot be created here, or an empty string."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "ip is not installed: apt-get install iproute2"
    name = f"wm{os.getpid()}t"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return done.stderr.strip()


class Hosts:
    """`count` hosts and the network between them."""

    def __init__(self, count: int):
        self.names = [f"wm{os.getpid()}n{i}" for i in range(count)]
        self.switch = f"wm{os.getpid()}s"
        self.started: list[subprocess.Popen] = []
        _ip("netns", "add", self.switch)
        self._in_switch("link", "add", "br0", "type", "bridge")
        self._in_switch("link", "set", "br0", "up")
        for i, name in enumerate(self.names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"p{i}", "netns", self.switch)
            self._in_switch("link", "set", f"p{i}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{10 + host}"

    def on(self, host: int, *command: str | Path) -> list[str]:
        """The command that runs `command` on a host."""
        inside = ["nsenter", f"--net=/run/netns/{self.names[host]}", "unshare", "--uts"]
        return [*inside, "sh", "-c", 'hostname "$0"; exec "$@"', f"odd-{host}.nowhere", *map(str, command)]

    def start(self, host: int, *command: str | Path, log: Path, **environ: str) -> subprocess.Popen:
        with log.open("a") as file:
            process = subprocess.Popen(
                self.on(host, *command), env=os.environ | environ, stdout=file, stderr=file, start_new_session=True
            )
        self.started.append(process)
        return process

    def cut(self, host: int) -> None:
        """Cut the host's network."""
        self._in_switch("link", "set", f"p{host}", "down")

    def mend(self, host: int) -> None:
        """Join what `cut` has cut."""
        self._in_switch("link", "set", f"p{host}", "up")

    def kill(self, *hosts: int) -> None:
        """Every process on these hosts at once, as a power cut does."""
        _kill_within([self.names[host] for host in hosts])

    def stop(self) -> None:
        _kill_within([*self.names, self.switch])
        for process in self.started:
            process.wait()
        for name in (*self.names, self.switch):
            _ip("netns", "del", name)

    def _in_switch(self, *words: str) -> None:
        _ip("-n", self.switch, *words)


def _kill_within(names: list[str]) -> None:
    inside = [os.stat(f"/run/netns/{name}").st_ino for name in names]
    for process in psutil.process_iter():
        try:
            if os.stat(f"/proc/{process.pid}/ns/net").st_ino in inside:
                process.send_signal(signal.SIGKILL)
        except (OSError, psutil.Error):
            continue


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)

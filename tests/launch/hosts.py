"""Hosts on this machine: network namespaces joined by a bridge, each with a host name that nobody can resolve.

Host i is 10.77.0.(10 + i) and fd77::(10 + i). `Hosts.lossy` puts a forwarder between a host and the bridge that
delays and drops frames, as `tc netem` does, which not every kernel has.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil

PROXY = Path(__file__).with_name("lossy_link.py")


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

    def __init__(self, count: int, only_ipv6: bool = False):
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
            if not only_ipv6:
                _ip("-n", name, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
            _ip("-n", name, "addr", "add", f"{self.address6(i)}/64", "dev", "eth0", "nodad")
            _ip("-n", name, "link", "set", "eth0", "up")

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{10 + host}"

    @staticmethod
    def address6(host: int) -> str:
        return f"fd77::{10 + host}"

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

    def limit(self, host: int, kbit: int) -> None:
        """From now on the host sends and receives no more than so many kbit/s."""
        for place, device in ((self.names[host], "eth0"), (self.switch, f"p{host}")):
            rate = ("rate", f"{kbit}kbit", "burst", "16kb", "latency", "400ms")
            subprocess.run(["tc", "-n", place, "qdisc", "add", "dev", device, "root", "tbf", *rate], check=True)

    def lossy(self, host: int, delay_ms: float, loss: float) -> None:
        """From now on the host's frames take `delay_ms` longer each way, and a fraction of them is lost."""
        self._in_switch("link", "set", f"p{host}", "nomaster")
        self._in_switch("link", "add", f"a{host}", "type", "veth", "peer", "name", f"b{host}")
        self._in_switch("link", "set", f"a{host}", "master", "br0", "up")
        self._in_switch("link", "set", f"b{host}", "up")
        words = (sys.executable, PROXY, f"p{host}", f"b{host}", str(delay_ms), str(loss))
        self.started.append(subprocess.Popen(["nsenter", f"--net=/run/netns/{self.switch}", *map(str, words)]))

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

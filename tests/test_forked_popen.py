"""What `tests.forked_popen` starts is a process as subprocess starts it: exit code, streams, files, signals."""

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.forked_popen import ForkedPopen
from tests.forks import Forks
from widemix.processes import end_with_parent

WIDEMIX = [sys.executable, "-m", "widemix"]
COMMANDS = {"done": ["--version"], "refused": ["train", "no/such.yaml"], "fails": ["eval", "nowhere", "--json", "/"]}


def find_out() -> None:
    """In place of the command: print how this process finds itself."""
    files = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")[:-1] if int(name) > 2}
    found = {"pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "folder": os.getcwd()}
    found |= {"input": input(), "environ": dict(os.environ), "words": sys.argv[1:], "files": sorted(files)}
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    found["signals"] = [str(signal.getsignal(number)) for number in numbers]
    found["blocked"] = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    print(json.dumps(found))
    print("to stderr", file=sys.stderr)
    sys.exit(7)


def start_one(folder: str) -> None:
    """In a fork: start another that finds itself out, and write what it finds."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    runpy.run_module = lambda *_, **__: find_out()  # type: ignore[assignment]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    place = {"cwd": folder, "env": {"ONLY": "this"}, "start_new_session": True, "preexec_fn": end_with_parent()}
    with open(f"{folder}/held", "w"), ForkedPopen([*WIDEMIX, "a", "b"], text=True, **pipes, **place) as process:
        out, err = process.communicate("given\n", timeout=300)
    known = {"code": process.returncode, "is": process.pid, "starter": os.getpid(), "err": err}
    known["blocked there"] = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    Path(folder, "found.json").write_text(json.dumps(known | json.loads(out)))


def test_it_is_a_process_with_what_it_is_given(tmp_path):
    codes, said = Forks(start_one, str(tmp_path), log=tmp_path / "log").wait(300)
    assert codes == [0], said
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["code"], found["err"], found["input"]) == (7, "to stderr\n", "given")
    assert found["pid"] == found["is"] == found["session"]
    assert found["parent"] == found["starter"]
    assert (found["folder"], found["environ"], found["words"]) == (str(tmp_path), {"ONLY": "this"}, ["a", "b"])
    assert found["files"] == ["/dev/null"]
    assert found["signals"] == [str(signal.SIG_DFL), str(signal.default_int_handler), str(signal.SIG_IGN)]
    assert found["blocked"] == found["blocked there"]


def start_all(folder: str) -> None:
    """In a fork: what each of COMMANDS answers, and how one that is killed ends."""
    found = {}
    for name, words in COMMANDS.items():
        done = ForkedPopen([*WIDEMIX, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, err = done.communicate()
        found[name] = done.returncode, out, err
    runpy.run_module = lambda *_, **__: time.sleep(600)  # type: ignore[assignment]
    killed = ForkedPopen(WIDEMIX)
    killed.kill()
    found["killed"] = (killed.wait(), "", "")
    thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)
    thread.start()
    with ForkedPopen([*WIDEMIX, "--version"], stdout=subprocess.PIPE, text=True) as new:  # in a new Python
        found["with a thread"] = new.communicate()
    Path(folder, "found.json").write_text(json.dumps(found))
    os._exit(0)


def test_commands_answer_as_in_a_new_python(tmp_path):
    codes, said = Forks(start_all, str(tmp_path), log=tmp_path / "log").wait(300)
    assert codes == [0], said
    found = json.loads((tmp_path / "found.json").read_text())
    for name, words in COMMANDS.items():
        done = subprocess.run([*WIDEMIX, *words], capture_output=True, text=True)
        assert found[name] == [done.returncode, done.stdout, done.stderr], name
    assert found["killed"][0] == -signal.SIGKILL
    assert found["with a thread"][0] == found["done"][1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_its_starter_as_the_starter_asked(tmp_path, number):
    forks = Forks(start_and_wait, str(tmp_path), log=tmp_path / "log")
    while not (tmp_path / "pid").exists():
        assert forks.running, forks.said()
        forks.reap()
        time.sleep(0.01)
    child = int((tmp_path / "pid").read_text())
    forks.signal(number)
    forks.wait(60)
    deadline = time.monotonic() + 300
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def start_and_wait(folder: str) -> None:
    """In a fork: start one that sleeps, and wait for it."""
    runpy.run_module = lambda *_, **__: time.sleep(600)  # type: ignore[assignment]
    process = ForkedPopen(WIDEMIX, preexec_fn=end_with_parent())
    Path(folder, "new").write_text(f"{process.pid}")
    Path(folder, "new").rename(Path(folder, "pid"))
    process.wait()

"""launch/setup.sh as it is, on a copy of the project, with a `pip` that only records and fails as it is told to.

The other collaborators are real: Python, its `venv`, the file system. apt-get and sudo are small scripts on PATH.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.clone import ROOT
from tests.transcripts import check_transcript, transcript

# Takes a word of `order` at each call (it succeeds without one), records what it was asked, and does as that says.
PIP = """
import sys, time
from pathlib import Path
records = Path(sys.prefix).parents[1]
if sys.argv[1:] == ["config", "list"]:
    config = records / "config"
    print(config.read_text() if config.exists() else "global.constraint='what uv does not know'")
    sys.exit()
order = records / "order"
now, *later = order.read_text().split() if order.exists() else ["succeed"]
order.write_text(" ".join(later or ["succeed"]))
with open(records / "calls", "a") as calls:
    print("+ pip", *sys.argv[1:], file=calls)
if now == "hang":
    time.sleep(600)
if now == "disconnect":
    sys.exit("ERROR: ReadTimeoutError(\\"HTTPSConnectionPool(host='files'): Read timed out.\\")")
if now == "uncompiled":
    sys.exit("  error: command 'g++' failed\\nERROR: Failed building wheel for ffcv")
if now == "full":
    sys.exit("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device")
if now == "elsewhere":
    library = Path(sys.prefix, "lib", "python%d.%d" % sys.version_info[:2], "site-packages", "ffcv", "_libffcv.so")
    library.parent.mkdir()
    library.write_text("a wheel from another system")
"""
PYTHON = """[ "$1 $2" = "-m venv" ] || exec {python} "$@"
echo + venv >>../calls
{python} -m venv --without-pip "$3"
for packages in "$3"/lib/python*/site-packages; do cp -r ../pip "$packages/"; done
"""
# pkg-config knows no turbojpeg until apt-get has installed something.
LACKS_TURBOJPEG = '[ "$2" != libturbojpeg ] || grep -q "apt-get.* install" ../calls 2>/dev/null'
SAID = {r"\b\d+ s\b": "N s", r"\b3\.\d+\.\d+$": "3", r"python3\.\d+-venv": "python3-venv"}
USUAL = "making|installing Python|pipeline/native did|compiling what|it is compiled|done in|N s: starting"
ENVIRON = {name: value for name, value in os.environ.items() if not re.match("UV_|SSL_CERT_|PYTHON$", name)}


@pytest.fixture
def answer(tmp_path):
    """`setup [ORDER...] [NAME=VALUE]`: what it called, printed and left; `killed`: the same, killed as it calls pip.

    What is `USUAL` is shown by `setup --all` alone. `tool NAME SCRIPT` puts a program first in PATH; other commands
    are sh's, in the project's folder.
    """
    folder, tools = tmp_path / "a project", tmp_path / "tools"
    (folder / "launch").mkdir(parents=True)
    shutil.copy(ROOT / "launch/setup.sh", folder / "launch")
    (folder / "pyproject.toml").write_text("[project]\n")
    for name, text in {"__init__": "", "__main__": PIP}.items():
        (tmp_path / "pip").mkdir(exist_ok=True)
        (tmp_path / f"pip/{name}.py").write_text(text)

    def tool(name: str, script: str) -> str:
        tools.mkdir(exist_ok=True)
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
        return ""

    def set_up(*words: str, killed: bool = False) -> str:
        project = next(tmp_path.glob("*/launch")).parent
        calls, order = tmp_path / "calls", [word for word in words if word.isalpha()]
        calls.write_text("")
        if order:
            (tmp_path / "order").write_text(" ".join(order))
        environ = ENVIRON | {"PATH": f"{tools}:{ENVIRON['PATH']}"}
        environ |= dict(word.split("=", 1) for word in words if "=" in word)
        given = {"env": environ, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(["sh", project / "launch/setup.sh"], start_new_session=True, **given) as process:
            while killed and "pip install" not in calls.read_text():
                assert process.poll() is None
                time.sleep(0.05)
            if killed:
                os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        for found, shown in SAID.items():
            out, err = (re.sub(found, shown, text, flags=re.MULTILINE) for text in (out, err))
        said = [
            line
            for line in dict.fromkeys(out.splitlines())
            if "--all" in words or not re.match(f"set-up: ({USUAL})", line)
        ]
        ended = [*err.splitlines()[-2:], f"exit code {process.returncode}"] * (process.returncode != 0)
        stamped = ["it is stamped"] * (project / ".venv/stamp").exists()
        return "\n".join([*sorted(calls.read_text().splitlines()), *said, *ended, *stamped])

    def run(command: str) -> str:
        name, _, rest = command.partition(" ")
        if name in ("setup", "killed"):
            return set_up(*rest.split(), killed=name == "killed")
        if name == "tool":
            return tool(*rest.split(" ", 1))
        project = next(tmp_path.glob("*/launch")).parent
        return subprocess.run(["sh", "-c", command], cwd=project, capture_output=True, text=True).stdout

    tool("python3", PYTHON.format(python=f"'{sys.executable}'"))
    tool("turbojpeg", f"mv {tools}/turbojpeg.sh {tools}/pkg-config")
    tool("turbojpeg.sh", LACKS_TURBOJPEG)
    return run


@transcript(Path(__file__).with_name("setup.txt"))
def test_what_the_set_up_does(case, answer, request):
    check_transcript(case, answer, request.config)

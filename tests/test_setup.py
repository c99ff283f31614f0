"""launch/setup.sh as it is, on a copy of the project, with a `pip` that only records and fails as it is told to.

The other collaborators are real: Python, its `venv`, the file system. apt-get and sudo are small scripts on PATH.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSTALL = "install --no-compile --use-pep517"

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
with open(records / "pip-calls", "a") as calls:
    print(*sys.argv[1:], file=calls)
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

PYTHON = """#!/bin/sh
[ "$1 $2" = "-m venv" ] || exec {python} "$@"
echo venv >>{calls}
{python} -m venv --without-pip "$3"
for packages in "$3"/lib/python*/site-packages; do cp -r {pip} "$packages/"; done
"""


class Project:
    """A copy of the project's set-up, and PATH with its collaborators."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.records, self.folder, self.tools = folder, folder / "a project", folder / "tools"
        (self.folder / "launch").mkdir(parents=True)
        self.tools.mkdir()
        shutil.copy(ROOT / "launch/setup.sh", self.folder / "launch")
        (self.folder / "pyproject.toml").write_text("[project]\n")
        pip = folder / "pip"
        pip.mkdir()
        (pip / "__init__.py").touch()
        (pip / "__main__.py").write_text(PIP)
        self.tool(
            "python3", PYTHON.format(python=f"'{sys.executable}'", pip=f"'{pip}'", calls=f"'{folder}/venv-calls'")
        )
        monkeypatch.setenv("PATH", f"{self.tools}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("PYTHON", raising=False)

    def tool(self, name: str, script: str) -> None:
        (self.tools / name).write_text(script)
        (self.tools / name).chmod(0o755)

    def lack_turbojpeg(self) -> None:
        """pkg-config knows no turbojpeg until apt-get has installed something."""
        self.tool("pkg-config", f'#!/bin/sh\n[ "$2" != libturbojpeg ] || [ -e "{self.records}/apt-calls" ]\n')

    def set_up(self, *, order: str = "", environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        if order:
            (self.records / "order").write_text(order)
        return subprocess.run(
            ["sh", self.folder / "launch/setup.sh"], capture_output=True, text=True, env=os.environ | (environ or {})
        )

    def calls(self, of: str) -> list[str]:
        file = self.records / f"{of}-calls"
        return file.read_text().splitlines() if file.exists() else []

    @property
    def stamped(self) -> bool:
        return (self.folder / ".venv/stamp").exists()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    return Project(tmp_path, monkeypatch)


def test_installs_once(project: Project) -> None:
    first = project.set_up()
    assert first.returncode == 0, first.stderr
    assert project.calls("pip") == [f"{INSTALL} --editable .[dev,ffcv]"]

    second = project.set_up()
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert len(project.calls("pip")) == len(project.calls("venv")) == 1


def test_uv_installs_if_it_is_there_or_pip_can_install_it(project: Project) -> None:
    (project.records / "config").touch()
    assert project.set_up().returncode == 0
    assert project.calls("pip") == ["install --quiet uv", f"{INSTALL} --editable .[dev,ffcv]"]  # it cannot

    shutil.rmtree(project.folder / ".venv")
    project.tool("uv", f'#!/bin/sh\necho "$@" >>"{project.records}/uv-calls"\n')
    assert "by uv" in project.set_up().stdout
    assert project.calls("uv") == ["pip install --python .venv/bin/python --editable .[dev,ffcv]"]
    assert len(project.calls("pip")) == 2


def test_uv_is_told_what_pip_is_configured_to(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment counts more than the files of pip; uv's own variables count most."""
    (project.records / "config").write_text(
        ":env:.find-links='/a /b'\nglobal.cert='/c.pem'\nglobal.extra-index-url='\\nfile:///d\\nhttps://e/it''s'\n"
        "global.find-links='/f'\nglobal.index-url='https://g'\nglobal.timeout='9'\ndownload.no-index='1'\n"
    )
    for name in [name for name in os.environ if name.startswith(("UV_", "SSL_CERT_"))]:
        monkeypatch.delenv(name)
    script = 'env | grep -E "^(UV_|SSL_CERT_)" | sort'
    project.tool("uv", f'#!/bin/sh\n{script} >"{project.records}/uv-calls"\n')
    expected = {
        "SSL_CERT_FILE": "/c.pem",
        "UV_DEFAULT_INDEX": "https://mine",
        "UV_FIND_LINKS": "/a,/b",
        "UV_INDEX": "file:///d https://e/its",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    assert project.set_up(environ={"UV_DEFAULT_INDEX": "https://mine"}).returncode == 0
    assert project.calls("uv") == [f"{name}={value}" for name, value in expected.items()]


def test_pip_tries_where_uv_fails(project: Project) -> None:
    (project.records / "config").touch()
    project.tool("uv", "#!/bin/sh\necho 'error: a mirror with a password'; exit 2\n")
    done = project.set_up()
    assert done.returncode == 0
    assert "set-up: uv cannot install them here; pip tries\n" in done.stdout
    assert project.calls("pip") == [f"{INSTALL} --editable .[dev,ffcv]"]


def test_a_line_every_ten_seconds_says_what_is_downloaded(project: Project) -> None:
    (project.records / "config").touch()
    project.tool("sleep", "#!/bin/sh\nexec /bin/sleep 0.2\n")
    project.tool("uv", "#!/bin/sh\necho 'Downloading torch (812.3MiB)'\n/bin/sleep 1\n")
    lines = project.set_up().stdout.splitlines()
    assert any(line.startswith("set-up: ") and line.endswith(" s: Downloading torch (812.3MiB)") for line in lines)
    assert lines[-1].startswith("set-up: done in ")


@pytest.mark.parametrize("file", ["pyproject.toml", "launch/setup.sh"])
def test_what_changed_is_installed_into_the_same_environment(project: Project, file: str) -> None:
    project.set_up()
    with (project.folder / file).open("a") as changed:
        changed.write("# changed\n")
    assert project.set_up().returncode == 0
    assert (len(project.calls("pip")), len(project.calls("venv"))) == (2, 1)
    assert project.set_up().stdout == ""


def test_an_environment_that_was_moved_is_built_anew(project: Project) -> None:
    project.set_up()
    project.folder = project.folder.rename(project.folder.with_name("moved"))
    assert project.set_up().returncode == 0
    assert len(project.calls("venv")) == 2


def test_an_environment_whose_python_is_gone_is_built_anew(project: Project) -> None:
    project.set_up()
    for link in (project.folder / ".venv/bin").glob("python*"):
        link.unlink()
    assert project.set_up().returncode == 0
    assert len(project.calls("venv")) == 2
    assert (project.folder / ".venv/bin/python").exists()


def test_another_python_asked_for_by_name_gets_its_own_environment(project: Project) -> None:
    project.set_up()
    assert project.set_up(environ={"PYTHON": "python3"}).stdout == ""
    # The environment says of itself that it is of another version, as one from before would.
    packages = next((project.folder / ".venv").glob("lib/python*/site-packages"))
    (packages / "older.pth").write_text("import sys; sys.version_info = (3, 99, 0, 'final', 0)")
    assert project.set_up(environ={"PYTHON": "python3"}).returncode == 0
    assert len(project.calls("venv")) == 2


def test_an_environment_that_was_there_before_is_kept(project: Project) -> None:
    subprocess.run([project.tools / "python3", "-m", "venv", project.folder / ".venv"], check=True)
    kept = project.folder / ".venv/kept"
    kept.touch()
    assert project.set_up().returncode == 0
    assert kept.exists()
    assert project.stamped


def test_an_interrupted_install_is_begun_anew(project: Project) -> None:
    (project.records / "order").write_text("hang")
    running = subprocess.Popen(["sh", project.folder / "launch/setup.sh"], start_new_session=True)
    while not project.calls("pip"):
        assert running.poll() is None
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    half_done = project.folder / ".venv/half-done"
    half_done.touch()
    assert not project.stamped

    assert project.set_up().returncode == 0
    assert not half_done.exists()
    assert project.stamped


def test_a_failed_upgrade_leaves_no_stamp(project: Project) -> None:
    project.set_up()
    (project.folder / "pyproject.toml").write_text("[project] # changed\n")
    assert project.set_up(order="full").returncode == 1
    assert not project.stamped


def test_a_network_failure_is_tried_once_more(project: Project) -> None:
    assert project.set_up(order="disconnect succeed").returncode == 0
    assert len(project.calls("pip")) == 2


@pytest.mark.parametrize(
    ("order", "calls", "says"),
    [
        ("disconnect disconnect", 2, "the network failed twice"),
        ("uncompiled", 1, "apt-get install g++ pkg-config libopencv-dev libturbojpeg0-dev python3-dev"),
        ("full", 1, "the disk is full"),
    ],
)
def test_a_failure_gives_its_cure_after_the_end_of_the_log(
    project: Project, order: str, calls: int, says: str
) -> None:
    failed = project.set_up(order=order)
    assert failed.returncode == 1
    assert "ERROR: " in failed.stderr
    assert says in failed.stderr.splitlines()[-1]
    assert len(project.calls("pip")) == calls
    assert not project.stamped


def test_an_ffcv_wheel_of_another_system_is_compiled_here(project: Project) -> None:
    assert project.set_up(order="elsewhere").returncode == 0
    assert project.calls("pip")[-1] == f"{INSTALL} --force-reinstall --no-deps --no-cache-dir ffcv"


def test_a_python_that_is_too_old_is_refused(project: Project) -> None:
    project.tool("python3", "#!/bin/sh\nexit 1\n")
    refused = project.set_up()
    assert refused.returncode == 1
    assert refused.stderr == (
        "set-up: python3 is missing or older than Python 3.11; "
        "name a newer one: make PYTHON=/path/to/python3.11 ...\n"
    )
    assert not (project.folder / ".venv").exists()


def test_missing_system_packages_come_from_apt(project: Project) -> None:
    project.lack_turbojpeg()
    project.tool("id", "#!/bin/sh\necho 0\n")
    project.tool("apt-get", f'#!/bin/sh\necho "$@" >>"{project.records}/apt-calls"\n')
    assert project.set_up().returncode == 0
    update, install = project.calls("apt")
    assert update.endswith("update")
    assert install.endswith("install --no-install-recommends libturbojpeg0-dev")


def test_packages_are_installed_while_apt_get_is_at_work(project: Project) -> None:
    """All but FFCV, which is built against what apt-get brings."""
    project.lack_turbojpeg()
    project.tool("id", "#!/bin/sh\necho 0\n")
    waits = f"for try in $(seq 4000); do [ ! -s '{project.records}/pip-calls' ] || break; sleep 0.05; done"
    record = f"echo apt-get $(cat '{project.records}/pip-calls') >>'{project.records}/apt-calls'"
    project.tool("apt-get", f"#!/bin/sh\ncase $* in *install*) {waits}; {record} ;; esac\n")
    done = project.set_up()
    assert done.returncode == 0, done.stderr
    assert project.calls("apt") == [f"apt-get {INSTALL} --editable .[dev]"]
    assert project.calls("pip") == [f"{INSTALL} --editable .[dev]", f"{INSTALL} --editable .[dev,ffcv]"]


def test_apt_get_that_fails_ends_the_set_up(project: Project) -> None:
    project.lack_turbojpeg()
    project.tool("id", "#!/bin/sh\necho 0\n")
    project.tool("apt-get", "#!/bin/sh\necho 'no such package'; exit 100\n")
    failed = project.set_up()
    assert failed.returncode == 1
    assert failed.stderr.splitlines() == ["no such package", "set-up: apt-get failed; see .venv/setup.log.apt"]
    assert not project.stamped


def test_sudo_that_asks_nothing_is_used(project: Project) -> None:
    project.lack_turbojpeg()
    project.tool("id", "#!/bin/sh\necho 1000\n")
    project.tool("sudo", f'#!/bin/sh\nshift\necho "$@" >>"{project.records}/sudo-calls"\nexec "$@"\n')
    project.tool("apt-get", f'#!/bin/sh\necho "$@" >>"{project.records}/apt-calls"\n')
    assert project.set_up().returncode == 0
    assert project.calls("sudo")[-1].endswith("install --no-install-recommends libturbojpeg0-dev")


@pytest.fixture
def nobody(project: Project) -> Project:
    """Without root and sudo, and without turbojpeg."""
    project.lack_turbojpeg()
    project.tool("id", "#!/bin/sh\necho 1000\n")
    project.tool("sudo", "#!/bin/sh\nexit 1\n")
    project.tool("apt-get", "#!/bin/sh\nexit 1\n")
    return project


def test_without_root_and_sudo_ffcv_is_left_out_in_one_line(nobody: Project) -> None:
    done = nobody.set_up()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == (
        "set-up: without FFCV, which only widemix.ffcv and benchmarks need: "
        "libturbojpeg0-dev missing, which root can install; "
        "then .venv/bin/pip install -e '.[ffcv]'"
    )
    assert nobody.calls("pip") == [f"{INSTALL} --editable .[dev]"]
    assert nobody.stamped


def test_without_root_what_python_itself_lacks_is_named(nobody: Project) -> None:
    nobody.tool("python3", f"#!/bin/sh\nPYTHONPATH='{nobody.tools}' exec {sys.executable} \"$@\"\n")
    (nobody.tools / "sitecustomize.py").write_text(
        "import importlib.util\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'ensurepip' else find(name, *rest)\n"
    )
    refused = nobody.set_up()
    assert refused.returncode == 1
    assert refused.stdout == ""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    message = f"set-up: a system package is missing; as root: apt-get install {version}-venv; then again\n"
    assert refused.stderr == message
    assert not (nobody.folder / ".venv").exists()

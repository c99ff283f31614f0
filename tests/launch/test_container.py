"""Docker and Apptainer build the same from the same lock."""

import json
import re
import tomllib

from packaging.requirements import Requirement
from packaging.version import Version

from tests.conftest import ROOT

FOLDER = ROOT / "launch" / "container"


def commands(text: str) -> list[str]:
    """Shell commands with lines joined and spaces evened out."""
    return [" ".join(line.split()) for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]


def test_both_run_the_same_commands():
    dockerfile = commands((FOLDER / "Dockerfile").read_text())
    runs = [line.removeprefix("RUN ") for line in dockerfile if line.startswith("RUN ")]
    post = re.search(r"%post\n(.*?)\n%", (FOLDER / "widemix.def").read_text(), re.DOTALL)
    assert [line for line in commands(post[1]) if line != "cd /"] == runs


def test_both_install_every_package_under_its_own_name():
    """Apptainer copies what links point to: `widemix` has all that is installed."""
    apptainer = (FOLDER / "widemix.def").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = [pattern.removesuffix("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]]
    for name in packages:
        assert re.search(rf"^ +{name} /opt/widemix/{name}$", apptainer, re.MULTILINE), name
    assert " --editable /opt/widemix" in apptainer  # and so in the Dockerfile, which runs the same


def test_the_lock_has_a_hashed_version_of_everything_needed():
    lock = (FOLDER / "requirements.lock").read_text()
    pinned = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", lock, re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"]:
        requirement = Requirement(text)
        name = requirement.name.lower().replace("_", "-")
        assert name in pinned, f"{name} is not in the lock: launch/README.md says how to renew it"
        assert Version(pinned[name]) in requirement.specifier, text
    blocks = [block for block in re.split(r"\n(?=[a-z])", lock) if re.match(r"[a-z0-9-]+==", block)]
    assert len(blocks) == len(pinned)
    for block in blocks:
        assert "--hash=sha256:" in block, block


def test_the_devcontainer_sets_up_what_a_clone_has():
    """By names of https://containers.dev/implementors/json_reference/, with a target of the Makefile."""
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    assert set(container) == {"name", "image", "onCreateCommand", "hostRequirements", "customizations"}
    make, target = container["onCreateCommand"].split()
    assert make == "make"
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    python = container["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert python == "${containerWorkspaceFolder}/.venv/bin/python"

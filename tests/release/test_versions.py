"""All files name one version, and the lock is of the requirements in pyproject.toml."""

import tomllib

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_one_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == PROJECT["version"]
    assert (ROOT / "tests/formats/released/0.2.0.tar.xz").exists()


def test_the_lock_is_of_these_requirements() -> None:
    lock = {package["name"]: package for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    own = lock["widemix"]
    assert own["version"] == PROJECT["version"]
    locked = {
        (entry["name"], entry["specifier"])
        for entry in own["metadata"]["requires-dist"]
        if "specifier" in entry and "extra ==" not in entry.get("marker", "")
    }
    needed = {Requirement(text) for text in PROJECT["dependencies"]}
    parsed = {(name, frozenset(specifier.split(","))) for name, specifier in locked}
    assert parsed == {(canonicalize_name(r.name), frozenset(str(r.specifier).split(","))) for r in needed}

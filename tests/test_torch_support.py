"""Nothing else says what works with which torch: pyproject.toml, the lock, the pages and the wheels agree with it."""

import re
import tomllib

import pytest
import torch
from packaging.requirements import Requirement

from tests.conftest import ROOT
from widemix import torch_support
from widemix.torch_support import BUILDS, END, OLDEST, build_for, build_for_driver, table

LOCK = dict(
    re.findall(r"^(torch|torchvision)==(\S+)", (ROOT / "launch/container/requirements.lock").read_text(), re.M)
)


def test_the_bounds_are_those_of_the_project():
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = {r.name: {s.operator: s.version for s in r.specifier} for r in map(Requirement, required)}
    assert bounds["torch"] == {">=": OLDEST, "<": END}
    assert bounds["torchvision"] == {">=": BUILDS[0].torchvision.rpartition(".")[0]}
    assert BUILDS[0].torch.rpartition(".")[0] == OLDEST


@pytest.mark.parametrize(
    ("installed", "enough"),
    [("2.8.0a0+34c6371d24.nv25.08", True), ("2.8.0+cu128", True), ("2.15.0", True), ("2.7.1+cu128", False)],
)
def test_builds_before_a_release_of_torch_have_what_it_has(monkeypatch, installed, enough):
    """As those in NVIDIA's containers."""
    monkeypatch.setattr(torch_support, "version", lambda package: {"torch": installed}[package])
    assert torch_support.torch_is_at_least("2.8") == enough
    assert torch_support.torch_is_at_least("2.8.0") == enough


def test_the_container_has_the_newest_build():
    assert {"torch": BUILDS[-1].torch, "torchvision": BUILDS[-1].torchvision} == LOCK


def test_the_page_has_the_table():
    assert table() in (ROOT / "launch/README.md").read_text()


def test_the_wheel_is_built_for_what_the_table_says():
    found = [build for build in BUILDS if torch.__version__.partition("+")[0] == build.torch]
    if not found or not torch.version.cuda:
        pytest.skip(f"torch {torch.__version__} is none of the table's")
    assert (torch.version.cuda, tuple(torch._C._cuda_getArchFlags().split())) == found[0][2:]


@pytest.mark.parametrize(
    ("capability", "torch_version"),
    [((7, 0), "2.8.0"), ((7, 5), "2.15.0"), ((9, 0), "2.15.0"), ((8, 9), "2.15.0"), ((6, 1), None)],
    ids=["V100", "T4", "H100", "L4", "P40"],
)
def test_the_newest_build_for_a_gpu(capability, torch_version):
    build = build_for(capability)
    assert (build and build.torch) == torch_version


def test_the_newest_build_for_a_driver():
    assert [(build := build_for_driver(cuda)) and build.torch for cuda in ((13, 0), (12, 4), (11, 8))] == [
        "2.15.0",
        "2.8.0",
        None,
    ]

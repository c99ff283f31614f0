"""What works with which torch and Pillow: pyproject.toml, the lock, the pages and the wheels agree with it."""

import re
import tomllib

import pytest
import torch
from packaging.requirements import Requirement
from PIL import Image

from tests.conftest import ROOT
from widemix import versions
from widemix.data_prep.image import encode
from widemix.data_prep.samples import FileSlice, Sample
from widemix.data_prep.settings import PrepSettings
from widemix.native import library
from widemix.native.build import BuildError
from widemix.versions import BUILDS, END, OLDEST, build_for, build_for_driver, older_pillow, table

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
    monkeypatch.setattr(versions, "version", lambda package: {"torch": installed}[package])
    assert versions.torch_is_at_least("2.8") == enough
    assert versions.torch_is_at_least("2.8.0") == enough


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


# Pillow.

OLD, NEW = "12.1.1", "13.0.0"


@pytest.mark.parametrize(
    ("version", "found"), [("11.0.0", "11.0.0"), (OLD, OLD), (NEW, None), ("13.1.0.dev0", None), ("14.0.0", None)]
)
def test_which_pillow_has_our_pixels(version, found, system):
    system({"PIL.__version__": version})
    assert older_pillow() == found


@pytest.mark.parametrize("version", [OLD, NEW])
def test_images_that_prep_shrinks_by_pillow_have_a_rule(version, tmp_path, system):
    system({"PIL.__version__": version})
    Image.new("RGB", (60, 40)).save(tmp_path / "a.png")
    Image.new("RGB", (60, 40)).save(tmp_path / "a.jpg")
    rules = [
        encode(Sample(name, 0, FileSlice(str(tmp_path / name))), PrepSettings(max_size=size)).rule
        for name, size in (("a.png", 30), ("a.png", 60), ("a.jpg", 30))
    ]
    assert rules == [f"shrunk by Pillow {OLD}, not as Pillow 13 does" if version == OLD else "", "", ""]


@pytest.mark.parametrize(
    ("version", "pixels"),
    [(OLD, f"the pixels of Pillow {OLD}, which are not those of Pillow 13"), (NEW, "the same pixels")],
)
def test_so_does_the_note_that_there_is_no_compiled_code(version, pixels, monkeypatch, system, capsys):
    def fail():
        raise BuildError("no compiler")

    system({"PIL.__version__": version})
    monkeypatch.setattr(library, "open_library", fail)
    assert library.load.__wrapped__() is None
    assert capsys.readouterr().err == (
        f"note: without compiled code images load 4 times slower, with {pixels}: no compiler\n"
    )

"""Prepared images for the tests of the library and its examples."""

from pathlib import Path

import pytest

from tests.layouts import two_classes
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs of many sizes in two classes, prepared: 53 to train on, 17 to evaluate on."""
    source, target = tmp_path_factory.mktemp("jpegs"), tmp_path_factory.mktemp("prepared")
    two_classes(source)
    prepare("image-folder", source, target, PrepSettings())
    return target

"""A few of the random corruptions of `python -m tests.data_prep.corruptions`, which does thousands."""

import pytest

from tests.data_prep import corruptions


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return corruptions.prepare_all(tmp_path_factory.mktemp("corruptions"))


@pytest.mark.parametrize("kind", corruptions.KINDS)
def test_none_is_silent(folders, kind):
    lines = corruptions.in_child(kind, folders[kind], count=15, seed=0)
    assert len(lines) == 15
    assert not [line for line in lines if line.startswith(corruptions.BAD)]
    assert any(line.startswith("named") for line in lines)

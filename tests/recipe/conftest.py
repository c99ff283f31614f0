"""Small runs, shared by the tables of the sections' keys."""

import pytest

from tests.recipe.small_runs import SmallRuns
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> SmallRuns:
    """See `SmallRuns`."""
    data = tmp_path_factory.mktemp("twenty_digits")
    prepare("digits", None, data, PrepSettings(per_class=2))
    return SmallRuns(data, tmp_path_factory.mktemp("small_runs"))

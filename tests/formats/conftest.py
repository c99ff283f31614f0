from tests.data_prep.conftest import write_beton  # noqa: F401 - a fixture

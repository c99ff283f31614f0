from tests.data_prep.conftest import folder, picture, write_beton  # noqa: F401 - fixtures

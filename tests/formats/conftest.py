from tests.data_prep.conftest import folder, image, write_beton  # noqa: F401 - fixtures

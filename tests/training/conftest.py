from tests.run.conftest import alone  # noqa: F401 - a fixture

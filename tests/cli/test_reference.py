"""The pages of the reference are those of the code."""

import pytest

from tests.conftest import ROOT
from widemix.cli import reference


@pytest.mark.parametrize("name", ["commands", "keys"])
def test_the_reference_is_the_codes(name):
    page = (ROOT / f"docs/reference/{name}.md").read_text()
    assert page == getattr(reference, f"{name}_page")(), "stale: `python -m widemix.cli.reference docs/reference`"
    assert "typing." not in page.lower()

"""The pages of the reference are those of the code."""

import pytest

from tests.conftest import ROOT
from widemix.cli import reference


@pytest.mark.parametrize("name", ["commands.md", "keys.md"])
def test_the_reference_is_the_codes(name, tmp_path, system):
    system({"sys.argv": ["reference", str(tmp_path)]})
    reference.main()
    page = (ROOT / "docs/reference" / name).read_text()
    assert page == (tmp_path / name).read_text(), "stale: `python -m widemix.cli.reference docs/reference`"
    assert "typing." not in page.lower()

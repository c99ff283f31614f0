"""The pages of the reference are those of the code."""

import pytest

from tests.conftest import ROOT
from widemix.cli import reference


@pytest.mark.parametrize("name", ["commands", "keys"])
def test_the_reference_is_the_codes(name):
    page = (ROOT / f"docs/reference/{name}.md").read_text()
    assert page == getattr(reference, f"{name}_page")(), "stale: `python -m widemix.cli.reference docs/reference`"
    assert "typing." not in page.lower()


def test_the_pages_are_written_by_their_names(tmp_path, monkeypatch):
    monkeypatch.setattr(reference, "commands_page", lambda: "of commands")
    monkeypatch.setattr(reference, "keys_page", lambda: "of keys")
    monkeypatch.setattr("sys.argv", ["reference", str(tmp_path)])
    reference.main()
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {"commands.md": "of commands", "keys.md": "of keys"}

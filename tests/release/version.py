"""Print the version in pyproject.toml: what a release is called."""

import tomllib
from pathlib import Path

print(tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["version"])

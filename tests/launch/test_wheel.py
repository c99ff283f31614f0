"""What the wheel installs: one package, which prepares and trains outside any checkout and without FFCV."""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.error
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.transcripts import check_transcript, transcript
from widemix.launch import wheels
from widemix.native.build import BuildError
from widemix.recipe.files import SHIPPED, find_recipe, load_recipe

# A folder of a checkout taken for a module: `pipeline.train`, `-m launch.pod`, `from data_prep import`; but paths and
# file names (`pipeline/engine`, `launch.png`) and modules of others (`ffcv.pipeline`).
ONLY_HERE = re.compile(
    r"(?<![\w./-])(?:(?:-m |from |(?<!\w )import )(?:pipeline|data_prep|launch)\b(?!/)"
    r"|(?:pipeline|data_prep|launch)\.(?!py\b|md\b|png\b)[a-z_])"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder that the wheel's package is installed into."""
    folder = tmp_path_factory.mktemp("wheel")
    build = ["egg_info", "--egg-base", folder, "build_py", "--build-lib", folder / "installed"]
    setuptools = [sys.executable, "-c", "from setuptools import setup; setup()", "-q", *build]
    subprocess.run(setuptools, cwd=ROOT, check=True)
    return folder / "installed"


def test_it_has_the_code_the_recipes_and_nothing_else(installed: Path) -> None:
    assert [path.name for path in installed.iterdir()] == ["widemix"]
    package = installed / "widemix"
    code = {path.relative_to(ROOT / "pipeline") for path in (ROOT / "pipeline").rglob("*.py")}
    for folder in ("data_prep", "launch"):
        code |= {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py")}
    assert {path.relative_to(package) for path in package.rglob("*.py")} == code
    recipes = {path.relative_to(ROOT) for path in (ROOT / "recipes").rglob("*.yaml")}
    assert {path.relative_to(package) for path in package.rglob("*.yaml")} == recipes


def test_a_source_distribution_has_no_part_of_the_tests(installed: Path) -> None:
    files = (installed.parent / "widemix.egg-info/SOURCES.txt").read_text().splitlines()
    assert "widemix/trainer.py" in files
    assert [file for file in files if file.startswith("tests/")] == []


@pytest.mark.long
def test_the_pages_can_be_followed_with_it_alone(installed: Path, tmp_path: Path) -> None:
    """Without a checkout and without FFCV: see `tests/installed.py`."""
    done = subprocess.run(
        [sys.executable, "-P", ROOT / "tests/installed.py", ROOT],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_nobody_is_told_names_of_a_checkouts_folders() -> None:
    folders = ("docs", "pipeline", "data_prep", "launch", "recipes", "examples")
    files = [*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "mkdocs.yml", ROOT / "Makefile"]
    files += [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    found = []
    for path in files:
        if path.suffix not in (".png", ".pyc") and path.name not in ("CHANGELOG.md", "requirements.lock"):
            text = path.read_text()
            found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in ONLY_HERE.finditer(text)]
    assert found == []


def test_a_checkouts_folder_is_not_imported_by_its_name() -> None:
    done = subprocess.run([sys.executable, "-c", "import pipeline"], cwd=ROOT, capture_output=True, text=True)
    assert (
        done.stderr.splitlines()[-1]
        == "ImportError: pipeline/ is the folder of the package widemix: `import widemix`"
    )


def test_shipped_recipes_are_found_by_name_unless_files_are(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = SHIPPED / "digits/rp_mixer.yaml"
    for name in ("digits/rp_mixer", "digits/rp_mixer.yaml", "recipes/digits/rp_mixer.yaml"):
        assert find_recipe(name) == shipped
    assert load_recipe("digits/rp_mixer") == load_recipe(shipped)
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits/rp_mixer.yaml").write_text("")
    assert find_recipe("digits/rp_mixer.yaml") == Path("digits/rp_mixer.yaml")


def test_sources_are_downloaded_once_and_are_those_of_the_hash(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / wheels.JPEG).mkdir()
    (tmp_path / wheels.JPEG / "CMakeLists.txt").write_text("set(VERSION 3.2.0)\n")
    archive = Path(shutil.make_archive(str(tmp_path / "jpeg"), "gztar", tmp_path, wheels.JPEG))
    monkeypatch.setattr(wheels, "JPEG_URL", archive.as_uri())
    folder = tmp_path / "build" / wheels.JPEG
    with pytest.raises(BuildError, match=r"jpeg\.tar\.gz: is not the file it was; its SHA-256 is not 6f30"):
        wheels.download(folder)
    assert not folder.exists()
    monkeypatch.setattr(wheels, "JPEG_SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    for said in (f"downloading {archive.as_uri()}\n", ""):
        capsys.readouterr()
        assert wheels.check_jpeg(wheels.download(folder)) == folder
        assert capsys.readouterr().out == said


def test_a_command_runs_without_the_clones_path(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "of the clone")
    monkeypatch.setenv("OF_THE_USER", "kept")
    show = (
        "import os; print(os.environ['PYTHONPATH'] + os.environ['OF_THE_USER'] + os.getcwd(), file=open('said', 'w'))"
    )
    wheels.run(sys.executable, "-c", show, folder=tmp_path)
    assert (tmp_path / "said").read_text() == f"kept{tmp_path}\n"
    with pytest.raises(BuildError) as failed:
        wheels.run("sh", "-c", "echo first; yes | head -n 1500; echo last; echo error >&2; exit 3", "a", "b")
    head, _, said = str(failed.value).partition(" failed:\n")
    assert head == "sh -c echo first; yes | head -n 1500; echo last; echo error >&2; exit 3 a"
    assert said.endswith("y\nlast\nerror\n")
    assert len(said) == 2000


# In place of Python and cmake: they note their words, and make what the next step needs.
PYTHON = """case "$*" in
    *ziglang*) ;;
    *sdist*) mkdir -p {tmp}/dist; touch {tmp}/dist/{f,e,d,c,b,a}.gz ;;
    *bdist_wheel*) touch {tmp}/dist/g.whl ;;
    *) mkdir -p ${9}/lib/widemix/native ;;
esac"""
NOTE = 'echo "$(pwd): ${0##*/} $*" >>{tmp}/calls\n'


@transcript(Path(__file__).with_name("wheels.txt"))
def test_how_a_release_is_built(case, tmp_path, programs, system, monkeypatch, capsys, request):
    """`wheels WORDS` of the clone in {tmp}, and all that it starts; `without PROGRAM`; others are sh's."""
    programs(**{name: NOTE.replace("{tmp}", str(tmp_path)) for name in ("cmake", "nasm", "ninja")},
             python=(NOTE + PYTHON).replace("{tmp}", str(tmp_path)))  # fmt: skip
    system({"sys.executable": str(tmp_path / "bin/python"), "urllib.request.urlretrieve": no_network})
    files = " ".join(map(str, sorted((ROOT / "pipeline/native").glob("*.c"))))

    def answer(command: str) -> str:
        name, *words = shlex.split(command.replace("{tmp}", str(tmp_path)))
        (tmp_path / "calls").write_text("")
        if name == "without":
            (tmp_path / "bin" / words[0]).unlink()
            monkeypatch.setenv("PATH", str(tmp_path / "bin"))
            return ""
        if name != "wheels":
            done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
            return done.stdout
        system({"sys.argv": ["wheels", "--project", str(tmp_path), "--to", str(tmp_path / "dist"), *words]})
        code = wheels.main()
        said = "".join(capsys.readouterr())
        text = (tmp_path / "calls").read_text() + said + f"exit code {int(code)}"
        text = text.replace(files, "*.c").replace(str(tmp_path), "{tmp}").replace(f"{Path.cwd()}: ", "")
        return re.sub(r"\.native-\w+\.so", ".native-X.so", text)

    check_transcript(case, answer, request.config)


def no_network(url: str) -> None:
    raise urllib.error.URLError("Name or service not known")

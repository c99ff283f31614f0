"""What the wheel installs: one package, which prepares and trains outside any checkout and without FFCV."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from widemix.errors import Exit, InputError
from widemix.launch import wheels
from widemix.native.build import LEVELS, BuildError
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
    with pytest.raises(InputError, match=r"digits/rp_mixr.yaml: no such recipe; did you mean digits/rp_mixer.yaml"):
        load_recipe("digits/rp_mixr.yaml")
    with pytest.raises(InputError, match=r"mnist/monarh: no such recipe; did you mean mnist/monarch\?"):
        load_recipe("mnist/monarh")


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


def test_zig_compiles_for_the_machine_and_the_oldest_glibc(tmp_path: Path) -> None:
    """By a module in its place that prints its arguments."""
    (tmp_path / "ziglang.py").write_text("import sys; print(*sys.argv[1:], sep='|')")
    cc = wheels.make_compiler(tmp_path / "work", "aarch64")
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    for name, words in (("cc", "cc|-target|aarch64-linux-gnu.2.28"), ("ar", "ar"), ("ranlib", "ranlib")):
        command = [cc.with_name(name), "a b.o", "-c"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        assert done.stdout == f"{words}|a b.o|-c\n"


def test_setuptools_leaves_everything_where_it_is_told(tmp_path: Path) -> None:
    project, dist = tmp_path / "project", tmp_path / "dist"
    project.mkdir()
    (project / "setup.cfg").write_text("[metadata]\nname = tiny\nversion = 1.0\n[options]\npy_modules = tiny\n")
    (project / "tiny.py").write_text("")
    words = ("build", "bdist_wheel", "--plat-name", "manylinux_2_28_aarch64", "--dist-dir", dist)
    wheels.run_setuptools(project, tmp_path / "work", *words)
    assert sorted(path.name for path in project.iterdir()) == ["setup.cfg", "tiny.py"]
    (wheel,) = dist.iterdir()
    assert wheel.name == "tiny-1.0-py3-none-manylinux_2_28_aarch64.whl"
    with zipfile.ZipFile(wheel) as file:
        assert "tiny.py" in file.namelist()


def test_building_wheels_names_what_is_missing(tmp_path: Path, system, capsys) -> None:
    def no_network(url: str) -> None:
        raise urllib.error.URLError("Name or service not known")

    def build(*words: str) -> tuple[int, str]:
        system({"sys.argv": ["wheels", "--project", str(tmp_path), "--to", str(tmp_path / "dist"), *words]})
        return wheels.main(), capsys.readouterr().err

    system({"urllib.request.urlretrieve": no_network, "shutil.which": lambda name: name})
    code, message = build()
    assert (code, message.count("\n")) == (Exit.FAILED, 1)
    assert re.search(r"libjpeg-turbo-3.2.0.tar.gz: Name or service not known; .*--jpeg FOLDER", message)
    other = tmp_path / "libjpeg-turbo-2.1"
    other.mkdir()
    (other / "CMakeLists.txt").write_text("set(VERSION 2.1.5)\n")
    for folder in (other, tmp_path / "none"):
        code, message = build("--jpeg", str(folder))
        assert (code, message.count("\n")) == (Exit.WRONG_INPUT, 1)
        assert f"{folder}: has not the sources of libjpeg-turbo-3.2.0; unpack https://" in message
    system({"shutil.which": lambda name: None if name == "nasm" else name})
    assert build() == (Exit.WRONG_INPUT, "error: nasm: not installed; apt-get install cmake nasm ninja-build\n")


@pytest.mark.parametrize("machines", [[], ["aarch64"], ["x86_64"]])
def test_a_release_has_sources_and_a_wheel_per_machine(machines, tmp_path, monkeypatch, system, capsys):
    done, dist = [], tmp_path / "dist"

    def setuptools(project, work, *words):
        done.append((work.name, *words))
        dist.mkdir(exist_ok=True)
        for name in "gfedcb" if "sdist" in words else "a":
            (dist / name).touch()

    (tmp_path / "build/wheels/left").mkdir(parents=True)  # of a build before
    (tmp_path / "jpeg").mkdir()
    (tmp_path / "jpeg/CMakeLists.txt").write_text("set(VERSION 3.2.0)\n")
    system({"shutil.which": lambda name: name})
    monkeypatch.setattr(wheels, "run_setuptools", setuptools)
    monkeypatch.setattr(wheels, "build_wheel", lambda *given: done.append(given))
    words = ["--project", str(tmp_path), "--to", str(dist), "--jpeg", str(tmp_path / "jpeg")]
    system({"sys.argv": ["wheels", *words, *(["--machines", *machines] if machines else [])]})
    assert wheels.main() == 0
    sources, plain, *others = done
    assert sources == ("any", "sdist", "--dist-dir", dist)
    assert plain == ("any", "build", "bdist_wheel", "--dist-dir", dist)
    work = tmp_path / "build/wheels"
    assert others == [(tmp_path, work / name, name, tmp_path / "jpeg", dist) for name in machines or LEVELS]
    assert capsys.readouterr().out == "a\nb\nc\nd\ne\nf\ng\n"
    assert not (work / "left").exists()


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


@pytest.mark.parametrize("machine", LEVELS)
def test_a_wheel_has_the_libraries_and_their_licences(machine: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """By commands that are kept instead of run: libjpeg-turbo first, then the package, its libraries, its wheel."""
    project, work, jpeg, dist, steps = *(tmp_path / name for name in ("project", "work", "jpeg", "dist")), []
    jpeg.mkdir()
    for name in ("LICENSE.md", "README.ijg"):
        (jpeg / name).write_text(name)
    native = work / "lib/widemix/native"

    def run(*command: object, folder: Path | None = None) -> None:
        words = [str(word) for word in command]
        steps.append((words, folder))
        native.mkdir(parents=True, exist_ok=True)

    def compiled(compiler, target, *flags, libraries, timeout) -> None:
        steps.append((compiler, target, flags, libraries, timeout))

    monkeypatch.setattr(wheels, "run", run)
    monkeypatch.setattr(wheels, "compile_library", compiled)
    wheels.build_wheel(project, work, machine, jpeg, dist)
    (configure, _), (build, _), (package, where), *libraries, (wheel, at) = steps
    assert configure[:5] == ["cmake", "-S", str(jpeg), "-B", str(work / "jpeg")]
    options = dict(word.removeprefix("-D").split("=", 1) for word in configure if word.startswith("-D"))
    tools = {f"CMAKE_{name}": str(work / name.lower()) for name in ("AR", "RANLIB")}
    tools |= {"CMAKE_C_COMPILER": str(work / "cc"), "CMAKE_SYSTEM_PROCESSOR": machine}
    # Hidden symbols in code that a shared library can have, with its vectors.
    tools |= {"CMAKE_BUILD_TYPE": "Release", "CMAKE_SYSTEM_NAME": "Linux", "ENABLE_SHARED": "OFF"}
    needed = {"CMAKE_C_FLAGS": "-fvisibility=hidden", "CMAKE_POSITION_INDEPENDENT_CODE": "ON", "REQUIRE_SIMD": "ON"}
    assert options | tools | needed == options
    assert build == ["cmake", "--build", str(work / "jpeg"), "--target", "jpeg-static"]
    assert (package[-2:], where, at) == (["--build-base", str(work)], project, project)
    assert [step[1].name for step in libraries] == [f"{name}.so" for name in LEVELS[machine]]
    for (compiler, target, flags, linked, timeout), level in zip(libraries, LEVELS[machine].values(), strict=True):
        assert (compiler, target.parent, timeout) == ([str(work / "cc")], native, None)
        own = [flag for flag in level.flags if not flag.startswith("-march")]
        assert list(flags) == [flags[0], *own, f"-I{jpeg / 'src'}", f"-I{work / 'jpeg'}", "-s"]
        assert flags[0].startswith("-mcpu=x86_64_v" if machine == "x86_64" else "-mcpu=generic")
        version = level.flags[0].rpartition("v")[2].removesuffix("-a").replace(".", "_")  # of the instruction set
        assert flags[0].removesuffix("a").endswith("generic" if version == "8" else f"v{version}")
        assert linked == [str(work / "jpeg/libjpeg.a"), "-lpthread", "-lm"]
    platform = f"manylinux_2_28_{machine}"
    assert wheel[-5:] == ["bdist_wheel", "--plat-name", platform, "--dist-dir", str(dist)]
    licences = {path.name: path.read_text() for path in native.iterdir()}
    assert licences == {f"libjpeg-turbo.{name}": name for name in ("LICENSE.md", "README.ijg")}
    assert capsys.readouterr().out.splitlines() == [f"compiled {machine} {name}" for name in LEVELS[machine]]

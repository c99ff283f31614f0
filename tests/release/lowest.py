"""The lowest versions that pyproject.toml allows: `make stress WHAT=lowest` runs tests with all of them at once.

`make stress WHAT=lowest ARGS=--below` then takes the release before each bound, one at a time beside the lowest of
all others, and runs the tests of what imports it: a row for each says what failed. Where the bound was there two
years ago it is not tried: there is no need to go lower (SPEC 0).
"""

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build/lowest/bin/python"
TESTS = """
tests/recipe tests/formats tests/optim tests/models/test_mixer.py tests/models/test_networks.py
tests/data/test_loader.py tests/data_prep/test_pairs.py
tests/library/test_library.py tests/library/test_library_loader.py
"""
# The tests of what imports a package.
IMPORTERS = {
    "torch": "tests/optim tests/models/test_networks.py tests/engine/test_private_names.py",
    "torchvision": "tests/models/test_mixer.py tests/library/test_library_loader.py",
    "timm": "tests/test_timm_import.py tests/optim/test_timm_optimizers.py tests/models/test_timm.py",
    "schedulefree": "tests/optim",
    "torchmetrics": "tests/evaluation/test_assessment.py tests/evaluation/test_macro_means.py",
    "tensorboard": "tests/run/test_metrics.py tests/run/test_metrics.py tests/recipe/test_keys.py",
    "deepspeed": "tests/engine/test_private_names.py tests/recipe/test_keys.py tests/test_layering.py",
    "numba": "tests/data/test_loader.py tests/library/test_library_loader.py",
    "numpy": "tests/formats tests/data/test_loader.py",
    "pillow": "tests/test_versions.py tests/data_prep/test_jpeg.py",
    "scikit-learn": "tests/studies/test_baselines.py tests/evaluation/test_macro_means.py",
    "scipy": "tests/studies/test_claims.py tests/studies/test_baselines.py tests/analysis/test_regularisation.py",
    "pydantic": "tests/recipe tests/optim",
    "PyYAML": "tests/recipe/test_files.py tests/recipe/test_shipped.py",
    "rich": "tests/test_progress_line.py tests/estimate",
    "safetensors": "tests/training/test_finetune.py tests/run/test_checkpoint.py",
    "huggingface_hub": "tests/evaluation/test_model_card.py tests/models/test_hub.py",
    "tokenizers": "tests/data_prep/test_pairs.py",
    "matplotlib": "tests/plots tests/studies/test_figure.py tests/studies/test_report.py",
    "psutil": "tests/test_processes.py tests/test_lease.py",
    "blake3": "tests/formats tests/launch/test_environment.py",
    "packaging": "tests/test_versions.py tests/engine/test_private_names.py",
}


def run(*words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command in the project's folder; ends this program with its output if it fails and `check` is true."""
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"})
    if check and done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done


def bounds() -> dict[str, str]:
    """The lower bound of each package that `IMPORTERS` names."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(required), re.M))
    return {name: found[name] for name in IMPORTERS}


def newest(requirement: str, *options: str) -> str:
    """The newest version that meets a requirement; "" if there is none."""
    with tempfile.NamedTemporaryFile("w", suffix=".in") as file:
        file.write(requirement)
        file.flush()
        text = run("uv", "pip", "compile", "--no-deps", "--python", PYTHON, *options, file.name, check=False).stdout
    found = re.search(r"^[\w.-]+==(\S+)", text, re.M)
    return found[1] if found else ""


def number(version: str) -> tuple[int, ...]:
    """A version's numbers, to compare."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def what_fails(name: str, version: str, installed: str) -> str:
    """What fails with this version of a package beside the others that are installed."""
    others = re.sub(rf"(?im)^{re.escape(name).replace('_', '[-_]')}==.*\n", "", installed)
    direct = "|".join(re.escape(other).replace("_", "[-_]") for other in bounds())
    kept = "\n".join(re.findall(rf"(?im)^(?:{direct})==.*$", others))
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        constraints.write_text(kept)
        options = ("--python", PYTHON, "--constraint", constraints, "--quiet")
        done = run("uv", "pip", "install", *options, f"{name}=={version}", check=False)
        if done.returncode:
            lines = done.stderr.split("╰─▶")[-1].split("\n\n")[0]
            return f"cannot be installed beside the others: {' '.join(lines.split())}"
        try:
            tests = IMPORTERS[name].split()
            done = run(*PYTEST, "-n", "0", "--maxfail", "3", "--tb=no", "-q", *tests, check=False)
            failed = re.findall(r"^(?:FAILED|ERROR) (.*)$", done.stdout, re.M)
            if done.returncode == 0:  # 5: no test was there, which is not that nothing fails
                return f"nothing: {done.stdout.strip().splitlines()[-1]}"
            return "; ".join(failed) or (done.stdout + done.stderr).strip().splitlines()[-1]
        finally:
            before = Path(folder, "before.txt")
            before.write_text(installed)
            run("uv", "pip", "install", "--python", PYTHON, "--quiet", "--no-deps", "--requirement", before)


# What older libraries warn of is no error there.
PYTEST = (PYTHON, "-m", "pytest", "-o", "filterwarnings=default", "-p", "no:cacheprovider")


def below(names: list[str]) -> None:
    """Print a row of the table for each package."""
    two_years_ago = datetime.date.today() - datetime.timedelta(days=731)
    frozen = run("uv", "pip", "freeze", "--python", PYTHON, "--exclude-editable").stdout
    print("| package | lowest | tried | what failed |\n|---|---|---|---|", flush=True)
    for name in names or IMPORTERS:
        bound = bounds()[name]
        old = newest(name, "--exclude-newer", str(two_years_ago))
        if number(old) >= number(bound):
            print(f"| {name} | {bound} | | not tried: {old} was there two years ago (SPEC 0) |", flush=True)
            continue
        version = newest(f"{name}<{bound}")
        text = what_fails(name, version, frozen).replace("|", "\\|")
        print(f"| {name} | {bound} | {version} (two years ago: {old}) | {text} |", flush=True)


def main() -> None:
    """Install, and run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--below", nargs="*", metavar="PACKAGE", help="try the release before the bounds of these, or of all"
    )
    parser.add_argument("--keep", action="store_true", help="take the environment that is there")
    arguments, options = parser.parse_known_args()
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""
    if not (arguments.keep and PYTHON.exists()):
        run("uv", "venv", "--quiet", "--clear", PYTHON.parents[1])
        project = ("--resolution", "lowest-direct", "--editable", ".[dev]")
        run("uv", "pip", "install", "--quiet", "--python", PYTHON, *project)
    if arguments.below is not None:
        return below(arguments.below)
    by_file = ("-n", "logical", "--maxprocesses", "4", "--dist", "loadfile", "--no-loadscope-reorder")
    return sys.exit(subprocess.run([*PYTEST, *by_file, *TESTS.split(), *options], cwd=ROOT).returncode)


if __name__ == "__main__":
    main()

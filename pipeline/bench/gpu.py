"""All that is to be measured on a GPU: commands of this project, one after the other, each within some minutes.

Each part works in its own folder NAME, and leaves NAME.json with its rows; it is repeated only if it failed.
`table.md` has the rows of all parts. In small the same parts run without a GPU, to be tried.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from widemix.bench.report import machine, markdown
from widemix.bench.sample import jpegs, link_repeatedly, prepare
from widemix.cgroups import usable_cpus
from widemix.errors import Exit, InputError
from widemix.files import atomic_write, open_to_write, refuse_link
from widemix.processes import end_with_parent
from widemix.run.records import read_lines
from widemix.terminal import print

VERSIONS = ("torch", "timm", "numpy")
ROOT = Path(__file__).resolve().parents[2]
STUDY, CIFAR = "figure7-small", Path("datasets/cifar10-5000")  # the data that it trains on
ROWS, JUNIT = "rows.json", "junit.xml"  # of `widemix bench` and of pytest
_DONE = "done"  # the state of a part that succeeded
_GRACE_S = 15  # between SIGINT, which lets a command end by itself, and SIGKILL


@dataclass(frozen=True)
class Where:
    """Options and folders that parts depend on."""

    to: Path
    origin: Path  # of the ImageNet JPEGs
    small: bool  # without a GPU


Words = Callable[[Where, Path], Sequence[object]]


@dataclass(frozen=True)
class Part:
    """A measurement: the words of its command after `python -m`, and the rows that it leaves in the part's folder."""

    title: str
    words: Words
    rows: Callable[[Path], list[dict[str, Any]]] = lambda folder: json.loads((folder / ROWS).read_text())["rows"]
    absent: Callable[[Where], str | None] = lambda where: None  # what is missing for it, and how it is had


def _tests(where: Where, folder: Path) -> Sequence[object]:
    files = ["tests/gpu"]
    if not where.small:  # most of their time is that of starts on the CPU
        files = ["-n", str(min(8, usable_cpus())), *files]
        files += ["tests/models/test_batch_last_triton.py", "tests/data/test_normalise_and_mix.py"]
        files += ["tests/data/test_batches.py"]
    return (
        "pytest",
        "--all",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
        *files,
        "--junitxml",
        folder.resolve() / JUNIT,
    )


def _test_rows(folder: Path) -> list[dict[str, Any]]:
    """Counts, and a row for each test that failed."""
    (suite,) = ElementTree.parse(folder / JUNIT).getroot().iter("testsuite")  # pytest has just written it
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = [case for case in suite.iter("testcase") if {"failure", "error"} & {each.tag for each in case}]
    names = [f"failed: {case.get('classname')}::{case.get('name')}" for case in failed]
    return [{"name": "all", **counts}, *({"name": name} | dict.fromkeys(counts) for name in names)]


def _step(recipe: str, batch: int) -> Words:
    def words(where: Where, folder: Path) -> Sequence[object]:
        size = (
            ("digits/mixer", "--batch", 8, "--rounds", 2) if where.small else (recipe, "--batch", batch, "--compiled")
        )
        return "widemix", "bench", "step", *size, "--json", folder / ROWS

    return words


def _scale(*options: str) -> Words:
    """A training step by its parts, on a loader with the whole recipe's augmentation."""

    def words(where: Where, folder: Path) -> Sequence[object]:
        common = ("--data.path", prepared(where), "--to", folder, "--json", folder / ROWS)
        if where.small:
            return "widemix", "bench", "scale", "digits/mixer", "--batch", 32, "--steps", 4, *common
        return "widemix", "bench", "scale", "imagenet/mixer_b16", "--batch", 256, "--steps", 40, *common, *options

    return words


def prepared(where: Where) -> Path:
    """The sample under so many names that it has 50 batches, prepared once; in small the digits."""
    folder = where.to / "data"
    if (folder / "train.beton").exists():
        return folder
    if where.small:
        prepare("digits", None, folder)
    else:
        shutil.rmtree(where.to / "images", ignore_errors=True)  # of a start that was cut off
        link_repeatedly(jpegs(where.origin), where.to / "images", 50 * 256)
        prepare("image-folder", where.to / "images", folder)
    return folder


def _loader(where: Where, folder: Path) -> Sequence[object]:
    """On one thread and on all: with every power of two between it would take over ten minutes."""
    samples, rounds, threads = (100, 1, {1}) if where.small else (1000, 2, {1, usable_cpus()})
    size = ("--from", where.origin, "--samples", samples, "--rounds", rounds, "--threads", *sorted(threads))
    return "widemix", "bench", "loader", *size, "--json", folder / ROWS


def _rounds(name: str, rounds: int) -> Words:
    return lambda where, folder: (
        *("widemix", "bench", name, "--rounds", 1 if where.small else rounds),
        *("--json", folder / ROWS),
    )


def _study(where: Where, folder: Path) -> Sequence[object]:
    """The search and one seed of five, as a part has ten minutes."""
    chosen: Sequence[object] = ("--only", "*seed-0*", "--at-once", 4)
    if where.small:
        chosen = ("--only", "*depth-2*seed-0*", "--train.epochs=1")
    return "widemix", "study", "run", STUDY, "--to", folder / "runs", "--report", folder, *chosen


def _study_rows(folder: Path) -> list[dict[str, Any]]:
    rows = read_lines(folder / f"{STUDY}.jsonl")
    return [{"name": row["run"], "top1": row["metrics"].get("top1"), "seconds": row["seconds"]} for row in rows]


def _no_jpegs(where: Where) -> str | None:
    try:
        jpegs(where.origin)
    except InputError as error:
        return str(error)
    return None


def _no_jpegs_in_large(where: Where) -> str | None:
    return None if where.small else _no_jpegs(where)


def _no_package(name: str) -> str | None:
    return None if find_spec(name) else f"{name} is not installed"


def _no_tests(where: Where) -> str | None:
    return None if (ROOT / "tests/gpu").is_dir() else "only a clone has the tests"


def _no_cifar(where: Where) -> str | None:
    cure = f"widemix prep cifar10 --from DIR --to {CIFAR} --per-class 500 --holdout 10%"
    return None if (CIFAR / "holdout.beton").exists() else f"{CIFAR}: not there; {cure}"


PARTS = {
    "tests": Part("Tests that need a GPU", _tests, _test_rows, _no_tests),
    "b16": Part("A step of Mixer-B/16", _step("imagenet/mixer_b16", 256)),
    "b_w": Part("A step of Mixer-B-W", _step("imagenet/mixer_b_w", 256)),
    "figure7": Part("A step of the S-Mixers of figure 7", _step("cifar10/figure7", 128)),
    "mixup": Part("mixup and CutMix, beside a step of Mixer-B/16", _rounds("mixup", 5)),
    "wait": Part("Mixer-B/16 on the loader with the whole recipe", _scale(), absent=_no_jpegs_in_large),
    "fp8": Part(
        "The same in float8, compiled",
        _scale("--train.fp8", "true", "--train.compile", "true"),
        absent=_no_jpegs_in_large,
    ),
    "loader": Part("The loader", _loader, absent=lambda where: _no_package("ffcv") or _no_jpegs(where)),
    "checkpoint": Part("Saving Mixer-B/16", _rounds("checkpoint", 2), absent=lambda _: _no_package("deepspeed")),
    "study": Part("Figure 7 in the small", _study, _study_rows, _no_cifar),
}


def run_parts(names: Sequence[str], where: Where, minutes: float, parts: Mapping[str, Part] = PARTS) -> Exit:
    """Run the parts that have not succeeded in the folder, and write its table; FAILED if one of them failed.

    Raises `InputError` without a GPU, unless in small.
    """
    if not where.small and not torch.cuda.is_available():
        raise InputError("bench gpu: this machine has no GPU that PyTorch can use; --small tries all parts without")
    where.to.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in names:
        if _read(where, name).get("state") == _DONE:
            print(f"{name}: in {where.to} already", flush=True)
        elif reason := parts[name].absent(where):
            print(f"{name}: left out, as {reason}", flush=True)
        else:
            failed |= not _run_part(name, parts[name], where, 60 * minutes)
        atomic_write(where.to / "table.md", table(where, parts))
    print(where.to / "table.md")
    return Exit.FAILED if failed else Exit.DONE


def _record(where: Where, name: str) -> Path:
    """The file that a part leaves when it has ended: command, state, seconds, machine, and rows if there are any."""
    return where.to / f"{name}.json"


def _read(where: Where, name: str) -> dict[str, Any]:
    path = _record(where, name)
    return json.loads(path.read_text()) if path.exists() else {}


def _run_part(name: str, part: Part, where: Where, limit: float) -> bool:
    """Whether the part ended within `limit` seconds without an error."""
    folder = where.to / name
    refuse_link(folder)
    folder.mkdir(exist_ok=True)
    for earlier in (ROWS, JUNIT):
        (folder / earlier).unlink(missing_ok=True)  # of an earlier try, which this one may not come to
    output = folder / "output.txt"
    command = [str(word) for word in part.words(where, folder)]
    print(f"{name}: {shlex.join(command)}", flush=True)
    began = time.monotonic()
    with open_to_write(output, "w") as log:
        code = _run(command, log, limit)
    seconds = round(time.monotonic() - began, 1)
    state = {0: _DONE, None: f"ran past {limit / 60:g} minutes"}.get(code, f"exit code {code}")
    print(f"{name}: {state}, {seconds:g} s" + ("" if code == 0 else f"; its output: {output}"), flush=True)
    try:
        rows = part.rows(folder)
    except FileNotFoundError:  # it has not come so far
        rows = []
    kept = {"command": shlex.join(command), "state": state, "seconds": seconds, "machine": machine(*VERSIONS)}
    atomic_write(_record(where, name), json.dumps(kept | {"rows": rows}, indent=1) + "\n")
    return code == 0


def _run(words: Sequence[str], log: Any, limit: float) -> int | None:
    """The exit code of `python -m WORDS` with its output in `log`; None if it was ended after `limit` seconds."""
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=ROOT if words[0] == "pytest" else None,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=end_with_parent(),
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen) -> None:
    """End a process and those that it has started: as Ctrl-C does, and then for certain."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def table(where: Where, parts: Mapping[str, Part] = PARTS) -> str:
    """All parts that have ended, in Markdown: how, and their rows."""
    texts = []
    for name, part in parts.items():
        if kept := _read(where, name):
            head = (
                f"## {part.title}\n\n`{kept['command']}`: {kept['state']}, {kept['seconds']:g} s; {kept['machine']}"
            )
            texts.append(f"{head}\n\n{markdown(kept['rows'])}" if kept["rows"] else f"{head}\n")
    return "\n".join(texts)

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
ROWS, JUNIT = "rows.json", "junit.xml"  # of `widemix bench` and of pytest
_DONE = "done"  # the state of a part that succeeded
_GRACE_S = 15  # between SIGINT, which lets a command end by itself, and SIGKILL


@dataclass(frozen=True)
class Where:
    """Options and folders that parts depend on."""

    to: Path
    origin: Path  # of the ImageNet JPEGs
    small: bool  # without a GPU


@dataclass(frozen=True)
class Part:
    """A measurement: its command after `python -m`, as it is and in small, and the rows that it leaves in its folder.

    A command names `{folder}`, the part's; `{data}`, the images prepared; `{origin}`, their folder; and `{cpus}`.
    """

    title: str
    large: str
    small: str
    rows: Callable[[Path], list[dict[str, Any]]] = lambda folder: json.loads((folder / ROWS).read_text())["rows"]
    absent: Callable[[Where], str | None] = lambda where: None  # what is missing for it, and how it is had

    def words(self, where: Where, folder: Path) -> list[str]:
        """The words of its command; what it reads is prepared."""
        text = self.small if where.small else self.large
        places: dict[str, object]
        places = {"folder": folder.resolve(), "origin": where.origin, "cpus": min(8, usable_cpus())}
        places["data"] = prepared(where) if "{data}" in text else ""
        return [word.format(**places) for word in text.split()]


def _test_rows(folder: Path) -> list[dict[str, Any]]:
    """Counts, and a row for each test that failed."""
    (suite,) = ElementTree.parse(folder / JUNIT).getroot().iter("testsuite")  # pytest has just written it
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = [case for case in suite.iter("testcase") if {"failure", "error"} & {each.tag for each in case}]
    names = [f"failed: {case.get('classname')}::{case.get('name')}" for case in failed]
    return [{"name": "all", **counts}, *({"name": name} | dict.fromkeys(counts) for name in names)]


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


def _study_rows(folder: Path) -> list[dict[str, Any]]:
    rows = read_lines(folder / f"{folder.name}.jsonl")
    return [{"name": row["run"], "top1": row["metrics"].get("top1"), "seconds": row["seconds"]} for row in rows]


def _no_jpegs(where: Where) -> str | None:
    try:
        jpegs(where.origin)
    except InputError as error:
        return str(error)
    return None


def _bench(title: str, large: str, small: str, absent: Callable[[Where], str | None] = lambda where: None) -> Part:
    command = f"widemix bench {{}} --json {{{{folder}}}}/{ROWS}".format
    return Part(title, command(large), command(small), absent=absent)


def _step_part(title: str, recipe: str, batch: int) -> Part:
    return _bench(title, f"step {recipe} --batch {batch} --compiled", "step digits/mixer --batch 8 --rounds 2")


def _loader_part(threads: int) -> Part:
    """On so many threads: with all numbers of them it would take over ten minutes."""

    def absent(where: Where) -> str | None:
        few = not where.small and threads > usable_cpus()
        return f"this process may use {usable_cpus()} CPUs" if few else _no_jpegs(where)

    text = "loader --from {{origin}} --samples {} --rounds {} --threads {}".format
    large, small = text(max(1000, 500 * threads), 3, threads), text(100, 1, 1)
    return _bench(f"The loader on {threads} threads", large, small, absent)


def _study_part(name: str, title: str, source: str) -> Part:
    """One seed of a study, or what of it fits; the next time it goes on."""
    command = f"widemix study run {name} --to {{folder}}/runs --report {{folder}} --only *seed-0*"
    data = Path("datasets") / source
    cure = f"{data}: not there; widemix prep {source} --from DIR --to {data}"
    own = f"{command} --at-once 4", f"{command} --train.epochs=1"
    return Part(title, *own, _study_rows, lambda where: None if (data / "train.beton").exists() else cure)


_TESTS = f"pytest --all -q -p no:cacheprovider -W default --junitxml {{folder}}/{JUNIT} tests/gpu"
_MORE_TESTS = "tests/models/test_batch_last_triton.py tests/data/test_normalise_and_mix.py tests/data/test_batches.py"
_DATA = "--data.path {data} --data.eval_split train --to {folder}/runs"
# In the order of their worth.
PARTS = {
    "tests": Part(
        "Tests that need a GPU",
        f"{_TESTS} {_MORE_TESTS} -n {{cpus}}",  # most of their time is that of starts on the CPU
        _TESTS,
        _test_rows,
        lambda where: None if (ROOT / "tests/gpu").is_dir() else "only a clone has the tests",
    ),
    "b16": _step_part("A step of Mixer-B/16", "imagenet/mixer_b16", 256),
    "wait": _bench(  # on packed JPEGs with the whole recipe; and a trace of some of its steps
        "Mixer-B/16 on its loader, beside the bare step",
        f"loop imagenet/mixer_b16 --train.global_batch 256 --rounds 3 --train.profile 20:24 {_DATA}",
        f"loop digits/mixer --rounds 1 --lines 1 --train.profile 4:6 {_DATA}",
        lambda where: None if where.small else _no_jpegs(where),
    ),
    "loader_16": _loader_part(16),
    "loader_1": _loader_part(1),
    "b_w": _step_part("A step of Mixer-B-W", "imagenet/mixer_b_w", 256),
    "figure7": _step_part("A step of the S-Mixers of figure 7", "cifar10/figure7", 128),
    "s_mixer": _step_part("A step of the S-Mixers of figure 5", "cifar10/s_mixer", 128),
    "loader_4": _loader_part(4),
    "loader_8": _loader_part(8),
    "loader_2": _loader_part(2),
    "mixup": _bench("mixup and CutMix, beside a step of Mixer-B/16", "mixup --rounds 5", "mixup --rounds 1"),
    "fp8": _bench(  # by its parts, on a loader with the whole recipe's augmentation
        "Mixer-B/16 in float8, compiled",
        "scale imagenet/mixer_b16 --batch 256 --steps 40 --train.fp8 true --train.compile true --data.path {data} "
        "--to {folder}",
        "scale digits/mixer --batch 32 --steps 4 --data.path {data} --to {folder}",
        lambda where: None if where.small else _no_jpegs(where),
    ),
    "checkpoint": _bench(
        "Saving Mixer-B/16",
        "checkpoint --rounds 2",
        "checkpoint --rounds 1",
        lambda where: None if find_spec("deepspeed") else "deepspeed is not installed",
    ),
    "figure2d": _study_part("figure2d", "Figure 2d, the first seed", "mnist"),
    "figureS8": _study_part("figureS8", "Figure S.8, the first seed", "cifar10"),
    "figureS1_left": _study_part("figureS1_left", "Figure S.1 (left), the first seed", "cifar10"),
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
    command = part.words(where, folder)
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

"""Damaged run folders, recipes, studies, tables, manifests, checkpoints and exports through their readers.

A reader returns, or raises an InputError; any other end is a fault: another exception, a signal, more memory than
`MEMORY`, more time than `SECONDS`. Cases run in processes of their own.
"""

import contextlib
import copy
import io
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.report.test_hostile_runs import contents, write
from widemix.cli.commands import run_command
from widemix.cli.parser import make_parser
from widemix.engine.state import State
from widemix.errors import Exit, InputError
from widemix.evaluation.networks import load_network
from widemix.models.export import export_model
from widemix.models.registry import build_model
from widemix.recipe import load_recipe
from widemix.recipe.files import SHIPPED
from widemix.run import checkpoint
from widemix.studies.rows import Table
from widemix.studies.study import read_study, study_runs_of

MEMORY, SECONDS = 2 << 30, 20  # of a case; memory beyond that which the process has already
AT_ONCE = 50  # cases of a process
STUDY = "table1-small"
RUN_FILES = (
    "metrics.jsonl", "starts.jsonl", "done.json", "environment.json", "evaluations.jsonl", "confusion.json",
    "recipe.yaml", "checkpoints/00000003/state.json", "checkpoints/00000003/COMPLETE",
    "checkpoints/00000003/model.safetensors",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 0.5, 2**31, 2**63, -(2**70), 10**400, 1e308, -1e308, float("nan"), float("inf"), "", "0", "x",
    "x" * 100_000, "\ud800", "\x00\x1b", "../../etc", [], [[]], {}, {"": ""}, [0] * 10_000, "${x}",
)  # fmt: skip
BYTES = (
    b"\x00",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"9" * 5000,
    b"\n",
    b'"',
    b"&a [*a]",
    b"1e999999",
    b"\r",
)


def make(folder: Path) -> None:
    """Write what is intact: a run with a checkpoint, a recipe, a study with its table, lists of images, ..."""
    write(folder / "run", contents())
    recipe = load_recipe("digits/mixer", [("data.path", "none"), ("data.num_classes", "10"), ("model.depth", "1")])
    network = build_model(recipe.model, recipe.data.image_size, 10)
    position = {"step": 3, "data_step": 3, "seconds": 1.0, "scalars": {}, "metrics": {}}
    known = checkpoint.Position(recipe=recipe.model_dump(mode="json"), **position)
    weights = {name: value.detach() for name, value in network.state_dict().items()}
    state = State(weights, {"a": torch.zeros(2)}, {}, {})
    checkpoint.save(folder / "run", state, known, checkpoint.RetentionPolicy(1))
    export_model(network, recipe.model, folder / "export", data=recipe.data, labels=[*map(str, range(10))])
    shutil.copy(SHIPPED / "digits/mixer.yaml", folder / "recipe.yaml")
    shutil.copy(SHIPPED / f"studies/{STUDY}.yaml", folder)
    shutil.copy(SHIPPED / f"studies/results/{STUDY}.jsonl", folder)
    (folder / "images").mkdir()
    rows = [{"path": f"images/{number}.png", "label": number % 2, "split": "train"} for number in range(4)]
    for number in range(4):
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(folder / f"images/{number}.png")
    (folder / "list.csv").write_text(
        "path,label,split\n" + "".join(f"{','.join(map(str, r.values()))}\n" for r in rows)
    )
    (folder / "list.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    command("prep", "csv", "--from", folder / "list.csv", "--to", folder / "prepared", "--quality", "90")


def command(*words: object) -> None:
    """Run a command of the command line; raise AssertionError where it shows a traceback."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = run_command(make_parser(), None, [*map(str, words)])
    assert code in (Exit.DONE, Exit.WRONG_INPUT, Exit.FAILED)
    assert "Traceback" not in said.getvalue(), said.getvalue()


def read_run(folder: Path) -> None:
    """Show a run in all ways, and read its checkpoint."""
    command("runs", "csv", folder)
    command("runs", folder)
    command("report", folder / "run", "--to", folder / "page.html")
    with contextlib.suppress(InputError):
        found = checkpoint.find(folder / "run")
        found.load()
    with contextlib.suppress(InputError):
        load_network(str(folder / "run"))


def read_studies(folder: Path) -> None:
    """Read a study, its runs' names, and the rows of its table."""
    table = Table(folder / f"{STUDY}.jsonl")
    study = read_study(folder / f"{STUDY}.yaml")
    with contextlib.suppress(InputError):
        table.missing(study_runs_of(folder / f"{STUDY}.yaml", study))


READERS: dict[str, Callable[[Path], object]] = {
    **{f"run/{name}": read_run for name in RUN_FILES},
    "recipe.yaml": lambda folder: load_recipe(str(folder / "recipe.yaml")),
    f"{STUDY}.yaml": read_studies,
    f"{STUDY}.jsonl": read_studies,
    **{
        f"list.{kind}": lambda folder, kind=kind: command(
            "prep", "csv", "--from", folder / f"list.{kind}", "--to", folder / "new", "--quality", "90"
        )
        for kind in ("csv", "jsonl")
    },
    "prepared/manifest.json": lambda folder: command("verify", folder / "prepared"),
    "export/config.json": lambda folder: load_network(str(folder / "export")),
    "export/model.safetensors": lambda folder: load_network(str(folder / "export")),
}


def mutated(data: bytes, name: str, rng: random.Random) -> bytes:
    """Damage a file: values of its JSON, or bytes."""
    if name.endswith((".json", ".jsonl", "COMPLETE")) and rng.random() < 0.7:
        lines = data.splitlines() if name.endswith(".jsonl") else [data]
        at = rng.randrange(len(lines))
        lines[at] = json.dumps(_changed(json.loads(lines[at]), rng)).encode()
        return b"\n".join(lines) + b"\n"
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 3))):
        # Of a long file the first bytes, where its header is, as often as all others.
        at = rng.randrange(min(len(changed), rng.choice((16, 1000, 1 << 30))) + 1)
        stop = at + rng.choice((0, 1, 8, 200))
        piece = rng.choice((b"", bytes([rng.randrange(256)]), rng.choice(BYTES), bytes(changed[at:stop]) * 2))
        changed[at:stop] = piece
    return bytes(changed)


def _changed(value: Any, rng: random.Random) -> Any:
    """A value of JSON with one of its parts replaced, removed or repeated."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.1:
        return rng.choice(VALUES)
    value = copy.copy(value)
    at = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    kind = rng.random()
    if kind < 0.1:
        del value[at]
    elif kind < 0.2 and isinstance(value, list):
        value.insert(at, value[at])
    elif kind < 0.2:
        value[rng.choice(("x" * 1000, "\x1b", "step"))] = value[at]
    else:
        value[at] = _changed(value[at], rng)
    return value


def _run(intact: Path, name: str, rng: random.Random) -> str:
    """Run a case; return what is wrong, or ""."""
    with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stderr(io.StringIO()):
        try:
            folder = Path(shutil.copytree(intact, Path(temporary) / "case"))
            (folder / name).write_bytes(mutated((folder / name).read_bytes(), name, rng))
            READERS[name](folder)
        except InputError as error:
            return "" if str(error) else "an error without a message"
        except BaseException:
            return traceback.format_exc()
    return ""


def _run_all(intact: Path, seed: int, numbers: range, writer: int) -> None:
    """Run cases in this process, which it ends, and write a line of JSON before and after each."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # a forked process has no threads of the pool
    for number in numbers:
        signal.alarm(SECONDS)
        os.write(writer, f"{json.dumps([number, None])}\n".encode())
        said = _run(intact, name_of(number), random.Random(f"{seed} {number}"))
        os.write(writer, f"{json.dumps([number, said[-20_000:]])}\n".encode())
    os._exit(0)


def name_of(number: int) -> str:
    """The file that a case damages."""
    return list(READERS)[number % len(READERS)]


def faults(seed: int, numbers: range) -> Iterator[str]:
    """Run cases; yield of each what is wrong, or "". What ends a process is the fault of the case that it was at."""
    with tempfile.TemporaryDirectory() as name:
        intact = Path(name) / "intact"
        intact.mkdir()
        make(intact)
        while numbers:
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                _run_all(intact, seed, numbers[:AT_ONCE], writer)
            os.close(writer)
            last = numbers[0]
            with os.fdopen(reader) as file:
                for last, said in map(json.loads, file):
                    if said is not None:
                        yield said and f"case {last} of seed {seed}, {name_of(last)}: {said}"
            _, status = os.waitpid(child, 0)
            if status:
                ended = os.waitstatus_to_exitcode(status)
                yield f"case {last} of seed {seed}, {name_of(last)}: ended by {ended}, where -14 is {SECONDS} s"
            numbers = numbers[last - numbers[0] + 1 :]

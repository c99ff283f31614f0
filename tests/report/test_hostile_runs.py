"""Run folders from strangers: a script in any field of any file stays text on the page, or is refused in one line."""

import copy
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from widemix.cli.commands import run_command
from widemix.cli.parser import make_parser
from widemix.recipe import dump_recipe, load_recipe

NAME = "\"'><img src=x onerror=parent.postMessage(1,`*`)>&lt;b&gt;"
EVIL = f"</title></style></script></textarea>--><script>parent.postMessage(1,'*')</script>{NAME}"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def contents() -> dict[str, Any]:
    """What the files of a run say, each with all its fields: a list for a file of lines."""
    split = {"step": 10, "epoch": 1.0, "time": 1e9, "loss": 2.0}
    train = {"lr": 1e-3, "images_per_s": 9.0, "data_wait": 0.1, "grad_norm": 1.0, "grad_norm/blocks.0": 2.0}
    lines = [split | train | {"step": step, "time": 1e9 + step, "split": "train"} for step in (1, 2, 3)]
    lines += [split | {"step": step, "split": "eval", "top1": 50.0, "top5": 90.0, "ema_loss": 1.0} for step in (2, 3)]
    events = [
        {"event": "step_skipped", "loss": 1.0, "grad_norm": 2.0},
        {"event": "loss_spike", "loss": 1.0, "expected": 0.5},
        {"event": "save_failed", "reason": "no space"},
        {"event": "evaluation_failed", "loss": 3.0},
        {"event": "rollback", "from": 12, "skipped_ranges": [3, 4], "reason": "a spike"},
        {"event": "diverged", "reason": "loss"},
        {"event": "stopped"},
    ]
    lines += [{"step": 3, "time": 1e9, "split": "event"} | event for event in events]
    start = {"time": 1e9, "step": 1, "ranks": 2, "logs": "a", "memory_layout": "plain", "seconds": {"imports": 1.0}}
    done = {"step": 3, "seconds": 9.0, "loss": 1.0, "top1": 50.0, "top5": 90.0, "recipe": "0" * 16}
    evaluation = {"step": 2, "data": "d", "split": "val", "ema": False, "loss": 1.0, "top1": 2.0, "top5": 3.0}
    return {
        "recipe.yaml": yaml.safe_load(dump_recipe(load_recipe("digits/mixer", []))),
        "environment.json": {
            "ranks": 2,
            "device": "cpu",
            "commit": "c" * 40,
            "host": "h",
            "versions": {"torch": "2"},
        },
        "metrics.jsonl": lines,
        "starts.jsonl": [start],
        "done.json": done,
        "evaluations.jsonl": [evaluation],
        "confusion.json": {"step": 3, "classes": ["a", "b"], "counts": [[5, 1], [2, 7]]},
    }


def changes(value: Any, new: Any, kind: type = object) -> Iterator[Any]:
    """A value with one of its parts replaced, for each part of a kind and each list or mapping, or with one more."""
    if isinstance(value, (dict, list)):
        for at in value if isinstance(value, dict) else range(len(value)):
            for part in changes(value[at], new, kind):
                changed = copy.copy(value)
                changed[at] = part
                yield changed
        if isinstance(value, dict):
            yield value | {new: 1.0}
    if isinstance(value, kind):
        yield new


def write(folder: Path, files: dict[str, Any]) -> Path:
    (folder / "images").mkdir(parents=True)
    for name, content in files.items():
        texts = content if name.endswith(".jsonl") and isinstance(content, list) else [content]
        (folder / name).write_text("".join(f"{json.dumps(text)}\n" for text in texts))  # JSON is YAML too
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(folder / "images/mistakes.png")
    return folder


def report(run: Path, page: Path) -> str | None:
    """The page of a run; None where it is refused."""
    code = run_command(make_parser(), None, ["report", str(run), "--to", str(page)])
    assert code in (0, 2)
    return page.read_text() if code == 0 else None


class Elements(HTMLParser):
    """The elements of a page, each with its attributes' names."""

    def __init__(self, page: str):
        super().__init__()
        self.found: set[tuple[str, ...]] = set()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.found.add((tag, *(name for name, _ in attributes)))
        for name, value in attributes:
            assert name != "style" or re.fullmatch(r"background:rgba\(var\(--heat\),[\d.]+\)", value)


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> list[Path]:
    """A page of each run that has a script in one field, if it is not refused; the first is of a run without one."""
    folder = tmp_path_factory.mktemp("hostile")
    clean, written = contents(), []
    kinds = {"recipe.yaml": str}  # of other keys it is refused before it is shown: tests/recipe
    changed = ((name, new) for name in clean for new in changes(clean[name], EVIL, kinds.get(name, object)))
    variants = [clean, *(clean | {name: new} for name, new in changed)]
    for number, files in enumerate(variants):
        run = write(folder / f"{number}{NAME if number else 'run'}", files)
        page = folder / f"{number}.html"
        if report(run, page) is not None:
            written.append(page)
        shutil.rmtree(run)
    assert written[0].name == "0.html"
    return written


def test_a_script_in_any_field_adds_no_element(pages):
    clean, *others = [Elements(page.read_text()).found for page in pages]
    assert len(others) > 40
    assert [found - clean for found in others] == [set()] * len(others)


def test_no_script_of_a_run_runs_in_a_browser(pages, tmp_path):
    """Nor where a browser knows no Content-Security-Policy; one that does runs none if it were in the page."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("needs a browser: apt-get install chromium")
    shown = [page.read_text() for page in pages]
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    assert all(len(policy.findall(page)) == 1 for page in shown)
    injected = shown[0].replace("<h1>", f"{EVIL}<h1>")
    control = policy.sub("", injected)
    for number, page in enumerate([control, injected, *(policy.sub("", page) for page in shown)]):
        (tmp_path / f"{number}.html").write_text(page)
    frames = "".join(f'<iframe src="{number}.html"></iframe>' for number in range(len(shown) + 2))
    count = "addEventListener('message', e => { document.title += Array.from(frames).indexOf(e.source) + ',' })"
    (tmp_path / "all.html").write_text(f"<title></title><script>{count}</script>{frames}")
    words = ["--headless", "--disable-gpu", "--dump-dom", f"--user-data-dir={tmp_path / 'profile'}"]
    words += ["--no-sandbox"] if os.getuid() == 0 else []
    words += ["--virtual-time-budget=20000", (tmp_path / "all.html").as_uri()]
    done = subprocess.run([browser, *words], capture_output=True, text=True, timeout=120)
    title = re.search("<title>(.*?)</title>", done.stdout)
    assert title, done.stderr
    assert set(title[1].split(",")) == {"0", ""}  # the first alone: nothing escaped it, and no policy forbade it

"""The public names of `widemix`, and training from Python."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import widemix
from tests.cli.test_arguments import arguments_of
from tests.conftest import train_lines
from tests.forks import Forks, group_of
from widemix.data_prep.verify import repair_command, verify
from widemix.formats.beton import open_beton

RECIPE = Path(__file__).parents[2] / "recipes/digits/rp_mixer.yaml"


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(hasattr(widemix, name) for name in widemix.__all__)
    assert widemix.__version__ == version("widemix")
    with pytest.raises(AttributeError, match="no attribute 'Lodaer'"):
        widemix.Lodaer  # noqa: B018


def test_importing_it_imports_no_torch() -> None:
    program = "import sys, widemix; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=RECIPE.parents[2], check=True)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(ModuleNotFoundError, "No module named 'ffcv'"), (ImportError, "libopencv_core.so: no such file")],
)
def test_without_ffcv_its_operations_say_how_to_install_it(kind: type[ImportError], reason: str) -> None:
    """As an ImportError, which scripts catch that can do without."""
    program = f"""import sys

class Missing:
    def find_spec(name, *_):
        if name == "ffcv":
            raise {kind.__name__}({reason!r})

sys.meta_path.insert(0, Missing)
try:
    import widemix.ffcv
except ImportError as error:
    print(error, error.__suppress_context__)"""
    found = subprocess.run([sys.executable, "-c", program], cwd=RECIPE.parents[2], capture_output=True, text=True)
    assert found.stdout == (
        f"widemix.ffcv: FFCV cannot be imported ({reason}); install it: as root "
        "`apt-get install g++ pkg-config libopencv-dev libturbojpeg0-dev python3-dev`, then "
        "`pip install 'widemix[ffcv]'` True\n"
    )


def small(folder: Path, **keys: Any) -> Any:
    """A recipe of a few steps on prepared digits."""
    values = {"data.path": folder, "data.workers": 1, "train.epochs": 5, "train.max_steps": 3}
    values |= {"model.depth": 1, "train.global_batch": 32, "log.tensorboard": "false", "log.every": 1} | keys
    return widemix.load_recipe(RECIPE, [(name, str(value)) for name, value in values.items()])


def test_a_recipe_is_prepared_built_trained_and_evaluated(tmp_path: Path, capsys) -> None:
    """Its first and last steps are printed, as by `widemix train` without options."""
    manifest = widemix.prepare("digits", tmp_path / "digits", per_class=16)
    assert manifest.splits["train"].samples == 160
    recipe = small(tmp_path / "digits")
    assert widemix.build_model(recipe)(torch.zeros(2, 3, 8, 8)).shape == (2, 10)
    done = widemix.train(recipe, tmp_path / "run")
    assert done is not None
    assert done["step"] == 3
    printed = re.findall(r"step (\d)/3", capsys.readouterr().err)
    assert (printed[0], printed[-1]) == ("1", "3")
    assert widemix.evaluate(tmp_path / "run") == {name: done[name] for name in ("loss", "top1", "top5")}
    with pytest.raises(widemix.InputError, match="holds a run already"):
        widemix.train(recipe, tmp_path / "run", resume="never")


def train_as_a_rank(digits: str, folder: str) -> None:
    """Twice: a signal comes, and there are a few steps. What it returns is written to a file."""
    stopped = Path(folder, "stopped")

    def signal_later() -> None:
        while len(train_lines(stopped)) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=signal_later, daemon=True).start()
    found = [widemix.train(small(Path(digits), **{"train.max_steps": 220}), stopped)]
    found.append(widemix.train(small(Path(digits)), Path(folder, "ended")))
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def test_a_training_returns_metrics_to_rank_0_alone(digits: Path, tmp_path: Path) -> None:
    """None where a signal stopped it; no metrics on other ranks."""
    words = str(digits), str(tmp_path)
    codes, said = Forks(train_as_a_rank, *words, log=tmp_path / "log", environs=group_of(2)).wait()
    assert not any(codes), said
    done = json.loads((tmp_path / "ended/done.json").read_text())
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [[None, done], [None, {}]]


@pytest.mark.parametrize(
    ("recipe", "name"), [("digits/mixer", "digits/mixer"), (widemix.load_recipe("digits/mixer"), "recipe.yaml")]
)
def test_a_recipe_or_its_name_is_trained(
    recipe: Any, name: str, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets/digits").symlink_to(digits)
    monkeypatch.chdir(tmp_path)
    given = arguments_of(lambda: widemix.train(recipe, "run", resume="never"), "trainer.train")
    trained = widemix.load_recipe("digits/mixer", [("data.num_classes", "10")])
    assert [*given.values()][:4] == [trained, Path("run"), "never", Path(name)]


def encoded(seed: int) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.RandomState(seed).randint(0, 256, (20, 30, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


def stored(folder: Path, split: str) -> list[tuple[int, bytes]]:
    beton = open_beton(folder / f"{split}.beton")
    return [(int(beton.label[i]), beton.bytes[beton.offset[i] : beton.stop[i]].tobytes()) for i in range(len(beton))]


def test_pairs_of_images_and_labels_are_prepared(tmp_path: Path) -> None:
    """From generators, of bytes and of paths; the same call again finds nothing to do, and what has changed."""
    (tmp_path / "a.jpg").write_bytes(encoded(100))

    def pairs(last: int = 39) -> Iterator[tuple[bytes | Path, str]]:
        for seed in range(39):
            yield encoded(seed), ("owl", "cat")[seed % 2]
        yield tmp_path / "a.jpg", "owl"
        yield encoded(last), "cat"

    out, settings = tmp_path / "out", {"restart_markers": False, "processes": 1}
    manifest = widemix.prepare({"train": pairs(), "val": [(encoded(7), "bee")]}, out, **settings)
    assert manifest.classes == ("bee", "cat", "owl")
    wanted = [(2 - seed % 2, encoded(seed)) for seed in range(39)] + [(2, encoded(100)), (1, encoded(39))]
    assert stored(out, "train") == wanted
    assert stored(out, "val") == [(0, encoded(7))]
    assert verify(out) == []
    assert widemix.prepare({"train": pairs(), "val": [(encoded(7), "bee")]}, out, **settings) == manifest
    with pytest.raises(widemix.InputError, match=r"holds train/40-\w{8}, no longer in python"):
        widemix.prepare({"train": pairs(last=41), "val": [(encoded(7), "bee")]}, out, **settings)
    assert sorted(os.listdir(tmp_path)) == ["a.jpg", "out"]
    assert "widemix.prepare(" in repair_command(out)
    numbers = widemix.prepare([(str(tmp_path / "a.jpg"), 2), (encoded(1), np.int64(0))], tmp_path / "numbers")
    assert numbers.splits["train"].per_class == (1, 0, 1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", ["a script", "a piped script", "a notebook"])
def test_a_preparation_does_not_run_the_users_script_again(tmp_path: Path, way: str) -> None:
    """Which is not written as `multiprocessing` wants it, or is in no file."""
    for number in range(80):
        (tmp_path / f"images/train/{'ab'[number % 2]}").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"images/train/{'ab'[number % 2]}/{number}.jpg").write_bytes(encoded(number))
    program = """
import resource
import psutil
import widemix
from widemix.data_prep import image_processes
image_processes.MIN_SECONDS_PER_PROCESS = 1e-9
print("runs")
before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
widemix.prepare("image-folder", "out", "images", processes=3)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime > before + 0.1, psutil.Process().children())
"""
    (tmp_path / "script.py").write_text(program)
    words = {"a script": ["script.py"], "a piped script": ["-"], "a notebook": ["-c", f"exec({program!r}, {{}})"]}[
        way
    ]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(RECIPE.parents[2])},
        input=program,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "runs\nTrue []\n"), done.stderr
    widemix.prepare("image-folder", tmp_path / "alone", tmp_path / "images", processes=1)
    assert stored(tmp_path / "out", "train") == stored(tmp_path / "alone", "train")

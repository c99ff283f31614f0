"""The public names of `widemix`, and training from Python."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from PIL import Image

import widemix
from tests.cli.test_arguments import arguments_of
from widemix.data_prep.settings import PrepSettings
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


def test_a_recipe_is_prepared_built_trained_and_evaluated(tmp_path: Path, monkeypatch, capsys) -> None:
    """Its steps are printed now and then, as by `widemix train` without options."""
    monkeypatch.setattr("widemix.tally._LINES", 1e6)
    manifest = widemix.prepare("digits", tmp_path / "digits", per_class=16)
    assert manifest.splits["train"].samples == 160
    keys = {"data.path": tmp_path / "digits", "data.workers": 1, "train.epochs": 5, "train.max_steps": 3}
    small = {"model.depth": 1, "train.global_batch": 32, "log.tensorboard": "false", "log.every": 1}
    recipe = widemix.load_recipe(RECIPE, [(name, str(value)) for name, value in (keys | small).items()])
    assert widemix.build_model(recipe)(torch.zeros(2, 3, 8, 8)).shape == (2, 10)
    done = widemix.train(recipe, tmp_path / "run")
    assert done is not None
    assert done["step"] == 3
    assert re.findall(r"step (\d)/3", capsys.readouterr().err) == ["1", "3"]
    assert widemix.evaluate(tmp_path / "run") == {name: done[name] for name in ("loss", "top1", "top5")}
    with pytest.raises(widemix.InputError, match="holds a run already"):
        widemix.train(recipe, tmp_path / "run", resume="never")


@pytest.mark.parametrize("memory_layout", ["auto", "plain", "batch_last"])
def test_a_loop_of_ones_own_chooses_the_memory_layout(memory_layout: str) -> None:
    torch.manual_seed(0)
    model, x = widemix.build_model("digits/rp_mixer"), torch.randn(8, 3, 8, 8)
    expected = model(x)
    chosen = widemix.choose_memory_layout(model, 8, memory_layout=memory_layout)
    assert chosen == memory_layout or (memory_layout == "auto" and chosen in ("plain", "batch_last"))
    assert {block.batch_last for block in model.blocks} == {chosen == "batch_last"}  # type: ignore[attr-defined, union-attr]
    torch.testing.assert_close(model(x), expected)


def test_networks_that_are_no_mixer_have_one_way() -> None:
    assert widemix.choose_memory_layout(torch.nn.Linear(2, 2), 8, "bf16") == "plain"
    for arguments, said in (
        ((0,), "batch_size 0"),
        ((8, "int8"), "precision"),
        ((8, "fp32", "fast"), "memory_layout"),
        ((8, "fp32", "batch_last"), "the network is no Mixer of images"),
    ):
        with pytest.raises(widemix.InputError, match=said):
            widemix.choose_memory_layout(torch.nn.Linear(2, 2), *arguments)  # type: ignore[arg-type]


def test_the_arguments_of_a_layouts_choice_reach_it() -> None:
    model = torch.nn.Linear(2, 2, device="meta")
    found = arguments_of(
        lambda: widemix.choose_memory_layout(model, 6, "bf16", "batch_last"),
        "engine.memory_layout.choose_memory_layout",
    )
    network, engine, train, batch, device = found.values()
    assert (network, batch, device) == (model, 6, torch.device("meta"))
    assert (engine.memory_layout, train.precision, train.global_batch) == ("batch_last", "bf16", 6)


CSV: dict[str, Any] = {"origin": Path("table.csv"), "processes": 3, "force": True, "extend": True, "max_bad": 0.25}
PAIRS: Any = [(b"", 0)]
PLAIN: dict[str, Any] = {"origin": None, "processes": None, "force": False, "extend": False, "max_bad": 0.01}
# A call, the function that does its work, and the arguments of that.
CALLS: list[tuple[Callable[[], Any], str, dict[str, Any]]] = [
    (lambda: widemix.evaluate("a", "b", "c", 7, ema=True), "evaluation.assessment.evaluate_checkpoint",
     {"path": Path("a"), "data": Path("b"), "split": "c", "batch": 7, "ema": True}),
    (lambda: widemix.evaluate(Path("a")), "evaluation.assessment.evaluate_checkpoint",
     {"path": Path("a"), "data": None, "split": None, "batch": None, "ema": False}),
    (lambda: widemix.prepare("csv", Path("a"), shuffle=False, max_size=77, **CSV), "data_prep.prepare.prepare",
     {"source": "csv", "to": Path("a"), "settings": PrepSettings(shuffle=False, max_size=77), **CSV}),
    (lambda: widemix.prepare("csv", "b"), "data_prep.prepare.prepare",
     {"source": "csv", "to": Path("b"), "settings": PrepSettings(shuffle=True), **PLAIN}),
    (lambda: widemix.prepare(PAIRS, "b", **CSV | {"origin": None}), "data_prep.prepare.prepare",
     {"source": ANY, "to": Path("b"), "settings": PrepSettings(shuffle=True), **CSV, "origin": None}),
    (lambda: widemix.prepare(PAIRS, "b"), "data_prep.prepare.prepare",
     {"source": ANY, "to": Path("b"), "settings": PrepSettings(shuffle=True), **PLAIN}),
]  # fmt: skip


@pytest.mark.parametrize(("call", "target", "arguments"), CALLS)
def test_the_arguments_of_a_function_reach_its_work(
    call: Callable[[], Any], target: str, arguments: dict[str, Any], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert arguments_of(call, target) == arguments


def test_a_training_says_what_it_was_and_is_the_rank_0s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None where a signal stopped it, whatever was done before; no metrics on other ranks."""
    given: list[Any] = []
    ends = iter((0, 0, 75))
    monkeypatch.setattr("widemix.api.runs.train_rank", lambda *words: given.append(words) or next(ends))
    monkeypatch.setattr("widemix.api.runs.export_torchrun_env", lambda: False)
    (tmp_path / "done.json").write_text('{"top1": 50.0}')
    assert widemix.train("digits/mixer", tmp_path, resume="never") == {"top1": 50.0}
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    recipe = widemix.load_recipe("digits/rp_mixer")
    assert widemix.train(recipe, str(tmp_path)) == {}
    assert widemix.train(recipe, tmp_path) is None
    mixer = widemix.load_recipe("digits/mixer")
    assert given[:2] == [
        (mixer, tmp_path, "never", Path("digits/mixer")),
        (recipe, tmp_path, "auto", Path("recipe.yaml")),
    ]


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


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([], "train: has no pairs"),
        ({}, "there are no splits"),
        ([(b"", None)], r"train: pair 0 has the label None \(NoneType\), no number, name or several"),
        ([b"abc"], "train: pair 0 is b'abc', not"),
        ([(b"", -1)], "train: pair 0: label -1 is negative"),
        ([(b"", 1), (b"", "a")], "labels are both numbers and names"),
        ({"../x": [(b"", 1)]}, "split '../x' is no name"),
    ],
)
def test_what_is_no_pair_is_refused(tmp_path: Path, pairs: Any, words: str) -> None:
    with pytest.raises(widemix.InputError, match=words):
        widemix.prepare(pairs, tmp_path / "out")
    with pytest.raises(widemix.InputError, match="origin x: pairs are not read from a folder"):
        widemix.prepare([(b"", 0)], tmp_path / "out", "x")
    assert not (tmp_path / "out").exists()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", ["a script", "a piped script", "a notebook"])
def test_a_preparation_by_processes_does_not_run_the_users_script_again(tmp_path: Path, way: str) -> None:
    """Which is not written as `multiprocessing` wants it, or is in no file."""
    for number in range(80):
        (tmp_path / f"images/train/{'ab'[number % 2]}").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"images/train/{'ab'[number % 2]}/{number}.jpg").write_bytes(encoded(number))
    program = """
from widemix.data_prep import encode
encode.MIN_SECONDS_PER_PROCESS = 1e-9
start, started = encode._start_without_sigint, []
encode._start_without_sigint = lambda file: started.append(start(file)) or started[-1]
import widemix
print("runs")
widemix.prepare("image-folder", "out", "images", processes=3)
print([process.returncode is not None for process in started])
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
    assert (done.returncode, done.stdout) == (0, "runs\n[True, True]\n"), done.stderr
    widemix.prepare("image-folder", tmp_path / "alone", tmp_path / "images", processes=1)
    assert stored(tmp_path / "out", "train") == stored(tmp_path / "alone", "train")

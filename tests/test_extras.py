"""What a feature needs and is not installed is named by an error of one line, with the command that installs it."""

import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fsspec.registry import _registry

from tests.conftest import ROOT
from widemix.bench.loader import is_installed
from widemix.data_prep.encoding import load_tokenizer
from widemix.data_prep.remote import open_remote
from widemix.data_prep.sources import parquet
from widemix.distributed.topology import Topology
from widemix.engine import check_engine
from widemix.engine.fp8 import check_fp8
from widemix.errors import InputError
from widemix.models.program import check_packages
from widemix.recipe import load_recipe
from widemix.run.trackers import check_trackers

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
CPU = torch.device("cpu")
# Of who works on the code, and of programs that are called by their own names.
OTHERS = {"dev", "docs", "release", "cluster", "examples", "completion"}


def train(*settings: tuple[str, str]) -> None:
    """Check what `widemix train` checks first of a recipe."""
    recipe = load_recipe("digits/mixer", settings)
    check_engine(recipe.engine, recipe.optim, recipe.train, Topology(0, 1, 0, 1, CPU))
    check_trackers(recipe.log)


def read_parquet(folder: Path) -> None:
    (folder / "train-0.parquet").write_bytes(b"PAR1")
    parquet.read(folder)


FEATURES: dict[str, tuple[tuple[str, ...], str, Callable[[Path], object]]] = {
    "fp8": (("torchao",), f"{ROOT}[fp8]", lambda _: check_fp8(CPU)),
    "onnx": (("onnx", "onnxscript", "onnxruntime"), f"{ROOT}[onnx]", lambda _: check_packages()),
    "onnxruntime": (("onnxruntime",), f"{ROOT}[onnx]", lambda _: check_packages()),
    "wandb": (("wandb",), f"{ROOT}[wandb]", lambda _: train(("log.wandb", "true"))),
    "mlflow": (("mlflow",), f"{ROOT}[mlflow]", lambda _: train(("log.mlflow", "true"))),
    "parquet": (("pyarrow", "pyarrow.parquet"), f"{ROOT}[parquet]", read_parquet),
    "s3": (("s3fs",), f"{ROOT}[remote]", lambda _: open_remote("s3://bucket/images")),
    "gs": (("gcsfs",), f"{ROOT}[remote]", lambda _: open_remote("gs://bucket/images")),
    "https": (("aiohttp",), f"{ROOT}[remote]", lambda _: open_remote("https://localhost/images")),
    "deepspeed": (("deepspeed",), "deepspeed", lambda _: train(("engine.kind", "deepspeed"))),
    "tensorboard": (("tensorboard",), "tensorboard", lambda _: train(("log.tensorboard", "true"))),
    "tokenizers": (("tokenizers",), "tokenizers", lambda folder: load_tokenizer(folder / "vocab.txt", 16)),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_missing_package_is_one_line_with_the_command(feature: str, tmp_path: Path, monkeypatch) -> None:
    modules, package, use = FEATURES[feature]
    for module in modules:
        for loaded in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setitem(sys.modules, module, None)  # which makes its import fail
    for protocol in ("https", "s3", "gs"):  # fsspec keeps what it has found
        monkeypatch.delitem(_registry, protocol, raising=False)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    with pytest.raises(InputError) as caught:
        use(tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    command = f"pip install {shlex.quote(package)}"
    assert command in message, message


def test_every_extra_of_users_has_its_line(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    assert not is_installed("simplejpeg and torchvision v2, original files")
    assert f"pip install '{ROOT}[bench]'" in capsys.readouterr().err
    tested = {package.partition("[")[2].rstrip("]") for _, package, _ in FEATURES.values()} - {""}
    assert tested | {"ffcv", "bench"} | OTHERS == set(EXTRAS)

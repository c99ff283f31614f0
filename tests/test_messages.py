"""The catalogue of mistakes: what is typed, and the one line that says what is wrong, where, and what would be right.

messages/*.yaml have the commands, after variables of their environment, each with words of its line; {digits}, {run}
and the like are folders that are made here. In one process, since no command gets far.
`tests/end_to_end/test_mistakes.py` has those that need a live run.
"""

import functools
import itertools
import json
import os
import re
import shlex
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import yaml
from PIL import Image
from pyarrow import parquet

from tests.clone import CLONE, ROOT
from tests.conftest import Fork
from widemix.cli import parser
from widemix.cli.arguments import Parser
from widemix.cli.commands import run_command

make_parser = functools.cache(parser.make_parser)
CATALOGUE = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(Path(__file__).parent.glob("messages/*"))}
FILES = CATALOGUE.pop("files")
MESSAGES = {command: words for part in CATALOGUE.values() for command, words in part.items()}


@pytest.fixture(scope="module")
def places(tmp_path_factory, digits) -> dict[str, str]:
    tmp, base = tmp_path_factory.mktemp("mistakes"), tmp_path_factory.mktemp("base")
    names = {"digits": str(digits), "tmp": str(tmp), "images": f"{base}/images", "root": str(ROOT)}
    names |= {"run": f"{base}/run", "export": f"{base}/export"}
    names["new"] = f"--data.path {digits} --run-dir {tmp}/r"  # a run that could start
    small = ["--train.max_steps", "1", "--model.depth", "1", "--log.tensorboard", "false"]
    train = Fork("train", "digits/mixer", "--data.path", digits, "--run-dir", names["run"], *small, log=base / "log")
    assert train.wait()[0] == 0, train.wait()[1]
    assert run_command(make_parser(), None, ["export", names["run"], "--to", names["export"]]) == 0
    for name, text in FILES.items():
        (tmp / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp / name).write_text(text.format(**names))
    for name in ("empty", "classes/train/empty_class"):
        (tmp / name).mkdir(parents=True)
    (tmp / "itself").symlink_to("itself")
    (tmp / "linked/page.html").symlink_to("../lr.yaml")
    (tmp / "linked/checkpoints").symlink_to("../classes")
    os.mkfifo(tmp / "train_pipe")  # at which reading would wait for ever
    for name in ("pipe.yaml", "pipe.csv", "pipe.parquet", "pipe.beton", "pipe.tar", "pipe.safetensors"):
        (tmp / name).symlink_to("train_pipe")
    for name in ("pipe_manifest/manifest.json", "pipe_run/recipe.yaml", "pipe_study/pipe_study.jsonl"):
        (tmp / name).parent.mkdir()
        (tmp / name).symlink_to("../train_pipe")
    (tmp / "null").symlink_to("/dev/null")  # itself would be replaced where the check is broken
    (tmp / "binary.yaml").write_bytes(bytes(range(128, 256)))
    (tmp / "many_digits.yaml").write_text(f"train: {{epochs: {'1' * 5000}}}\n")
    (tmp / "large.yaml").write_text("#" * (1 + (1 << 20)))
    (tmp / "nested.yaml").write_text(f"train: {'[' * 500}{']' * 500}\n")
    (tmp / "garbage.pt").write_bytes(b"PK\x03\x04garbage")
    [weights] = Path(names["run"]).glob("checkpoints/*/model.safetensors")
    (tmp / "half.safetensors").write_bytes(weights.read_bytes()[:5000])
    damage(digits, tmp)
    more_than_rgb(tmp)
    (base / "images/train/a").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(base / "images/train/a/1.png")
    return names


def more_than_rgb(tmp: Path) -> None:
    """An image of 16 bits per level in a folder, a table, a tar and a parquet file, and one of five channels."""
    image, channels = tmp / "deep/train/a/1.png", tmp / "channels/train/a/1.tif"
    for path in (image, channels):
        path.parent.mkdir(parents=True)
    Image.fromarray(np.full((8, 8), 300, np.uint16)).save(image)
    Image.new("CMYK", (8, 8)).save(channels, tiffinfo={262: 2, 338: (0,)})  # RGB, and one of no stated meaning
    (tmp / "deep.csv").write_text("path,label\ndeep/train/a/1.png,a\n")
    (tmp / "deep_shards").mkdir()
    with tarfile.open(tmp / "deep_shards/train.tar", "w") as tar:
        tar.add(image, "1.png")
        (tmp / "deep_label").write_text("0")
        tar.add(tmp / "deep_label", "1.cls")
    (tmp / "deep_parquet").mkdir()
    rows = {"image": [{"bytes": image.read_bytes(), "path": "1.png"}], "label": [0]}
    parquet.write_table(pyarrow.table(rows), tmp / "deep_parquet/train.parquet")


def damage(digits: Path, tmp: Path) -> None:
    """Copies of a prepared folder, each with something wrong."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(digits, tmp / name))

    (copy("no_train") / "train.beton").unlink()
    (copy("zero_train") / "train.beton").write_bytes(b"")
    with (copy("half_train") / "train.beton").open("r+b") as file:
        file.truncate(100_000)
    (copy("list_manifest") / "manifest.json").write_text("[]")
    (copy("nested_manifest") / "manifest.json").write_text("[" * 100_000)
    manifest = json.loads((digits / "manifest.json").read_text())
    (copy("other_format") / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    (copy("changed_manifest") / "manifest.json").write_text(json.dumps(manifest | {"source": "mnist"}))
    (copy("half_manifest") / "manifest.json").write_text(json.dumps(manifest)[:300])
    folder = copy("swapped")
    betons = [folder / name for name in ("train.beton", "test.beton")]
    swapped = [path.read_bytes() for path in reversed(betons)]
    for path, data in zip(betons, swapped, strict=True):
        path.write_bytes(data)


# What launchers and DeepSpeed set.
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")


@pytest.mark.parametrize("command", MESSAGES)
def test_a_mistake_has_its_line(command, places, monkeypatch, system, capsys):
    monkeypatch.chdir(CLONE)
    monkeypatch.syspath_prepend(places["tmp"])
    system({"sys.dont_write_bytecode": True})
    for name in PLACE:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    folders = [places[name] for name in ("tmp", "run", "export", "images", "digits")]
    before = files_of(folders)
    words = shlex.split(command.format(**places))
    while re.match("[A-Z_]+=", words[0]):
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    code = run_command(make_parser(), None, words)
    output = capsys.readouterr()
    assert code == 2, output
    assert output.out == ""
    assert output.err.count("\n") == 1, output.err
    assert output.err.startswith("error: ")
    assert MESSAGES[command].format(**places) in output.err
    assert files_of(folders) == before


def files_of(folders: list[str]) -> list[str]:
    """The paths of all that is below them."""
    walks = itertools.chain.from_iterable(map(os.walk, folders))
    return sorted(os.path.join(root, name) for root, names, files in walks for name in (*names, *files))


def test_no_mistake_is_listed_twice():
    assert len(MESSAGES) == sum(map(len, CATALOGUE.values()))


def test_the_batch_script_may_leave_a_value_empty():
    parser = Parser()
    parser.add_argument("--stage", required=True)
    assert run_command(parser, lambda arguments: int(arguments.stage != ""), ["--stage", ""]) == 0


def test_another_kind_drops_the_keys_of_the_old_one(places, monkeypatch, capsys):
    monkeypatch.chdir(CLONE)
    words = "cost digits/mixer --model.kind timm --model.name resnet10t --data.path x --model.project_tokens 3"
    assert run_command(make_parser(), None, shlex.split(words)) == 2
    assert "model.project_tokens is not a key of kind timm" in capsys.readouterr().err


def test_a_network_that_does_not_fit(places, monkeypatch, capsys):
    from widemix.errors import InputError
    from widemix.models.registry import build_model
    from widemix.recipe import load_recipe

    recipe = load_recipe(ROOT / "recipes/digits/mixer.yaml", [("model.channels", "1000000000")])
    with pytest.raises(InputError, match=r"^model: a mixer with these sizes does not fit into memory"):
        build_model(recipe.model, 8, 10)

"""What `widemix analyse` prints of what it finds: the numbers that --json writes, which tests/analysis compares."""

import json
import math
import shlex
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import widemix
from widemix.cli.commands import run_command
from widemix.cli.parser import make_parser

PRODUCTS = "extends: svhn/mixer_square\ndata: {num_classes: 10}\nmodel: {kind: s_mixer, expansion: null, norm: none, "
PRODUCTS += "project_tokens: 2, channels: 2, depth: 2}"


@pytest.fixture(scope="module")
def run(digits, tmp_path_factory) -> Path:
    """A run of two short epochs."""
    values = {"data.path": digits, "data.workers": 1, "model.depth": 1, "train.epochs": 2}
    values |= {"log.tensorboard": False, "schedule.warmup_epochs": 0}
    recipe = widemix.load_recipe("digits/mixer", [(name, str(value)) for name, value in values.items()])
    folder = tmp_path_factory.mktemp("runs") / "run"
    widemix.train(recipe, folder)
    return folder


def analyse(words: str, capsys) -> tuple[list[str], Path]:
    """What an analysis prints, and the file of its numbers."""
    capsys.readouterr()
    assert run_command(make_parser("analyse"), argv=["analyse", *shlex.split(words), "--json", "n.json"]) == 0
    *lines, name = capsys.readouterr().out.splitlines()
    return lines, Path(name)


def test_an_analysis_prints_the_numbers_that_it_writes(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines, file = analyse(f"pixels {run} --batch 64", capsys)
    [scores] = json.loads(file.read_text())
    top1 = scores["top1"]
    assert top1["original"] > top1["patches"] != top1["all"]
    shuffled = f"patches, and pixels within patches {top1['patches']:.2f} %, all pixels {top1['all']:.2f} %"
    assert lines == [
        f"{run}, trained with pixel_order original; top-1 by shuffled pixels: original {top1['original']:.2f} %, "
        f"{shuffled}"
    ]
    Path("products.yaml").write_text(PRODUCTS)
    for words in (run, "products.yaml --products"):
        lines, file = analyse(f"spectrum {words}", capsys)
        first, last = (json.loads(file.read_text())["steps"][number] for number in (0, -1))
        assert (first == last) is (words != run)
        for line, layer in zip(lines, last["layers"], strict=True):
            size = " x ".join(map(str, layer["shape"])) + (f" x {layer['repeats']}" if layer["repeats"] > 1 else "")
            spread = f", spread {layer['spread']:.4f}" if words != run else ""
            numbers = f"{layer['largest']:.4f}, edge {layer['edge_at_start']:.4f}{spread}"
            assert line == f"{layer['layer']:<32} {size}: {numbers}"


def test_ranks_are_printed_and_bounds_are_those_of_the_heads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(PRODUCTS)
    lines, file = analyse("separation-rank small.yaml --heads 2 --most 16", capsys)
    numbers = json.loads(file.read_text())
    expected = []
    for name, ranks in numbers["measured"].items():
        for rank in ranks:
            value = "16 or more" if rank["greatest"] is None else str(rank["greatest"])
            value += "" if rank["least"] == rank["greatest"] else f" (least of the outputs {rank['least']})"
            expected.append(f"{name}, {rank['layers']} layers: {value}; at most {rank['monomials']} of its degree")
    assert lines == expected
    assert "attention, 3 layers: 16 or more; at most 210 of its degree" in lines
    base = math.log(2 * 2**2 * 2**2, 3)
    count = max(map(len, numbers["measured"].values()))
    assert numbers["bounds_log3"] == {
        "Mixers, upper bound (5.5)": pytest.approx([2**p * base for p in range(1, count + 1)]),
        "transformers, upper bound (5.6)": pytest.approx(
            [3**p * (base + math.log(2, 3)) for p in range(1, count + 1)]
        ),
    }
    assert numbers["size"] == [2, 2]


def test_sheets_go_to_the_board_by_their_names(digits, run, tmp_path, monkeypatch, capsys):
    words = f"analyse augment digits/mixer --data.path {digits} --images 2 --to {tmp_path} --tensorboard {run}"
    assert run_command(make_parser("analyse"), argv=words.split()) == 0
    *files, board = map(Path, capsys.readouterr().out.splitlines())
    assert board == run
    images = EventAccumulator(str(board))
    images.Reload()
    shown = {tag: images.Images(tag)[0].encoded_image_string for tag in images.Tags()["images"]}
    assert shown == {f"analysis/{file.stem}": file.read_bytes() for file in files}
    assert len(files) == 2

"""What commands write by --to, --tensorboard and --json, and nothing else."""

import io
import json
import math
import subprocess
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from widemix.bench.report import report
from widemix.cli import print_all_text
from widemix.cli.commands import run_command
from widemix.cli.options import write_outputs
from widemix.cli.parser import make_parser
from widemix.cli.prep import print_summary
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.verify import repair_command, verify
from widemix.estimate import tables
from widemix.estimate.rehearse import HEAD, rehearsal_line
from widemix.formats.beton import open_beton
from widemix.formats.manifest import Split

NUMBERS = {"a": 1.5, "b": [None, 2]}


def figure(color: str) -> Figure:
    drawn = Figure(figsize=(1, 1), facecolor=color)
    drawn.add_subplot().set_axis_off()
    return drawn


def outputs(tmp_path: Path, *names: str) -> Namespace:
    places = {"to": tmp_path / "new/to", "tensorboard": tmp_path / "run", "json": tmp_path / "numbers.json"}
    return Namespace(**{name: place if name in names else None for name, place in places.items()})


def test_nothing_is_plotted_or_written_unless_asked_for(tmp_path, capsys):
    def plot():
        raise AssertionError

    assert write_outputs(outputs(tmp_path), NUMBERS, {"a.png": plot}, {"t.csv": "x"}) == 0
    assert [*tmp_path.iterdir()] == []
    assert capsys.readouterr().out == ""
    assert write_outputs(outputs(tmp_path, "json"), NUMBERS, {"a.png": plot}) == 0
    assert json.loads((tmp_path / "numbers.json").read_text()) == NUMBERS


def test_figures_and_tables_go_to_the_folder(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").touch()
    given = outputs(tmp_path, "to", "tensorboard", "json")
    figures = {"red.png": lambda: figure("red"), "blue.png": lambda: figure("blue")}
    assert write_outputs(given, NUMBERS, figures, {"t.csv": "x,y\n", "empty.csv": ""}) == 0
    assert {path.name for path in given.to.iterdir()} == {"red.png", "blue.png", "t.csv"}
    assert (given.to / "t.csv").read_text() == "x,y\n"
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == [str(given.to / name) for name in ("red.png", "blue.png", "t.csv")]
    assert printed[-1] == str(given.json)
    board = EventAccumulator(str(given.tensorboard))
    board.Reload()
    assert sorted(board.Tags()["images"]) == ["analysis/blue", "analysis/red"]
    for name in ("red", "blue"):
        shown = Image.open(io.BytesIO(board.Images(f"analysis/{name}")[0].encoded_image_string))
        saved = Image.open(given.to / f"{name}.png").convert("RGB")
        assert np.array_equal(np.asarray(shown), np.asarray(saved))
        assert saved.getpixel((0, 0)) == {"red": (255, 0, 0), "blue": (0, 0, 255)}[name]


def test_figures_go_to_the_board_alone(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").touch()
    write_outputs(outputs(tmp_path, "tensorboard"), NUMBERS, {"red.png": lambda: figure("red")}, {"t.csv": "x"})
    assert [*tmp_path.iterdir()] == [tmp_path / "run"]
    assert capsys.readouterr().out == f"{tmp_path / 'run'}\n"
    given = outputs(tmp_path, "to")
    for name in ("red", "blue"):
        write_outputs(given, NUMBERS, {f"{name}.png": lambda name=name: figure(name)}, {"t.csv": name})
    assert {path.name for path in given.to.iterdir()} == {"red.png", "blue.png", "t.csv"}
    assert (given.to / "t.csv").read_text() == "blue"


def test_a_summary_has_a_line_for_each_split(tmp_path, capsys):
    """Those that were left out first, then the commonest; of more than four kinds their sum."""

    def split(name: str, samples: int, per_class: tuple[int, ...], fields: tuple[str, ...] = ("image",)) -> Split:
        numbers = {"samples": samples, "per_class": per_class, "fields": dict.fromkeys(fields, "")}
        return Split(file=f"{name}.beton", bytes=3 << 19, blocks=("",), **numbers)

    splits = [split("train", 7, (3, 4)), split("val", 4, (2, 2)), split("test", 5, (0, 0), ("image", "targets"))]
    splits.append(split("extra", 6, (0,), ("image", "targets")))
    splits += [split("bare", 3, (0, 0)), split("both", 3, (1, 2), ("image", "targets"))]
    rules = ["grey to RGB"] * 3 + ["turned: by 90"] + ["turned: by 180"] + ["left out: is empty"] + ["CMYK to RGB"]
    manifest = Namespace(
        splits=dict(enumerate(splits)), settings={}, exceptions=[{"file": "a.png", "rule": rule} for rule in rules]
    )
    print_summary(manifest, tmp_path)
    lines = [
        f"{tmp_path}/train.beton: 7 samples, 1.5 MiB, 3 to 4 of each of 2 classes",
        f"{tmp_path}/val.beton: 4 samples, 1.5 MiB, 2 of each of 2 classes",
        f"{tmp_path}/test.beton: 5 samples, 1.5 MiB, 2 targets each",
        f"{tmp_path}/extra.beton: 6 samples, 1.5 MiB, 1 target each",
        f"{tmp_path}/bare.beton: 3 samples, 1.5 MiB, 0 of each of 2 classes",
        f"{tmp_path}/both.beton: 3 samples, 1.5 MiB, 1 to 2 of each of 2 classes",
    ]
    kinds = "1 left out, 3 grey to RGB, 2 turned, 1 CMYK to RGB"
    assert capsys.readouterr().out.splitlines() == [
        *lines, f"unusual files: {kinds}; listed in {tmp_path}/manifest.json", "a.png: left out: is empty"
    ]  # fmt: skip
    manifest.exceptions += 1200 * [{"rule": "alpha dropped"}]
    print_summary(manifest, tmp_path)
    kinds = "1 left out, 1,200 alpha dropped, 3 grey to RGB, 2 turned, 1,207 in all"
    assert capsys.readouterr().out.splitlines()[6] == f"unusual files: {kinds}; listed in {tmp_path}/manifest.json"
    manifest.exceptions = 5 * [{"file": "b.png", "rule": "left out: is empty"}]
    print_summary(manifest, tmp_path)
    assert capsys.readouterr().out.splitlines()[7:] == ["b.png: left out: is empty"] * 3
    manifest.exceptions, manifest.splits = [], {"train": splits[0]}
    print_summary(manifest, tmp_path)
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"{tmp_path}: has no split to evaluate on; the same with --holdout 10% --force makes one of these samples"
    ]
    manifest.splits = dict(enumerate(splits))
    print_summary(manifest, tmp_path)
    assert capsys.readouterr().out.splitlines() == lines


def test_the_price_of_coefficients_is_that_of_all_splits(tmp_path, monkeypatch, capsys):
    counts = {"train.beton": (30, 2, 1300, 1000), "val.beton": (10, 1, 500, 400)}
    monkeypatch.setattr("widemix.data_prep.original_jpeg.count_bytes", lambda path: counts[path.name])
    splits = {
        name: Split(file=f"{name}.beton", bytes=1, samples=1, per_class=(1,), blocks=("",), fields={field: ""})
        for name, field in (("train", "image"), ("val", "image"), ("text", "tokens"))
    }
    manifest = Namespace(splits=splits, settings={"encoding": "coefficients"}, exceptions=[])
    print_summary(manifest, tmp_path)
    again = f"`widemix prep --restore {tmp_path} --to DIR` writes the JPEGs again"
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"coefficients: about 1.29 times the bytes of their JPEGs; 3 images are stored as JPEGs; {again}"
    )
    counts.update({"train.beton": (30, 0, 1300, 1000), "val.beton": (10, 0, 500, 400)})
    print_summary(manifest, tmp_path)
    line = f"coefficients: about 1.29 times the bytes of their JPEGs; {again}"
    assert capsys.readouterr().out.splitlines()[-1] == line
    counts.update({"train.beton": (0, 9, 0, 0), "val.beton": (0, 1, 0, 0)})
    print_summary(manifest, tmp_path)
    assert capsys.readouterr().out.splitlines()[-1] == "coefficients: of no image"


def test_a_folder_is_verified_in_words_and_exit_code(tmp_path, capsys):
    prepare("digits", None, tmp_path, PrepSettings(per_class=2), processes=1)
    beton = open_beton(tmp_path / "test.beton")
    place = int(beton.offset[3])
    for code in (0, 1):
        assert run_command(make_parser("verify"), argv=["verify", str(tmp_path)]) == code
        lines = [*verify(tmp_path), f"to prepare it again: {repair_command(tmp_path)}"]
        assert capsys.readouterr().out.splitlines() == (lines if code else [f"{tmp_path}: no damage"])
        assert (len(lines) > 1) is (code == 1)
        with (tmp_path / "test.beton").open("r+b") as file:
            file.seek(place)
            file.write(b"damage")


@pytest.mark.parametrize(
    ("words", "table", "rows"),
    [
        ("--omega 1000 --gamma 2", lambda: tables.pairs_table(1000, 2), lambda: tables.pairs_rows(1000, 2)),
        ("--named", tables.named_table, tables.named_rows),
    ],
)
def test_a_table_of_costs_is_printed_and_written(words, table, rows, tmp_path, capsys):
    words += f" --gpus 8 --gpu h100 --json {tmp_path}/rows.json"
    assert run_command(make_parser("cost"), argv=["cost", *words.split()]) == 0
    assert capsys.readouterr().out == f"{table()}\n"
    assert json.loads((tmp_path / "rows.json").read_text()) == {"machine": "8 x h100", "rows": rows()}


def test_rehearsed_recipes_are_printed_below_one_head(tmp_path, system, capsys):
    """Each as soon as it is rehearsed, by a process."""
    said = []

    def rehearse(command, **_):
        said.append(capsys.readouterr().out)
        return subprocess.CompletedProcess(command, 2, "", f"error: {Path(command[4]).stem} fails")

    system({"subprocess.run": rehearse, "time.perf_counter": lambda: 1.0})
    for name in "ab":
        (tmp_path / f"{name}.yaml").touch()
    words = ["cost", "--table", str(tmp_path), "--gpus", "6", "--nodes", "3", "--json", str(tmp_path / "rows.json")]
    assert run_command(make_parser("cost"), argv=words) == 0
    said.append(capsys.readouterr().out)
    written = json.loads((tmp_path / "rows.json").read_text())
    rows = [{"name": name, "seconds": 0, "CPU seconds": 0, "error": f"error: {name} fails"} for name in "ab"]
    assert written == {"machine": "6 x a100", "rows": rows}
    assert said == ["", f"{HEAD}\n{rehearsal_line(rows[0])}\n", f"{rehearsal_line(rows[1])}\n"]


class Result(Namespace):
    """Of an evaluation."""

    def sentence(self) -> str:
        return "the sentence"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_evaluation_prints_and_writes_its_details(rank, tmp_path, monkeypatch, capsys):
    """On rank 0 alone; what is not finite is null."""
    details = Namespace(ece=0.25, per_class=[90.0, 10.0, None, 0.0, 15.0], bins=[], confusion=[])
    result = Result(network="runs/a", classes=["ant", "bee", "cow", "dog", "eel"], samples=5, details=details)
    result.metrics = {"loss": math.nan, "top1": 50.0, "top5": math.inf}
    monkeypatch.setattr("widemix.evaluation.assessment.assess", lambda *_: result)
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    words = ["eval", "timm:resnet10t", "--details", "--json", str(tmp_path / "a.json")]
    assert run_command(make_parser("eval"), argv=words) == 0
    if rank == "1":
        assert capsys.readouterr().out == ""
        assert [*tmp_path.iterdir()] == []
        return
    said = [
        "the sentence",
        "expected calibration error 0.2500",
        "lowest top-1: dog 0.00 %, bee 10.00 %, eel 15.00 %",
    ]
    assert capsys.readouterr().out.splitlines() == [*said, str(tmp_path / "a.json")]
    written = json.loads((tmp_path / "a.json").read_text())
    assert written == {
        "loss": None, "top1": 50.0, "top5": None, "network": "runs/a", "classes": result.classes, "samples": 5,
        **vars(details),
    }  # fmt: skip


def test_a_benchmarks_file_has_the_rows_and_the_machine(tmp_path, capsys):
    rows = [
        {"name": "ours", "ms": 1234567.0, "ratio": None, "parts": {"a": 1.0, "b": 3.0}},
        {"name": "theirs", "ms": 2.5, "ratio": "x", "parts": {"a": 0.0, "b": 0.0}},
    ]
    report(rows, ["numpy"], tmp_path / "rows.json")
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written["rows"] == rows
    machine, head, first, second, *parts = capsys.readouterr().out.splitlines()
    assert (machine, "numpy" in machine) == (written["machine"], True)
    assert head.split() == ["ms", "ratio"]
    assert first.split() == ["1.23457e+06", "-", "ours"]
    assert second.split() == ["2.5", "x", "theirs"]
    assert [line.split() for line in parts] == [
        ["parts", "of", "ours:"], ["1", "25%", "a"], ["3", "75%", "b"],
        ["parts", "of", "theirs:"], ["0", "0%", "a"], ["0", "0%", "b"],
    ]  # fmt: skip
    report(rows, ["numpy"], None)


def test_what_an_encoding_lacks_is_escaped():
    for encoding, expected in (("ascii", b"\\xe9\xff\xfe\\u2192a"), ("utf-8", b"\xc3\xa9\xff\xfe\xe2\x86\x92a")):
        stream = io.TextIOWrapper(buffer := io.BytesIO(), encoding)
        print_all_text(stream)
        print("é\udcff\udcfe→a", file=stream, end="", flush=True)
        assert buffer.getvalue() == expected

"""What `widemix analyse` and `study` do where nothing else is typed, and what they print of what they find."""

import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.test_arguments import NET, TINY, FakeNetwork, call_of
from tests.clone import CLONE
from widemix.analysis.pixels import PixelScores
from widemix.analysis.separation_rank import SeparationRank
from widemix.analysis.spectrum import LayerSpectrum
from widemix.cli.parser import make_parser
from widemix.command_line.commands import run_command

P = Path
NETWORKS = "widemix.evaluation.networks.load_network"
# Command line -> the function, and its last arguments by position, with those that have a default.
DEFAULTS: list[tuple[str, str, tuple[Any, ...]]] = [
    ("analyse augment digits/mixer --train.seed 9", "augment.write_sheets", (P("analysis/digits-mixer"), 32, 9)),
    (
        "analyse augment digits/mixer --train.seed 9 --seed 0",
        "augment.write_sheets",
        (P("analysis/digits-mixer"), 32, 0),
    ),
    (f"analyse spectrum {NET}", "training_spectrum.course", (NET, (), False, False)),
    (f"analyse filters {NET}", "filters.layer_filters", ("module", None)),
    (f"analyse weights {NET}", "effective_weights.receptive_fields", ((3, 4), 64, False)),
    (
        "analyse sparse-spectrum",
        "sparse_spectrum.widening",
        (2**19, 2.0, (1500, 2000, 2500, 3000, 3500, 4096), 10, 0),
    ),
    ("analyse regularisation", "regularisation.regression", (4, 4, 40, 0.3, 0)),
    ("analyse regularisation --tokens 8 --channels 8", "regularisation.regression", (8, 8, 40, 0.3, 0)),
    (f"analyse separation-rank {TINY}", "separation_rank.mixer_layers", (True, 0)),
    (f"analyse separation-rank {TINY}", "separation_rank.attention_layers", (4, 2, 1, 0)),
    (f"analyse separation-rank {TINY}", "separation_rank.separation_ranks", ((2, 2), 2, "tokens", 512, 0)),
    (
        f"analyse separation-rank {TINY} --model.tokens 4 --model.channels 9",
        "separation_rank.attention_layers",
        (4, 9, 1, 0),
    ),
    (
        "analyse sparse-spectrum --connections 200 --widths 20 10",
        "sparse_spectrum.widening",
        (200, 2.0, [20, 10], 10, 0),
    ),
    ("study bounds --to {tmp}", "studies.bounds.bounds", (range(1, 25), 3**30, 196, 12)),
    ("study bounds --to {tmp} --depth 600", "studies.bounds.bounds", (range(1, 601), 3**30, 196, 12)),
    (
        "study results",
        "studies.results_page.results_page",
        (P("recipes/studies/results"), "../recipes/studies/results"),
    ),
]


@pytest.mark.parametrize(("words", "target", "arguments"), DEFAULTS, ids=[each[1] for each in DEFAULTS])
def test_what_is_not_typed_has_its_default(words, target, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(CLONE)
    monkeypatch.setattr(NETWORKS, lambda name, ema=False: FakeNetwork(name))
    monkeypatch.setattr("widemix.analysis.effective_weights.input_features", lambda module, side: (3, 4))
    target = f"widemix.{'' if target.startswith('studies.') else 'analysis.'}{target}"
    found = call_of(words.format(tmp=tmp_path), target, monkeypatch)
    assert found.arguments[-len(arguments) :] == arguments


def test_networks_are_compared_and_evaluated_as_their_recipes_say_unless_told_otherwise(monkeypatch):
    given = []
    monkeypatch.setattr(NETWORKS, lambda name, ema: given.append((name, ema)) or FakeNetwork(name))
    target = "widemix.analysis.similarity.compare_each"
    for words, pair, layers in (
        ("a.yaml b.yaml c.yaml --layers x", (["a.yaml"], "b.yaml"), (["x"], ["x"])),
        ("a.yaml b.yaml --with c.yaml", (["a.yaml", "b.yaml"], "c.yaml"), ((), ())),
    ):
        firsts, second, samples, *own = call_of(f"analyse cka {words}", target, monkeypatch).arguments
        assert ([each.name for each in firsts], second.name, tuple(own)) == (*pair, layers)
        assert tuple(vars(samples).values()) == (None, None, 256, None, 0)
    found = call_of(f"analyse pixels {NET}", "widemix.analysis.pixels.pixel_scores", monkeypatch)
    assert found.options == dict.fromkeys(("batch", "data", "split", "patch"))
    assert {ema for _, ema in given} == {False}


def test_a_study_is_trained_one_run_at_a_time_in_a_folder_of_its_name(digits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,2")
    P("mine.yaml").write_text(
        "title: t\nsource: s\nruns:\n- {label: a, recipes: {D: digits/mixer}}\nfigure: {x: width}\n"
    )
    reached = call_of(f"study run mine.yaml --data.path {digits}", "widemix.studies.runner.Runner", monkeypatch)
    assert reached.arguments == (P("runs/mine"), 1, 1, ["4", "2"])
    assert P("runs/mine").is_dir()


def run(words: str, **keys) -> None:
    assert run_command(make_parser(), argv=shlex.split(words.format(**keys))) == 0


def test_sheets_go_to_the_board_by_their_names(digits, tmp_path, monkeypatch, capsys):
    paths = [tmp_path / f"{name}.png" for name in ("training", "operations")]
    for path in paths:
        path.write_bytes(path.stem.encode())
    given = []
    (tmp_path / "recipe.yaml").touch()
    monkeypatch.setattr("widemix.analysis.augment.write_sheets", lambda *_: paths)
    monkeypatch.setattr("widemix.plots.tensorboard.add_to_tensorboard", lambda *each: given.append(each) or each[1])
    run("analyse augment digits/mixer --data.path {digits} --tensorboard {tmp}", digits=digits, tmp=tmp_path)
    assert given == [({"training": b"training", "operations": b"operations"}, tmp_path)]
    assert capsys.readouterr().out.splitlines() == [*map(str, paths), str(tmp_path)]


def test_the_accuracies_of_each_order_are_printed_and_written(tmp_path, monkeypatch, capsys):
    scores = PixelScores(NET, "none", 4, 9, {"original": 3.0, "patches": 2.0, "all": 1.0}, {"original": 0.5})
    monkeypatch.setattr(NETWORKS, lambda name, ema=False: FakeNetwork(name))
    monkeypatch.setattr("widemix.analysis.pixels.pixel_scores", lambda *_, **__: scores)
    plotted = []
    for name in ("plot_scores", "plot_inputs"):
        monkeypatch.setattr(f"widemix.analysis.pixels.{name}", lambda *each, **_: plotted.append(each))
    monkeypatch.setattr("widemix.plots.style.as_png", lambda figure: b"")
    run("analyse pixels {net} --json {tmp}/p.json --to {tmp}", net=NET, tmp=tmp_path)
    said = "original 3.00 %, patches, and pixels within patches 2.00 %, all pixels 1.00 %"
    assert f"{NET}, trained with pixel_order none; top-1 by shuffled pixels: {said}\n" in capsys.readouterr().out
    assert json.loads((tmp_path / "p.json").read_text()) == [vars(scores)]
    assert plotted[0] == ([scores], 10)


def test_each_layer_of_a_network_has_a_line_with_its_largest_singular_value(monkeypatch, capsys):
    values = np.array([1.5, 0.5])
    layers = [
        LayerSpectrum("fc", (2, 5), 3, values, 2.0, True),
        LayerSpectrum("V (x) W", (2, 5), 1, 2 * values, 2.5, True, 0.25),
    ]
    courses = {"a.yaml": [(0, layers[1:]), (7, layers)], "b.yaml": [(0, layers[:1]), (7, layers[1:])]}
    monkeypatch.setattr("widemix.analysis.training_spectrum.course", lambda name, *_: courses[name])
    run("analyse spectrum a.yaml")
    assert [line.split(None, 1)[1] for line in capsys.readouterr().out.splitlines()] == [
        "2 x 5 x 3: 1.5000, edge 2.0000",
        f"(x) W{'':<25} 2 x 5: 3.0000, edge 2.5000, spread 0.2500",
    ]


def test_ranks_are_printed_with_the_least_of_the_outputs_and_bounds_are_those_of_the_heads(
    tmp_path, monkeypatch, capsys
):
    ranks = {2: [SeparationRank(1, 2, 3, 4)], 3: [SeparationRank(1, 5, 5, 6), SeparationRank(2, None, None, 30)]}
    monkeypatch.setattr(
        "widemix.analysis.separation_rank.separation_ranks", lambda layers, size, degree, *_: ranks[degree]
    )
    run(f"analyse separation-rank {TINY} --heads 2 --most 64 --json {{tmp}}/r.json", tmp=tmp_path)
    assert capsys.readouterr().out.splitlines()[:3] == [
        "Mixer, 1 layers: 3 (least of the outputs 2); at most 4 of its degree",
        "attention, 1 layers: 5; at most 6 of its degree",
        "attention, 2 layers: 64 or more; at most 30 of its degree",
    ]
    numbers = json.loads((tmp_path / "r.json").read_text())
    base = math.log(2 * 2**2 * 2**2, 3)
    assert numbers["bounds_log3"] == {
        "Mixers, upper bound (5.5)": pytest.approx([2 * base, 4 * base]),
        "transformers, upper bound (5.6)": pytest.approx([3 * (base + math.log(2, 3)), 9 * (base + math.log(2, 3))]),
    }
    assert numbers["size"] == [2, 2]

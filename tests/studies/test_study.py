"""A study file says which runs there are: axes, constraints, seeds, lines; mistakes are one line."""

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import ROOT
from tests.studies import conftest
from tests.studies.conftest import TWO, plan_of, runs_of, train
from widemix.errors import InputError
from widemix.models.cost import model_cost
from widemix.models.registry import build_model
from widemix.recipe import dump_recipe, experiment_hash, load_recipe
from widemix.studies.quantity import as_quantity, block_weights, is_number, solve, value_of
from widemix.studies.study import is_study, read_study, study_runs_of
from widemix.studies.study_run import StudyRun, scale, unique

STUDIES = sorted((ROOT / "recipes/studies").glob("*.yaml"))


MIXER = load_recipe("digits/mixer")


def keys_of(study_runs, *names):
    """The values of these keys in each run."""
    sections = [run.recipe.model_dump() for run in study_runs]
    return [tuple(values[name.partition(".")[0]][name.partition(".")[2]] for name in names) for values in sections]


SEEDED = (
    "runs:",
    "seeds: [3, 4]\nruns:",
    "s_mixer",
    "rp_s_mixer",
    "  axes",
    "  seeded: [model.permutation_seed]\n  axes",
)
SET = "set: {train.epochs: 5, optim.lr: 0.5, model.channels: 4, train.seed: 8}\nruns:"


@pytest.mark.parametrize(
    ("changes", "overrides", "keys", "expected"),
    [
        # The study's keys, then the entry's, those of the command line, and those that vary.
        (("runs:", SET, "  axes", "  set: {optim.lr: 0.25}\n  axes"), [("train.epochs", "3")],
         "model.channels train.epochs optim.lr", [(8, 3, 0.25), (16, 3, 0.25)]),
        (SEEDED, [], "model.channels train.seed model.permutation_seed",
         [(8, 3, 3), (8, 4, 4), (16, 3, 3), (16, 4, 4)]),
        (("runs:", SET.replace("train.seed: 8", "model.permutation_seed: 9"), *SEEDED, "[3, 4]", "[0]"), [],
         "train.seed model.permutation_seed", [(0, 0)] * 2),
        (("{model.channels: [8, 16]}", "{'model.channels, model.depth': [[8, 2], [16, 3]]}"), [],
         "model.channels model.depth", [(8, 2), (16, 3)]),
        (("[8, 16]", "[8, 16], model.depth: [1, 2]"), [], "model.channels model.depth",
         [(8, 1), (8, 2), (16, 1), (16, 2)]),
    ],
)  # fmt: skip
def test_runs_have_the_values_of_the_study_file(tmp_path, changes, overrides, keys, expected):
    text = TWO
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        text = text.replace(old, new, 1)
    study_runs = runs_of(tmp_path, text, overrides)
    assert keys_of(study_runs, *keys.split()) == expected
    assert len(unique(study_runs)) == len(study_runs)


def test_lines_are_labelled_and_may_share_a_run(tmp_path):
    axes = "{model.channels: {weights: [20000, 99.5]}, model.project_tokens: {omega: 60000}, model.depth: [1, 2]}"
    axes += "\n  lines: [model.channels, model.project_tokens, model.depth]"
    lines = [run.line for run in runs_of(tmp_path, TWO.replace("{model.channels: [8, 16]}", axes))]
    assert lines == [
        f"Normal, 20,000 weights, 60,000 connections, depth {depth}" for depth in (1, 2)
    ]  # 99.5 are too few
    axes = "{model.channels: {forward_mflops: [0.25, 123.4]}}\n  lines: [model.channels]"
    lines = [run.line for run in runs_of(tmp_path, TWO.replace("{model.channels: [8, 16]}", axes))]
    assert lines == ["Normal, 0.25 MFLOPs", "Normal, 123 MFLOPs"]
    entry = TWO[TWO.index("- label") : TWO.index("figure")]
    study_runs = runs_of(tmp_path, TWO.replace("figure:", entry.replace("Normal", "Again") + "figure:"))
    assert [study_run.line for study_run in study_runs] == ["Normal", "Normal", "Again", "Again"]
    assert len(unique(study_runs)) == 2
    assert [run.name for run in runs_of(tmp_path, TWO, only="*channels-16_*")] == [study_runs[1].name]


@pytest.mark.parametrize(
    ("recipe", "y", "key", "values", "refused"),
    [
        ("digits/s_mixer", "error", "train.compile", "false, true", False),
        ("digits/s_mixer", "error", "train.grad_accum_steps", "1, 2", False),
        ("digits/s_mixer", "epoch_seconds", "train.compile", "false, true", True),
        ("digits/s_mixer", "epoch_seconds", "engine.kind", "ddp, fsdp", True),
        ("digits/s_mixer", "epoch_seconds", "log.every", "1, 7", False),
        (f"{ROOT}/tests/engine/repmlp.yaml", "error", "train.grad_accum_steps", "1, 2", True),
        (f"{ROOT}/tests/engine/repmlp.yaml", "error", "train.compile", "false, true", False),
    ],
)
def test_entries_share_a_run_unless_what_is_shown_differs(tmp_path, recipe, y, key, values, refused):
    """Values of an axis never do."""
    text = TWO.replace("digits/s_mixer", recipe).replace("x: width", f"x: model.channels, y: [{y}]")
    entry = text[text.index("- label") : text.index("figure")]
    other = entry.replace("Normal", "Other").replace("  axes", f"  set: {{{key}: {values.split()[1]}}}\n  axes")
    with pytest.raises(InputError, match=f"same run as in runs.0, and {key} differs") if refused else nullcontext():
        assert len(unique(runs_of(tmp_path, text.replace("figure:", f"{other}figure:")))) == 2
    assert len(unique(runs_of(tmp_path, text.replace("axes: {", f"axes: {{{key}: [{values}], ")))) == 4


def test_a_name_has_point_chosen_values_and_seed(tmp_path, monkeypatch):
    """In this order ever since: a run by another name would be trained again."""
    keys = {"varied": (("model.channels", "8"),), "chosen": (("optim.lr", "0.1"),), "seeded": ("train.seed",)}
    study_run = StudyRun(ROOT / "recipes/digits/s_mixer.yaml", seed=3, **keys)
    assert study_run.name == f"digits-s_mixer_channels-8_lr-0.1_seed-3_{experiment_hash(study_run.recipe)}"
    long = StudyRun(ROOT / "recipes/digits/s_mixer.yaml", (("data.path", f"/a b/{'c' * 200}"),))
    assert long.name == f"digits-s_mixer_path-a_b_{'c' * 96}_{experiment_hash(long.recipe)}"  # 120 before the hash
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text("extends: digits/s_mixer\n")
    for text, shown in (("'1.0e+3'", "1.0e+3"), ("-0.5,2", "-0.5_2"), ("_a._", "a"), ("a  b/c", "a_b_c")):
        name = StudyRun(Path("own.yaml"), (("data.path", text),)).name
        assert name.rpartition("_")[0] == f"{tmp_path.name}-own_path-{shown}"  # of the folder that it is in


def test_a_point_is_that_of_all_seeds_and_chosen_values():
    keys = {"varied": (("model.channels", "8"),), "panel": "a", "line": "b", "group": 1}
    one = StudyRun(Path("r.yaml"), **keys)
    same = [replace(one, seed=3, seeded=("train.seed",)), replace(one, chosen=(("optim.lr", "3"),))]
    others: list[dict] = [{"varied": ()}, {"panel": ""}, {"line": "c"}, {"group": 0}, {"path": Path("s.yaml")}]
    assert {each.point for each in (one, *same)} == {one.point}
    assert len({one.point, *(replace(one, **other).point for other in others)}) == 6


def test_only_a_run_of_this_recipe_has_ended(tmp_path):
    """Also one that was staged elsewhere, or whose loss was not finite."""
    study_run, other = runs_of(tmp_path, TWO)
    run = train(study_run, tmp_path)
    staged = load_recipe(study_run.path, [*study_run.overrides, ("data.path", "/scratch/digits")])
    for recipe, ended in ((study_run.recipe, True), (staged, True), (other.recipe, False)):
        (run / "recipe.yaml").write_text(dump_recipe(recipe))
        assert study_run.has_ended(tmp_path) == ended
    (run / "done.json").unlink()
    diverged = '{"split": "event", "event": "diverged", "step": 1}\n'
    for lines, recipe, ended in (
        (diverged, study_run.recipe, True),
        (diverged, other.recipe, False),
        (f'{diverged}{{"split": "train", "step": 2}}\n', study_run.recipe, False),
        ("", study_run.recipe, False),
        ("[]\n", study_run.recipe, False),
        (diverged[:20], study_run.recipe, False),
    ):
        (run / "metrics.jsonl").write_text(lines)
        (run / "recipe.yaml").write_text(dump_recipe(recipe))
        assert study_run.has_ended(tmp_path) == ended, lines
        assert study_run.result(tmp_path) is None
    for name, text in (("done.json", "{"), ("recipe.yaml", "train: 3\n")):
        (run / "done.json").write_text('{"top1": 1.0}')
        (run / name).write_text(text)
        with pytest.raises(InputError, match=f"{study_run.name}: is not a finished run"):
            study_run.has_ended(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ((), "digits; 30 epochs; 4 blocks; C = 8 to 16"),
        (("[8, 16]", "[1024]", "  axes", "  set: {train.epochs: 5, data.path: a/b}\n  axes"),
         "b; 5 epochs; 4 blocks; C = 1,024"),
        (("s_mixer", "mixer, Other: cifar10/sw_mlp", "  axes: {model.channels: [8, 16]}\n", ""),
         "digits, cifar10; 30 to 200 epochs; 4 to 8 blocks; C = 64; width 1,619"),
    ],
)  # fmt: skip
def test_what_runs_train_is_said_from_least_to_greatest(tmp_path, changes, said):
    text = TWO
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        text = text.replace(old, new, 1)
    assert scale(runs_of(tmp_path, text)) == said
    assert scale([]) == ""


# Constraints.


@pytest.mark.parametrize(("overrides", "gamma"), [([], 1), ([("model.kind", "mixer"), ("model.expansion", "3")], 3)])
def test_solutions_depend_on_all_other_keys(tmp_path, overrides, gamma):
    """Whatever the order of the axes, and of keys that the study or the command line has set."""
    axes = "{model.channels: {weights: 20000}, model.project_tokens: {omega: 60000}, model.depth: [1, 2]}"
    text = TWO.replace("{model.channels: [8, 16]}", axes)
    for study_run in runs_of(tmp_path, text, overrides):
        model, before = study_run.recipe.model, load_recipe(study_run.path, study_run.overrides[:-1])
        sizes = [
            block_weights(before.model.model_copy(update={"channels": model.channels + more}), before)
            for more in (0, 1)
        ]  # with the recipe's tokens
        assert sizes[0] <= 20000 < sizes[1]
        t, c = model.project_tokens, model.channels
        missed = [abs(gamma * n * c * (n + c) / 2 - 60000) for n in (t - 1, t, t + 1)]
        assert missed[1] == min(missed)


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("Normal, 2^18", [(16, 173), (32, 113), (48, 83), (83, 48), (113, 32), (173, 16)]),
        ("RP, 2^21", [(16, 504), (32, 346), (64, 226), (226, 64), (346, 32), (504, 16)]),
        ("Normal, 2^27", [(128, 1386), (256, 904), (904, 256), (1386, 128)]),
        ("SW-MLP", [(540,), (612,), (724,), (935,), (1619,)]),
    ],
)
def test_omega_gives_the_pairs_and_widths_of_appendix_c4(line, printed):
    path = ROOT / "recipes/studies/figure5.yaml"
    study = read_study(path).model_copy(update={"seeds": [0]})
    runs = [run for run in study_runs_of(path, study) if (run.panel, run.line) == ("CIFAR-10", line)]
    names = ("model.width",) if line == "SW-MLP" else ("model.channels", "model.project_tokens")
    assert keys_of(runs, *names) == printed


@pytest.mark.parametrize(
    ("key", "target", "value"),
    [
        ("density", 2 * 64 * 64, 1.0),  # the dense network is one of these
        ("density", 2 * 64 * 64 + 1, None),
        ("density", 64 * 64, 0.5),
        ("width", 2 * 0.25 * 40 * 40, 40),
        ("width", 0.1, None),
    ],
)
def test_omega_is_solved_from_dense_down_to_width_1(key, target, value):
    keys = {"kind": "sw_mlp", "width": "64", "density": "0.25", "depth": "2", "patch_size": "2", "expansion": "2"}
    keys["project_features"] = "true"
    recipe = load_recipe("digits/mixer", [(f"model.{name}", text) for name, text in keys.items()])
    assert solve([f"model.{key}"], "omega", target, recipe) == value


def test_omega_is_solved_for_the_expansion():
    found, sizes = solve(["model.expansion"], "omega", 123_456, MIXER), (MIXER.model.tokens(8), MIXER.model.channels)
    assert found * sizes[0] * sizes[1] * sum(sizes) / 2 == pytest.approx(123_456)


def test_a_budget_of_weights_may_be_met_exactly():
    recipe, channels = MIXER, MIXER.model.channels
    weights = block_weights(recipe.model, recipe)
    for budget, expected in ((weights - 1, channels - 1), (weights, channels), (weights + 1, channels)):
        assert solve(["model.channels"], "weights", budget, recipe) == expected
    smallest = block_weights(recipe.model.model_copy(update={"channels": 1}), recipe)
    assert solve(["model.channels"], "weights", smallest, recipe) == 1
    assert solve(["model.channels"], "weights", smallest - 1, recipe) is None


@pytest.mark.parametrize(
    "weights", [{"kind": "kronecker"}, {"kind": "block_diagonal", "blocks": 4}, {"kind": "dense"}]
)
def test_widths_fill_their_budget_of_flops(weights):
    """By PyTorch's own counter: of all widths that the matrices can have, the greatest that costs no more."""
    keys = {"model.kind": "s_mixer", "model.expansion": "null", "model.depth": "2"}
    keys |= {"model.token_weights": weights["kind"], "model.channel_weights": weights["kind"]}
    if "blocks" in weights:
        keys["model.blocks"] = str(weights["blocks"])

    def flops(width):
        both = {"model.project_tokens": str(width), "model.channels": str(width)}
        try:
            recipe = load_recipe("digits/mixer", [*keys.items(), *both.items()])
        except InputError:
            return None
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            build_model(recipe.model, 8, 10)(torch.empty(1, 3, 8, 8))
        return counter.get_total_flops()

    costs = {width: cost for width in range(1, 18) if (cost := flops(width)) is not None}
    recipe = load_recipe("digits/mixer", [*keys.items(), ("model.project_tokens", "12"), ("model.channels", "12")])
    both = ["model.project_tokens", "model.channels"]
    for budget in sorted(costs.values()):
        if budget < costs[16]:  # a square: none beyond it costs less
            expected = max(width for width, cost in costs.items() if cost <= budget)
            assert solve(both, "forward_mflops", budget / 1e6, recipe) == expected
    assert solve(both, "forward_mflops", (min(costs.values()) - 1) / 1e6, recipe) is None


@pytest.mark.parametrize(("name", "unit"), [("svhn", 1), ("mnli", 4)])
def test_widths_fill_their_weight_budget(tmp_path, name, unit):
    """Counted on modules: the budget has no room for the next width, and depths without any are left out."""
    recipe = {"svhn": "svhn/mixer_gelu", "mnli": "mnli/transformer"}[name]
    axes = "{model.depth: [1, 4, 5000], model.channels: {weights: [131072, 262144]}}"
    text = TWO.replace("digits/s_mixer", recipe).replace("{model.channels: [8, 16]}", axes)
    study_runs = runs_of(tmp_path, text)

    def weights(model):
        with torch.device("meta"):
            network = build_model(model, 32, 3)
        blocks = network.encoder if name == "mnli" else network.blocks
        return sum(parameter.numel() for parameter in blocks.parameters())

    assert [study_run.recipe.model.depth for study_run in study_runs] == [1, 1, 4, 4]
    for study_run, budget in zip(study_runs, [131072, 262144] * 2, strict=True):
        model = study_run.recipe.model
        assert weights(model) <= budget < weights(model.model_copy(update={"channels": model.channels + unit}))


# Quantities of the axes.


def test_each_size_of_an_axis_is_that_of_the_network():
    """Of a Mixer with S = 16, C = 8, an expansion of 3 and 5 blocks."""
    keys = [("model.channels", "8"), ("model.expansion", "3"), ("model.depth", "5"), ("data.path", "a/digits")]
    recipe = load_recipe("digits/mixer", keys)
    cost = model_cost(recipe.model, 8, 10)
    expected = {
        "width": 128,
        "hidden_width": 3 * 128,
        "depth_to_width": 10 / math.log2(8),
        "c_over_s": 1 / 2,
        "s_over_c": 2,
        "omega": 3 * (8 * 16**2 + 16 * 8**2) / 2,
        "parameters": cost.parameters,
        "memory_mb": 4e-6 * cost.parameters,
        "forward_mflops": 1e-6 * cost.forward_flops,
        "patch_size": 2,
        "patch_features": 12,
        "density": (1 / 16 + 1 / 8) / 2,
        "sparsity": 2 / (1 / 16 + 1 / 8),
        "permuted_block": "none",
        "model.depth": 5,
        "data.path": "digits",
        "model.project_tokens": "None",
    }
    assert {name: value_of(name, recipe) for name in expected} == {
        name: pytest.approx(value) if isinstance(value, float) else value for name, value in expected.items()
    }
    commuted = load_recipe("digits/mixer", [("model.permutation", "commutation")])
    assert value_of("permuted_block", commuted) == "none"
    permuted = ("model.permutation", "random"), ("model.permuted_blocks", "[0, 3]")
    for overrides, text in ((permuted[:1], "all"), (permuted, "1, 4")):
        recipe = load_recipe("digits/mixer", overrides)
        assert value_of("permuted_block", recipe) == text


def test_values_are_numbers_or_the_texts_of_their_parts():
    values = [3, 0.5, True, None, "a", [0, 3], (0.5, "b"), ()]
    assert [as_quantity(value) for value in values] == [3, 0.5, "True", "None", "a", "0, 3", "0.5, b", ""]
    assert [is_number(value) for value in (0, 0.5, math.nan, math.inf, "1")] == [True, True, False, False, False]
    keys = [("model.permutation", "random"), ("model.permuted_blocks", "[]")]
    assert value_of("permuted_block", load_recipe("digits/mixer", keys)) == "none"


# Files.


REFUSED = yaml.safe_load((ROOT / "tests/studies/refused.yaml").read_text())


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in REFUSED.items() for row in rows])
def test_mistakes_are_one_line_before_anything_is_trained(tmp_path, name, row):
    *changes, message = row
    text = getattr(conftest, name)
    plan_of(tmp_path, text)
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        text = text.replace(old, new, 1)
    with pytest.raises(InputError) as found:
        plan_of(tmp_path, text).searched()
    assert message in str(found.value)
    assert "\n" not in str(found.value)


def test_files_with_runs_are_studies(tmp_path):
    path = tmp_path / "study.yaml"
    for content, expected in (
        (TWO.encode(), True),
        (b"model: {}", False),
        (b"\xff", False),
        (b"runs: [", False),
        (b"[runs]", False),
    ):
        path.write_bytes(content)
        assert is_study(path) is expected
    assert not is_study(tmp_path / "none.yaml")


def test_a_recipe_lies_beside_the_study_or_is_shipped(tmp_path):
    (tmp_path / "own.yaml").write_text("extends: digits/mixer\ntrain: {epochs: 3}\n")
    named = TWO.replace("digits/s_mixer", "digits/s_mixer, Own: own.yaml")
    study_runs = runs_of(tmp_path, named)
    shipped = [study_run.name for study_run in runs_of(tmp_path, TWO)]
    assert [study_run.name for study_run in study_runs[:2]] == shipped
    assert [study_run.path for study_run in study_runs[2:]] == [tmp_path / "own.yaml"] * 2
    (tmp_path / "own.yaml").rename(tmp_path / "Own.yaml")
    capital = named.replace("own.yaml", "Own.yaml")
    assert [len(runs_of(tmp_path, capital, only=only)) for only in ("*-Own_*", "*-[A-Z]wn_*8_*")] == [2, 1]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_shipped_study_has_no_run_twice_in_a_line(path):
    """Of its first seed: every recipe is valid, and no two points of a line are the same experiment."""
    study = read_study(path)
    study_runs = study_runs_of(path, study.model_copy(update={"seeds": study.seeds[:1]}))
    drawn = [(study_run.panel, study_run.line, study_run.name) for study_run in study_runs]
    assert len(set(drawn)) == len(drawn) > 0
    for study_run in study_runs:
        for name, text in study_run.varied:
            section, _, leaf = name.partition(".")
            value, wanted = getattr(getattr(study_run.recipe, section), leaf), yaml.safe_load(text)
            assert value == (type(value)(wanted) if isinstance(value, (float, tuple)) else wanted), name
    assert not study.measured or len(study.seeds) in (0, 1, 3, 4, 5)
    for study_run in study_runs[:1]:
        model_cost(study_run.recipe.model, study_run.recipe.data.image_size, study_run.recipe.data.num_classes)

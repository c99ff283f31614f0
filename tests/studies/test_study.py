"""A study file says which runs there are: axes, constraints, seeds, lines; mistakes are one line."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from widemix.errors import InputError
from widemix.models.cost import model_cost
from widemix.models.families import KINDS
from widemix.recipe import Recipe, dump_recipe, experiment_hash, load_recipe
from widemix.studies.quantity import as_quantity, is_number, label_of, value_of
from widemix.studies.solve import block_weights, solve
from widemix.studies.study import Group, _label, is_study, read_study, study_runs_of
from widemix.studies.study_run import StudyRun, unique

STUDIES = sorted((ROOT / "recipes/studies").glob("*.yaml"))
TWO = """
title: t
source: s
claim: c
runs:
- label: Normal
  recipes: {Digits: ROOT/recipes/digits/s_mixer.yaml}
  axes: {model.channels: [8, 16]}
figure: {x: width}
"""


def write(folder, text=TWO):
    path = folder / "study.yaml"
    path.write_text(text.replace("ROOT", str(ROOT)))
    return path


def planned(path, overrides=(), only="*"):
    return study_runs_of(path, read_study(path), overrides, only)


def test_a_cell_is_its_recipe_with_the_values_of_study_entry_command_line_and_axes(tmp_path):
    text = TWO.replace("runs:\n", "set: {train.epochs: 2, optim.lr: 0.5}\nruns:\n")
    text = text.replace("  axes", "  set: {optim.lr: 0.25}\n  axes")
    study_runs = planned(write(tmp_path, text), [("train.epochs", "3")])
    recipes = [study_run.recipe for study_run in study_runs]
    assert [(r.model.channels, r.train.epochs, r.optim.lr) for r in recipes] == [(8, 3, 0.25), (16, 3, 0.25)]
    assert [study_run.name.rpartition("_")[0] for study_run in study_runs] == [
        "digits-s_mixer_channels-8",
        "digits-s_mixer_channels-16",
    ]
    text = text.replace("optim.lr: 0.25}", "model.channels: 4, train.seed: 8}\n  seeded: [model.permutation_seed]")
    text = text.replace("optim.lr: 0.5}", "model.permutation_seed: 9}\nseeds: [5]").replace("s_mixer", "rp_s_mixer")
    recipes = [
        study_run.recipe for study_run in planned(write(tmp_path, text), [("train.epochs", "3")])
    ]  # what varies wins over what is set
    found = [(r.model.channels, r.train.seed, r.model.permutation_seed) for r in recipes]
    assert found == [(8, 5, 5), (16, 5, 5)]
    assert [study_run.name for study_run in planned(write(tmp_path), only="*channels-16_*")] == [
        planned(write(tmp_path))[1].name
    ]
    assert is_study(write(tmp_path))
    assert not is_study(ROOT / "recipes/digits/s_mixer.yaml")
    for content in (b"\xff", b"runs: [", b"[runs]"):
        (tmp_path / "study.yaml").write_bytes(content)
        assert not is_study(tmp_path / "study.yaml")
    assert not is_study(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("recipe", "y", "changed", "refused"),
    [
        ("recipes/digits/s_mixer.yaml", "error", "train.compile: true", False),
        ("recipes/digits/s_mixer.yaml", "error", "train.grad_accum_steps: 2", False),
        ("recipes/digits/s_mixer.yaml", "epoch_seconds", "train.compile: true", True),
        ("recipes/digits/s_mixer.yaml", "epoch_seconds", "engine.kind: fsdp", True),
        ("recipes/digits/s_mixer.yaml", "epoch_seconds", "log.every: 7", False),
        ("tests/engine/repmlp.yaml", "error", "train.grad_accum_steps: 2", True),
        ("tests/engine/repmlp.yaml", "error", "train.compile: true", False),
    ],
)
def test_entries_share_a_run_unless_what_is_shown_differs(tmp_path, recipe, y, changed, refused):
    text = TWO.replace("recipes/digits/s_mixer.yaml", recipe).replace(
        "figure: {x: width}",
        f"""\
- label: Other
  recipes: {{Digits: ROOT/{recipe}}}
  set: {{{changed}}}
  axes: {{model.channels: [8, 16]}}
figure: {{x: model.channels, y: [{y}]}}""",
    )
    path = write(tmp_path, text)
    if refused:
        with pytest.raises(InputError, match=rf"same run as in runs\.0, and {changed.partition(':')[0]} differs"):
            planned(path)
    else:
        assert len(unique(planned(path))) == 2
    one = text[: text.index("- label: Other")] + text[text.index("figure: ") :]
    key, _, value = changed.partition(": ")
    default = {"train.compile": "false", "engine.kind": "ddp"}.get(key, "1")
    axis = one.replace("axes: {", f"axes: {{{key}: [{default}, {value}], ")
    assert len(unique(planned(write(tmp_path, axis)))) == 4


def test_a_run_folder_has_the_hash_of_all_that_the_result_depends_on(tmp_path):
    path = write(tmp_path)
    name = planned(path)[0].name
    for changes in ([("train.seed", "1")], [("data.path", "datasets/other")], [("train.max_steps", "5")]):
        assert planned(path, changes)[0].name != name  # once, all of these were one folder
    for changes in (
        [("log.every", "1")],
        [("engine.kind", "fsdp")],
        [("data.workers", "3")],
        [("optim.lr", "0.001")],
    ):
        same = load_recipe(ROOT / "recipes/digits/s_mixer.yaml").optim.lr == 0.001 or changes[0][0] != "optim.lr"
        assert (planned(path, changes)[0].name == name) is same
    recipe = planned(path)[0].recipe
    assert name.endswith(experiment_hash(recipe))


def test_seeds_set_the_training_seed_and_the_keys_that_follow_it(tmp_path):
    text = TWO.replace("runs:\n", "seeds: [3, 4]\nruns:\n").replace("s_mixer.yaml", "rp_s_mixer.yaml")
    study_runs = planned(write(tmp_path, text.replace("  axes", "  seeded: [model.permutation_seed]\n  axes")))
    sampled = [(c.recipe.model.channels, c.recipe.train.seed, c.recipe.model.permutation_seed) for c in study_runs]
    assert sampled == [(8, 3, 3), (8, 4, 4), (16, 3, 3), (16, 4, 4)]
    assert len({study_run.name for study_run in study_runs}) == 4
    zero = text.replace("seeds: [3, 4]", "seeds: [0]\nset: {train.seed: 8, model.permutation_seed: 9}")
    study_runs = planned(write(tmp_path, zero.replace("  axes", "  seeded: [model.permutation_seed]\n  axes")))
    assert {(c.recipe.train.seed, c.recipe.model.permutation_seed) for c in study_runs} == {(0, 0)}


def test_a_name_has_the_point_then_what_was_chosen_for_it_then_the_seed():
    """In this order ever since: a run by another name would be trained again."""
    keys = {"varied": (("model.channels", "8"),), "chosen": (("optim.lr", "0.1"),), "seeded": ("train.seed",)}
    study_run = StudyRun(ROOT / "recipes/digits/s_mixer.yaml", seed=3, **keys)
    assert study_run.name == f"digits-s_mixer_channels-8_lr-0.1_seed-3_{experiment_hash(study_run.recipe)}"
    long = StudyRun(ROOT / "recipes/digits/s_mixer.yaml", (("data.path", f"/a b/{'c' * 200}"),))
    assert long.name == f"digits-s_mixer_path-a_b_{'c' * 96}_{experiment_hash(long.recipe)}"  # 120 before the hash


def test_a_name_has_signs_of_numbers_and_of_a_value_nothing_at_its_ends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text("extends: digits/s_mixer\n")
    for text, shown in (("'1.0e+3'", "1.0e+3"), ("-0.5,2", "-0.5_2"), ("_a._", "a"), ("a  b/c", "a_b_c")):
        study_run = StudyRun(Path("own.yaml"), (("data.path", text),))
        assert study_run.name.rpartition("_")[0] == f"{tmp_path.name}-own_path-{shown}"  # of the folder that it is in


def test_a_point_is_that_of_the_runs_that_differ_in_seed_and_chosen_values_alone():
    keys = {"varied": (("model.channels", "8"),), "panel": "a", "line": "b", "group": 1}
    one = StudyRun(Path("r.yaml"), **keys)
    same = [replace(one, seed=3, seeded=("train.seed",)), replace(one, chosen=(("optim.lr", "3"),))]
    others: list[dict] = [{"varied": ()}, {"panel": ""}, {"line": "c"}, {"group": 0}, {"path": Path("s.yaml")}]
    assert {each.point for each in (one, *same)} == {one.point}
    assert len({one.point, *(replace(one, **other).point for other in others)}) == 6


def test_a_folder_that_cannot_be_read_is_named_and_a_loss_that_was_not_finite_is_an_end_of_its_own_run(tmp_path):
    study_run, other = planned(write(tmp_path))
    run = tmp_path / study_run.name
    run.mkdir()
    diverged = '{"split": "event", "event": "diverged", "step": 1}\n'
    (run / "metrics.jsonl").write_text(diverged)
    (run / "recipe.yaml").write_text(dump_recipe(study_run.recipe))
    assert study_run.has_diverged(tmp_path)
    assert study_run.has_ended(tmp_path)
    assert study_run.result(tmp_path) is None
    for lines in (f'{diverged}{{"split": "train", "step": 2}}\n', "", "[]\n", diverged[:20]):
        (run / "metrics.jsonl").write_text(lines)
        assert not study_run.has_ended(tmp_path)
    (run / "metrics.jsonl").write_text(diverged)
    (run / "recipe.yaml").write_text(dump_recipe(other.recipe))
    assert not study_run.has_ended(tmp_path)
    for name, text in (("done.json", "{"), ("recipe.yaml", "train: 3\n")):
        (run / "done.json").write_text('{"top1": 1.0}')
        (run / name).write_text(text)
        with pytest.raises(InputError, match=f"{study_run.name}: is not a finished run"):
            study_run.has_ended(tmp_path)


def test_lines_share_a_cell_that_is_the_same(tmp_path):
    entry = TWO[TWO.index("- label") : TWO.index("figure")]
    study_runs = planned(write(tmp_path, TWO.replace("figure:", entry.replace("Normal", "Again") + "figure:")))
    assert [study_run.line for study_run in study_runs] == ["Normal", "Normal", "Again", "Again"]
    assert len(unique(study_runs)) == 2


def test_joined_axes_vary_together_and_lines_are_labelled(tmp_path):
    axes = "{'model.channels, model.patch_size': [[8, 2], [16, 2]], model.depth: [1, 2]}\n  lines: [model.depth]"
    study_runs = planned(write(tmp_path, TWO.replace("{model.channels: [8, 16]}", axes)))
    assert [(c.recipe.model.channels, c.line) for c in study_runs] == [
        (8, "Normal, depth 1"),
        (8, "Normal, depth 2"),
        (16, "Normal, depth 1"),
        (16, "Normal, depth 2"),
    ]


def test_solutions_depend_on_all_other_keys_and_their_targets_may_label_lines(tmp_path):
    """Whatever the order of the axes, and of keys that the study or the command line has set."""
    axes = "{model.channels: {weights: [20000, 50]}, model.tokens: {omega: 60000}, model.depth: [1, 2]}"
    axes += "\n  set: {model.project_tokens: true}\n  lines: [model.channels, model.tokens]"
    path = write(tmp_path, TWO.replace("{model.channels: [8, 16]}", axes))
    for overrides, gamma in (([], 1), ([("model.kind", "mixer"), ("model.expansion", "3")], 3)):
        study_runs = planned(path, overrides)
        models = [study_run.recipe.model for study_run in study_runs]
        assert [study_run.line for study_run in study_runs] == ["Normal, 20,000 weights, 60,000 connections"] * 2
        assert [model.depth for model in models] == [1, 2]  # 50 weights are too few for both
        for study_run, model in zip(study_runs, models, strict=True):
            before = load_recipe(study_run.path, study_run.overrides[:-1])  # with the recipe's tokens
            sizes = [
                block_weights(before.model.model_copy(update={"channels": c}), before)
                for c in (model.channels, model.channels + 1)
            ]
            assert sizes[0] <= 20000 < sizes[1]
            t, c = model.tokens, model.channels
            missed = [abs(gamma * n * c * (n + c) / 2 - 60000) for n in (t - 1, t, t + 1)]
            assert missed[1] == min(missed)
    axes = "{model.channels: {forward_mflops: 0.25}}\n  lines: [model.channels]"
    assert planned(write(tmp_path, TWO.replace("{model.channels: [8, 16]}", axes)))[0].line == "Normal, 0.25 MFLOPs"


def test_omega_gives_the_papers_pairs_and_widths():
    """As appendix C.4 prints them."""
    path = ROOT / "recipes/studies/figure5.yaml"
    study = read_study(path)
    study = study.model_copy(update={"seeds": [0]})
    study_runs = [study_run for study_run in study_runs_of(path, study) if study_run.panel == "CIFAR-10"]
    mixers = [study_run.recipe.model for study_run in study_runs if study_run.line == "Normal, 2^18"]
    assert [(m.channels, m.tokens) for m in mixers] == [
        (16, 173),
        (32, 113),
        (48, 83),
        (83, 48),
        (113, 32),
        (173, 16),
    ]
    mixers = [study_run.recipe.model for study_run in study_runs if study_run.line == "RP, 2^21"]
    printed = [(16, 504), (32, 346), (64, 226), (226, 64), (346, 32), (504, 16)]
    assert [(m.channels, m.tokens) for m in mixers] == printed
    mixers = [study_run.recipe.model for study_run in study_runs if study_run.line == "Normal, 2^27"]
    assert [(m.channels, m.tokens) for m in mixers] == [(128, 1386), (256, 904), (904, 256), (1386, 128)]
    widths = [study_run.recipe.model.width for study_run in study_runs if study_run.line == "SW-MLP"]
    assert widths == [540, 612, 724, 935, 1619]


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
def test_omega_has_a_solution_up_to_the_dense_network_and_down_to_width_1(key, target, value):
    overrides = [("model.kind", "sw_mlp"), ("model.width", "64"), ("model.density", "0.25"), ("model.depth", "2")]
    overrides += [("model.patch_size", "2"), ("model.expansion", "2"), ("model.project_tokens", "true")]
    recipe = load_recipe(ROOT / "recipes/digits/mixer.yaml", overrides)
    assert solve([f"model.{key}"], "omega", target, recipe) == value


def test_omega_is_solved_for_the_expansion_and_for_no_key_that_it_does_not_depend_on():
    recipe = load_recipe(ROOT / "recipes/digits/mixer.yaml")
    found = solve(["model.expansion"], "omega", 123_456, recipe)
    sizes = recipe.model.tokens, recipe.model.channels
    assert found * sizes[0] * sizes[1] * sum(sizes) / 2 == pytest.approx(123_456)
    with pytest.raises(
        InputError, match=r"model\.depth: omega can't be solved for this key of a model of kind mixer"
    ):
        solve(["model.depth"], "omega", 123_456, recipe)
    with pytest.raises(InputError, match=r"model\.permutation_seed: the weights of the blocks do not grow with this"):
        solve(["model.permutation_seed"], "weights", 1e9, recipe)
    with pytest.raises(InputError, match=r"model\.patch_size: weights can't be solved for this key: .* 64 tokens"):
        solve(["model.patch_size"], "weights", 1e9, recipe)
    with pytest.raises(InputError, match=r"model\.permutation_seed: the FLOPs do not grow"):
        solve(["model.permutation_seed"], "forward_mflops", 1e9, recipe)
    with pytest.raises(InputError, match=r"model\.tokens, model\.channels: omega is solved for one key"):
        solve(["model.tokens", "model.channels"], "omega", 1e5, recipe)
    with pytest.raises(InputError, match=r"model\.tokens, model\.channels: weights is solved for one key"):
        solve(["model.tokens", "model.channels"], "weights", 1e5, recipe)
    with pytest.raises(InputError, match=r"optim\.channels: omega is solved for a key of the model"):
        solve(["optim.channels"], "omega", 1e5, recipe)
    masked = {"patch_size": 4, "width": 24, "density": 0.5, "depth": 1}
    product = {"width": 24, "matrices": "kronecker"}
    for kind, key, sizes in (("shallow", "width", product), ("sw_mlp", "expansion", masked)):
        model = KINDS[kind](kind=kind, **sizes)
        other = recipe.model_copy(update={"model": model})
        with pytest.raises(InputError, match=f"model.{key}: omega can't be solved for .* of kind {kind}"):
            solve([f"model.{key}"], "omega", 1e5, other)


def test_each_size_of_an_axis_is_that_of_the_network():
    """Of a Mixer with S = 16, C = 8, an expansion of 3 and 5 blocks."""
    keys = [("model.channels", "8"), ("model.expansion", "3"), ("model.depth", "5"), ("data.path", "a/digits")]
    recipe = load_recipe(ROOT / "recipes/digits/mixer.yaml", keys)
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
        "model.project_tokens": "False",
    }
    assert {name: value_of(name, recipe) for name in expected} == {
        name: pytest.approx(value) if isinstance(value, float) else value for name, value in expected.items()
    }
    commuted = load_recipe(ROOT / "recipes/digits/mixer.yaml", [("model.permutation", "commutation")])
    assert value_of("permuted_block", commuted) == "none"
    permuted = ("model.permutation", "random"), ("model.permuted_blocks", "[0, 3]")
    for overrides, text in ((permuted[:1], "all"), (permuted, "1, 4")):
        recipe = load_recipe(ROOT / "recipes/digits/mixer.yaml", overrides)
        assert value_of("permuted_block", recipe) == text


def test_values_are_numbers_or_the_texts_of_their_parts():
    values = [3, 0.5, True, None, "a", [0, 3], (0.5, "b"), ()]
    assert [as_quantity(value) for value in values] == [3, 0.5, "True", "None", "a", "0, 3", "0.5, b", ""]
    keys = [("model.permutation", "random"), ("model.permuted_blocks", "[]")]
    assert value_of("permuted_block", load_recipe(ROOT / "recipes/digits/mixer.yaml", keys)) == "none"


def test_an_axis_is_labelled_by_its_quantity():
    names = {"sparsity": "1 / p", "error": "test error (%)", "top1": "top-1 (%)", "optim.lr": "learning rate"}
    names |= {"data.path": "data", "model.patch_size": "patch size", "c_over_s": "C / S", "s_over_c": "S / C"}
    assert {name: label_of(name) for name in names} == names
    assert label_of("loss", "held-out") == "held-out loss"
    assert [is_number(value) for value in (0, 0.5, math.nan, math.inf, "1")] == [True, True, False, False, False]


def test_a_network_without_that_ratio_has_no_depth_to_width():
    values = load_recipe(ROOT / "recipes/digits/mixer.yaml").model_dump()
    recipe = Recipe.model_validate(values | {"model": {"kind": "s_fc", "base_channels": 3}})
    with pytest.raises(InputError, match="depth_to_width: a model of kind s_fc has no such ratio"):
        value_of("depth_to_width", recipe)


def test_a_budget_of_weights_may_be_met_exactly():
    recipe = load_recipe(ROOT / "recipes/digits/mixer.yaml")
    weights = block_weights(recipe.model, recipe)
    channels = recipe.model.channels
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
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from widemix.models.registry import build_model

    keys = {"model.kind": "s_mixer", "model.expansion": "null", "model.depth": "2", "model.project_tokens": "true"}
    keys |= {"model.token_weights": weights["kind"], "model.channel_weights": weights["kind"]}
    if "blocks" in weights:
        keys["model.blocks"] = str(weights["blocks"])

    def flops(width):
        both = {"model.tokens": str(width), "model.channels": str(width)}
        try:
            recipe = load_recipe(ROOT / "recipes/digits/mixer.yaml", [*keys.items(), *both.items()])
        except InputError:
            return None
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            build_model(recipe.model, 8, 10)(torch.empty(1, 3, 8, 8))
        return counter.get_total_flops()

    costs = {width: cost for width in range(1, 18) if (cost := flops(width)) is not None}
    recipe = load_recipe(
        ROOT / "recipes/digits/mixer.yaml", [*keys.items(), ("model.tokens", "12"), ("model.channels", "12")]
    )
    both = ["model.tokens", "model.channels"]
    for budget in sorted(costs.values()):
        if budget < costs[16]:  # a square: none beyond it costs less
            expected = max(width for width, cost in costs.items() if cost <= budget)
            assert solve(both, "forward_mflops", budget / 1e6, recipe) == expected
    assert solve(both, "forward_mflops", (min(costs.values()) - 1) / 1e6, recipe) is None


@pytest.mark.parametrize(("name", "unit"), [("svhn", 1), ("mnli", 4)])
def test_widths_fill_their_weight_budget(tmp_path, name, unit):
    """Counted on modules: the budget has no room for the next width, and depths without any are left out."""
    import torch

    from widemix.models.registry import build_model

    recipe = {"svhn": "svhn/mixer_gelu", "mnli": "mnli/transformer"}[name]
    axes = "{model.depth: [1, 4, 5000], model.channels: {weights: [131072, 262144]}}"
    text = TWO.replace("digits/s_mixer", recipe).replace("{model.channels: [8, 16]}", axes)
    study_runs = planned(write(tmp_path, text))

    def weights(model):
        with torch.device("meta"):
            network = build_model(model, 32, 3)
        blocks = network.encoder if name == "mnli" else network.blocks
        return sum(parameter.numel() for parameter in blocks.parameters())

    assert [study_run.recipe.model.depth for study_run in study_runs] == [1, 1, 4, 4]
    for study_run, budget in zip(study_runs, [131072, 262144] * 2, strict=True):
        model = study_run.recipe.model
        assert weights(model) <= budget < weights(model.model_copy(update={"channels": model.channels + unit}))


@pytest.mark.parametrize(
    ("old", "new", "overrides", "only", "error_message"),
    [
        ("", "", [("model.channels", "8")], "*", "--model.channels: .* varies it"),
        ("", "", [], "x*", "no run is called x.; the first is digits-s_mixer_channels-8"),
        ("", "", [], "*S_MIXER*", "no run is called .S_MIXER.; the first is digits-s_mixer_channels-8"),
        ("[8, 16]", "[8, 8]", [], "*", r"runs.0 \(Normal\): the run digits-s_mixer_channels-8_.* is duplicated"),
        ("[8, 16]", "[]", [], "*", "runs.0: axes: model.channels: has no values"),
        ("axes", "axis", [], "*", "runs.0: unknown key axis; did you mean axes"),
        ("claim", "clam", [], "*", "unknown key clam; did you mean claim"),
        (
            "model.channels: [8, 16]",
            "data.path: [1e3]",
            [],
            "*",
            "data.path 1000.0: must be text; put quotes",
        ),
        ("title: t", "title: t\nset: {data.path: no}", [], "*", "data.path false: must be text; put quotes around"),
        ("model.channels", "model.chanels", [], "*", r"study.yaml: runs.0 \(Normal\): model.chanels: .*channels"),
        ("", "", [("model.chanels", "8")], "*", "^--model.chanels: no such key"),
        ("[8, 16]", "[8, 0]", [], "*", r"study.yaml: runs.0 \(Normal\): model.channels 0: input should be"),
        ("x: width", "x: wdith", [], "*", "wdith: no such quantity; did you mean width"),
        ("x: width", "x: error", [], "*", "error is a result"),
        ("x: width", "x: epoch_seconds", [], "*", "epoch_seconds is a result"),
        ("x: width", "x: epoch, max_std: 0", [], "*", "max_std leaves out points"),
        ("model.channels: [8, 16]", "optim.lr: {omega: 4}", [], "*", "omega is solved for a key of the model"),
        ("model.channels: [8, 16]", "model.depth: {omega: 4}", [], "*", "model.depth: omega can't be solved"),
        (
            "model.channels: [8, 16]",
            "'model.tokens, model.channels': {omega: 4}",
            [],
            "*",
            "omega is solved for one key",
        ),
        ("recipes/digits/s_mixer.yaml", "no.yaml", [], "*", "no.yaml: no such recipe"),
        ("title: t", "title: [", [], "*", "not valid YAML"),
        ("title: t", "titel: t", [], "*", "unknown key titel; did you mean title"),  # rather than that it is missing
        ("x: width", "x: width, logx: true", [], "*", "figure: unknown key logx; did you mean log_x"),
        (
            "model.channels: [8, 16]",
            "'model.depth, model.channels': [[1, 8], [2]]",
            [],
            "*",
            r"\[2\] should be .* of 2",
        ),
        ("model.channels: [8, 16]", "'model.depth, model.channels': [[1, 8, 3]]", [], "*", "should be a list of 2"),
        ("model.channels: [8, 16]", "'model.depth, model.channels': [8, 16]", [], "*", "8 should be a list of 2"),
        ("model.channels: [8, 16]", "model.channels: {omega: 9, weights: 9}", [], "*", "give one of omega, weights"),
        ("  axes", "  lines: [model.depth]\n  axes", [], "*", "lines: model.depth is not one of the axes"),
        ("axes: {model.channels: [8, 16]}", "lines: [model.depth]", [], "*", "model.depth is not one of the axes"),
        (
            "  axes",
            "  seeded: [data.pixel_seed]\n  axes",
            [("data.pixel_seed", "3")],
            "*",
            "pixel_seed: .* varies it",
        ),
        ("claim: c", "seeds: [1]", [("train.seed", "3")], "*", "--train.seed: .* varies it"),
        (
            "model.channels: [8, 16]",
            "eval.every_epochs: [1, 2]",
            [("eval.every_epochs", "3")],
            "*",
            "--eval.every_epochs: .* varies it",
        ),
        ("claim: c", "seeds: [1, -1]", [], "*", "seeds.1: "),
    ],
)
def test_mistakes_are_one_line_before_anything_is_trained(tmp_path, old, new, overrides, only, error_message):
    path = write(tmp_path, TWO.replace(old, new, 1) if old else TWO)
    with pytest.raises(InputError, match=error_message) as found:
        planned(path, overrides, only)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("text", ["extends: a\n", "model: {kind: mixer}\n", "train: {epochs: 3}\n"])
def test_a_recipe_is_no_study_and_a_name_like_a_hidden_files_is_not_suggested(tmp_path, text):
    with pytest.raises(InputError, match=r"study\.yaml: is a recipe, not a study"):
        read_study(write(tmp_path, text))
    (tmp_path / "study.yaml").rename(tmp_path / ".studi.yaml")
    with pytest.raises(InputError, match=r"study\.yaml: no such study$"):
        read_study(tmp_path / "study.yaml")
    (tmp_path / "studio.yaml").touch()
    with pytest.raises(InputError, match=r"study\.yaml: no such study; did you mean \S+/studio\.yaml\?"):
        read_study(tmp_path / "study.yaml")


def test_a_figure_needs_runs_where_any_of_its_quantities_is_a_result_and_large_targets_are_whole(tmp_path):
    for y, measured in (("[width]", False), ("[width, error]", True), ("[loss]", True)):
        assert read_study(write(tmp_path, TWO.replace("x: width", f"x: width, y: {y}"))).measured is measured
    axes = {"model.channels": {"weights": 9}, "model.depth": [1]}
    group = Group(label="a", recipes={"b": "c"}, axes=axes, lines=["model.channels"])
    shown = [_label("model.channels", value, group) for value in (99.5, 100, 123.4, 1e6)]
    assert shown == ["99.5 weights", "100 weights", "123 weights", "1,000,000 weights"]
    assert _label("model.depth", 1, group) == ""


def test_a_recipe_lies_beside_the_study_or_is_a_shipped_one(tmp_path):
    (tmp_path / "own.yaml").write_text("extends: digits/mixer\ntrain: {epochs: 3}\n")
    named = TWO.replace("ROOT/recipes/digits/s_mixer.yaml", "digits/s_mixer, Own: own.yaml")
    study_runs = planned(write(tmp_path, named))
    shipped = [study_run.name for study_run in planned(write(tmp_path))]
    assert [study_run.name for study_run in study_runs[:2]] == shipped
    assert [study_run.path for study_run in study_runs[2:]] == [tmp_path / "own.yaml"] * 2
    (tmp_path / "own.yaml").rename(tmp_path / "Own.yaml")
    capital = write(tmp_path, named.replace("own.yaml", "Own.yaml"))
    assert [len(planned(capital, only=only)) for only in ("*-Own_*", "*-[A-Z]wn_*8_*")] == [2, 1]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_shipped_study_has_no_cell_twice_in_a_line(path):
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

"""Every option of every command reaches the function that does its work, with a value that is not its default."""

import argparse
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clone import CLONE, ROOT
from widemix.cli.bench import ELSEWHERE
from widemix.cli.options import check_networks
from widemix.cli.parser import make_parser
from widemix.cli.reference import _commands
from widemix.cli.train import _count_gpus
from widemix.command_line.commands import run_command, split_overrides
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError

NET = "timm:resnet10t"
# Options that `options.write_outputs` and `bench.report.report` handle for all commands: test_outputs.py.
OUTPUTS = {"--to", "--tensorboard", "--json"}


class Reached(BaseException):
    """The call that a command ends in."""

    def __init__(self, arguments: tuple[Any, ...], options: dict[str, Any]):
        super().__init__()
        self.arguments, self.options = arguments, options


def call_of(words: str, target: str, monkeypatch) -> Reached:
    """What a command calls its function with."""

    def reach(*arguments, **options):
        raise Reached(arguments, options)

    monkeypatch.setattr(target, reach)
    with pytest.raises(Reached) as reached:
        assert run_command(make_parser(), argv=shlex.split(words)) == 0
    return reached.value


P = Path
SETTINGS = {
    "quality": 80, "raw": True, "restart_markers": False, "max_pixels": 99, "on_corrupt": "error", "splits": "train",
    "targets": "a,b", "part": "1/2", "per_class": 0, "shuffle": False, "seed": 3, "length": 9, "vocab": "v.txt",
    "vocab_size": 199, "fraction": 0.5, "holdout": 0.25,
}  # fmt: skip
PREP = "prep csv --from a --to b --quality 80 --raw --no-restart-markers --max-pixels 99 --on-corrupt error "
PREP += "--splits train --targets a,b --part 1/2 --no-shuffle --seed 3 --length 9 --vocab v.txt --vocab-size 199 "
PREP += "--fraction 50% --holdout 0.25 --processes 2 --plugins json"
# Command line -> the function, and its arguments by position and by name.
CALLS: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = [
    (
        f"{PREP} --max-size 99 --force --max-bad 3%",
        "widemix.data_prep.prepare.prepare",
        ("csv", P("a"), P("b"), PrepSettings(max_size=99, side="longest", **SETTINGS)),
        {"processes": 2, "force": True, "extend": False, "max_bad": 0.03},
    ),
    (
        f"{PREP} --short-side 88 --extend --dry-run",
        "widemix.data_prep.dry_run.dry_run",
        ("csv", P("a"), P("b"), PrepSettings(max_size=88, side="shortest", **SETTINGS)),
        {"processes": 2, "force": False, "extend": True},
    ),
    (
        "prep digits --per-class 5 --encoding coefficients",
        "widemix.data_prep.prepare.prepare",
        ("digits", None, P("datasets/digits"), PrepSettings(per_class=5, shuffle=True, encoding="coefficients")),
        {"processes": None, "force": False, "extend": False, "max_bad": 0.01},
    ),
    ("prep --restore a --to b", "widemix.data_prep.restore.restore", (P("a"), P("b")), {}),
    (
        "join a b --to c --max-bad 0.5 --force",
        "widemix.data_prep.join.join",
        ([P("a"), P("b")], P("c")),
        {"max_bad": 0.5, "force": True},
    ),
    (
        "adopt train=a.beton b_val.beton --to c --classes {names}",
        "widemix.data_prep.adopt.adopt",
        ({"train": P("a.beton"), "val": P("b_val.beton")}, P("c"), ("one", "two")),
        {},
    ),
    (
        "adopt train=/x=1/a.beton /x=1/b_val.beton --to c",
        "widemix.data_prep.adopt.adopt",
        ({"train": P("/x=1/a.beton"), "val": P("/x=1/b_val.beton")}, P("c"), ()),
        {},
    ),
    ("verify a", "widemix.data_prep.verify.verify", (P("a"),), {}),
    ("stage a --to b", "widemix.launch.stage.stage", (P("a"), P("b")), {}),
    ("stage s3://a/b --to c", "widemix.launch.stage.stage", ("s3://a/b", P("c")), {}),
    ("stage ~/a --to=~/b~", "widemix.launch.stage.stage", (P("{tmp}/a"), P("{tmp}/b~")), {}),
    ("prep --restore=~/~ --to ~", "widemix.data_prep.restore.restore", (P("{tmp}/~"), P("{tmp}")), {}),
    (
        "adopt train=~/a.beton val=./~ --to=~",
        "widemix.data_prep.adopt.adopt",
        ({"train": P("{tmp}/a.beton"), "val": P("~")}, P("{tmp}"), ()),
        {},
    ),
    ("stage --to {tmp} --clean 7", "widemix.launch.stage.remove_old", (P("{tmp}"), 7.0), {}),
    ("stage --to {tmp} --clean 0", "widemix.launch.stage.remove_old", (P("{tmp}"), 0.0), {}),
    ("stage --environment --to b", "widemix.launch.environment.pack", (P("b"),), {}),
    (
        f"eval {NET} --data d --split s --batch 7 --ema --details --real r.json --to o",
        "widemix.evaluation.assessment.assess",
        (NET, P("d"), "s", 7, True, True, P("r.json")),
        {},
    ),
    (
        "export {run} --to b --ema --onnx --license mit",
        "widemix.evaluation.trained.export_checkpoint",
        (P("{run}"), P("b"), True, True, "mit"),
        {},
    ),
    ("push a b/c --private", "widemix.models.hub.push", (P("a"), "b/c", True), {}),
    ("push a b/c", "widemix.models.hub.push", (P("a"), "b/c", False), {}),
    (
        "doctor --cluster --data d --network 100 --exclude e --timeout 7",
        "widemix.doctor.cluster.run_cluster_doctor",
        (P("d"), 100e9 / 8, P("e"), 7.0),
        {},
    ),
    ("cost --omega 1000 --gamma 3", "widemix.estimate.tables.pairs_rows", (1000.0, 3.0), {}),
    ("cost --recipes a", "widemix.estimate.recipe_tables.refresh", (P("a"),), {}),
    ("cost --named", "widemix.estimate.tables.named_table", (), {}),
    (
        "analyse sparse-spectrum --connections 64 --gamma 3 --widths 30 40 --trials 2 --seed 5",
        "widemix.analysis.sparse_spectrum.widening",
        (64, 3.0, [30, 40], 2, 5),
        {},
    ),
    (
        "analyse regularisation --tokens 2 --channels 3 --samples 9 --noise 0.5 --seed 4",
        "widemix.analysis.regularisation.regression",
        (2, 3, 9, 0.5, 4),
        {},
    ),
    (
        f"analyse spectrum {NET} --layers a b --ema",
        "widemix.analysis.training_spectrum.course",
        (NET, ["a", "b"], True, False),
        {},
    ),
    (f"analyse spectrum {NET} --products", "widemix.analysis.training_spectrum.course", (NET, (), False, True), {}),
    (f"analyse pixels {NET} --ema", "widemix.evaluation.networks.load_network", (NET, True), {}),
    (f"analyse filters {NET} --ema", "widemix.evaluation.networks.load_network", (NET, True), {}),
    (f"analyse cka {NET} {NET} --ema", "widemix.evaluation.networks.load_network", (NET, True), {}),
    (f"predict {NET} {{tmp}} --ema", "widemix.evaluation.networks.load_network", (NET, True), {}),
    (f"bench inference {NET} --ema", "widemix.evaluation.networks.load_network", (NET, True), {}),
    (
        "study bounds --to {tmp} --width 64 --tokens 9 --heads 2 --depth 5",
        "widemix.studies.bounds.bounds",
        (range(1, 6), 64, 9, 2),
        {},
    ),
]


@pytest.fixture
def names(tmp_path, monkeypatch) -> dict[str, str]:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "names").write_text("one\ntwo\n")
    (tmp_path / "image.png").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/COMPLETE").touch()
    state = {"step": 1, "data_step": 1, "seconds": 1, "scalars": {}, "metrics": {}, "recipe": {}}
    (tmp_path / "run/state.json").write_text(json.dumps(state))
    return {"tmp": str(tmp_path), "names": str(tmp_path / "names"), "run": str(tmp_path / "run")}


def filled(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: filled(each, names) for key, each in value.items()}
    return P(str(value).format(**names)) if isinstance(value, P) else value


@pytest.mark.parametrize(("words", "target", "arguments", "options"), CALLS, ids=[each[0][:40] for each in CALLS])
def test_what_is_typed_is_what_is_done(words, target, arguments, options, names, monkeypatch):
    monkeypatch.chdir(CLONE)
    found = call_of(words.format(**names), target, monkeypatch)
    assert found.arguments == tuple(filled(value, names) for value in arguments)
    assert found.options == options


STUDY = "recipes/studies/figure7.yaml"
TINY = (
    "svhn/mixer_square --model.kind s_mixer --model.expansion null --model.norm none --model.project_tokens true "
    "--model.tokens 2 --model.channels 2 --model.depth 2"
)
RECIPE = "digits/mixer --model.depth 3"
# Command line -> the function, and what is to be read off its arguments.
READ: list[tuple[str, str, Any, Any]] = [
    (
        f"train {RECIPE} --data.path {{digits}} --run-dir r --resume never -v",
        "widemix.trainer.train",
        lambda recipe, *others: (recipe.model.depth, recipe.data.num_classes, others[:2], *others[2:]),
        lambda v: (3, 10, (P("r"), "never"), P("digits/mixer"), v, 1),
    ),
    (
        f"train {RECIPE} --data.path {{digits}} --run-dir r --resume never -q --ranks 2",
        "widemix.launch.local.launch",
        lambda command, ranks: (command, ranks),
        lambda v: (
            ["-m", "widemix", "train", "digits/mixer", "--resume=never", "--run-dir=r", "-q"]
            + [f"--{name}={value}" for name, value in v],
            2,
        ),
    ),
    (
        f"train {RECIPE} --data.path {{digits}} -v --ranks 4",
        "widemix.launch.local.launch",
        lambda command, ranks: (command[:6], len(command), ranks),
        lambda v: (["-m", "widemix", "train", "digits/mixer", "--resume=auto", "-v"], 8, 4),
    ),
    (
        f"train {RECIPE} --data.path {{digits}} --dry-run --ranks 4",
        "widemix.estimate.report.estimate",
        lambda recipe, cluster: (recipe.model.depth, cluster.gpus),
        lambda v: (3, 4),
    ),
    (
        f"cost {RECIPE} --samples 77 --rehearse --measure --gpus 8 --gpu h100 --nodes 4 --network 2xedr",
        "widemix.estimate.report.estimate",
        lambda recipe, cluster, *others: (recipe.model.depth, tuple(cluster), others),
        lambda v: (3, (8, "h100", 4, "2xedr"), (77, True, True)),
    ),
    (
        "cost --table recipes/digits --gpus 8",
        "widemix.estimate.rehearsals.rehearsal_rows",
        lambda folder, cluster, overrides: (folder, cluster.gpus, overrides),
        lambda v: (P("recipes/digits"), 8, []),
    ),
    (
        f"analyse augment {RECIPE} --to t --images 7 --seed 5",
        "widemix.analysis.augment.write_sheets",
        lambda recipe, *others: (recipe.model.depth, *others),
        lambda v: (3, P("t"), 7, 5),
    ),
    (
        f"bench scale {RECIPE} --batch 3 --steps 5 --to {{tmp}} --cpus 1",
        "widemix.bench.scale.measure_scale",
        lambda recipe, *others: (recipe.model.depth, *others),
        lambda v: (3, 3, 5, 1),
    ),
    (
        f"eval {NET} --ranks 3",
        "widemix.launch.local.launch",
        lambda command, ranks: (command, ranks),
        lambda v: (["-m", "widemix", *sys.argv[1:]], 3),
    ),
    (
        f"bench scale {RECIPE} --ranks 3",
        "widemix.launch.local.launch",
        lambda command, ranks: (command, ranks),
        lambda v: (["-m", "widemix", *sys.argv[1:]], 3),
    ),
    (
        f"study plan {STUDY} --to a --report b --only *depth-2* --train.epochs 3",
        "widemix.studies.plan.make_plan",
        lambda path, study, table, overrides, only: (path, study.title[:2], table.path, overrides, only),
        lambda v: (P(STUDY), "", P("b/figure7.jsonl"), [("train.epochs", "3")], "*depth-2*"),
    ),
    (
        f"analyse separation-rank {TINY} --no-residuals --seed 5",
        "widemix.analysis.separation_rank.mixer_layers",
        lambda recipe, *others: (recipe.model.depth, *others),
        lambda v: (2, False, 5),
    ),
    (
        f"analyse separation-rank {TINY} --heads 2 --seed 5",
        "widemix.analysis.separation_rank.attention_layers",
        lambda *arguments: arguments,
        lambda v: (4, 2, 2, 5),
    ),
    (
        f"analyse separation-rank {TINY} --partition channels --most 64 --seed 5",
        "widemix.analysis.separation_rank.separation_ranks",
        lambda layers, *others: others,
        lambda v: ((2, 2), 2, "channels", 64, 5),
    ),
    (
        f"bench step {RECIPE} --rounds 3 --batch 5 --compiled",
        "widemix.bench.step.run",
        lambda given: (given.recipe, given.overrides, given.rounds, given.batch, given.compiled),
        lambda v: ("digits/mixer", [("model.depth", "3")], 3, 5, True),
    ),
    (
        "bench gpu --to {tmp} --from {tmp} --only b16 wait --minutes 5 --small",
        "widemix.bench.gpu.run_parts",
        lambda parts, where, minutes: (parts, where.to, where.origin, where.small, minutes),
        lambda v: (["b16", "wait"], P("{tmp}"), P("{tmp}"), True, 5),
    ),
]
BENCH_OPTIONS = {
    "augment": "",
    "loader": "--samples 9 --threads 1 2",
    "start": "",
    "prep": "--samples 9",
    "views": "",
}
BENCH_OPTIONS |= {"trainers": "--timm-train t.py", "checkpoint": None, "mixup": None}
for _name, _options in BENCH_OPTIONS.items():
    _from = "" if _options is None else f"--from {{tmp}} {_options}"
    READ.append(
        (
            f"bench {_name} --rounds 3 {_from}",
            f"{ELSEWHERE.get(_name, f'widemix.bench.{_name}')}.run",
            lambda given: tuple(
                getattr(given, key, None) for key in ("rounds", "origin", "samples", "threads", "timm_train")
            ),
            lambda v, options=_options: (
                3,
                None if options is None else P("{tmp}"),
                9 if options and "--samples 9" in options else None,
                [1, 2] if options and "--threads 1 2" in options else None,
                P("t.py") if options == "--timm-train t.py" else None,
            ),
        )
    )


@pytest.mark.parametrize(("words", "target", "read", "expected"), READ, ids=[each[0][:40] for each in READ])
def test_recipes_and_clusters_are_those_that_were_typed(words, target, read, expected, names, digits, monkeypatch):
    monkeypatch.chdir(CLONE)
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("widemix.cli.train._count_gpus", lambda: 1)
    monkeypatch.setattr("widemix.doctor.software.unmet", lambda requirement: False)
    words = words.format(**names, digits=digits)
    overrides = re.findall(r"--(\w+\.\w+) (\S+)", words)
    found = read(*call_of(words, target, monkeypatch).arguments)
    wanted = tuple(filled(value, names) for value in expected(overrides))
    assert found == wanted or (wanted[1] == "" and found[:1] + found[2:] == wanted[:1] + wanted[2:])


# What needs more than its words: see the tests below.
OTHERS = {
    "cka": f"analyse cka {NET} --with b.yaml --layers x --layers-b y --data d --split s --batch 8 --samples 9 "
    "--seed 3",
    "pixels": f"analyse pixels {NET} --patch 3 --data d --split s --batch 8",
    "filters": f"analyse filters {NET} --blocks 1 2",
    "units": f"analyse weights {NET} --units 5",
    "block": f"analyse weights {NET} --block 2",
    "values": f"analyse weights {NET} --values --to {{tmp}}",
    "inference": f"bench inference {NET} --batches 3 5 --rounds 2 --precision bf16",
    "predict": f"predict {NET} {{tmp}} --top 3 --batch 2 --to {{tmp}}/o.csv",
    "run": "study run {study} --to {tmp}/a --report {tmp}/b --data.path {digits} --only *depth-1_* "
    "--at-once 3 --ranks 2",
    "search": "study search {study} --to {tmp}/a --report {tmp}/b --data.path {digits} --key optim.weight_decay "
    "--low 0 --high 3 --linear --split train --trials 4 --only *depth-1_* "
    "--at-once 3 --ranks 2",
    "plan": "study plan {study} --gpu h100",
    "report": "study report {study} --to {tmp}/a --report {tmp}/b --only *depth-1_*",
    "baselines": "study baselines {study} --to {tmp}/a --report {tmp}/b --only *depth-1_*",
    "results": "study results --report {tmp} --to {tmp}/page.md --readme {names} --gpu h100",
}


def test_the_options_of_an_analysis_reach_it(names, monkeypatch):
    """Those after the network was loaded, which stands for any here."""

    def call(name: str, target: str) -> Reached:
        return call_of(OTHERS[name].format(**names), target, monkeypatch)

    monkeypatch.setattr("widemix.evaluation.networks.load_network", lambda name, ema=False: FakeNetwork(name))
    firsts, second, samples, rows, columns = call("cka", "widemix.analysis.similarity.compare_each").arguments
    assert ([each.name for each in firsts], second.name, rows, columns) == ([NET], "b.yaml", ["x"], ["y"])
    assert tuple(vars(samples).values()) == (P("d"), "s", 8, 9, 3)
    found = call("pixels", "widemix.analysis.pixels.pixel_scores")
    assert found.arguments[0].name == NET
    assert found.options == {"batch": 8, "data": P("d"), "split": "s", "patch": 3}
    assert call("filters", "widemix.analysis.filters.layer_filters").arguments == ("module", [1, 2])
    network, *others, device = call("inference", "widemix.bench.inference.measure_inference").arguments
    assert (network.name, *others, device.type) == (NET, [3, 5], 2, "bf16", "cpu")
    monkeypatch.setattr("widemix.evaluation.predict.Predictor", lambda network: FakeNetwork("predictor"))
    found = call("predict", "widemix.cli.predict._predictions")
    assert found.arguments[1:] == (P(names["tmp"]), ["image.png"], 3, 2)


def test_the_options_of_weights_reach_them(names, monkeypatch):
    def call(name: str, function: str) -> Reached:
        return call_of(OTHERS[name].format(**names), f"widemix.analysis.effective_weights.{function}", monkeypatch)

    monkeypatch.setattr("widemix.evaluation.networks.load_network", lambda name, ema=False: FakeNetwork(name))
    monkeypatch.setattr("widemix.analysis.effective_weights.input_features", lambda module, side: (3, 4))
    assert call("units", "receptive_fields").arguments == ("module", (3, 4), 5, False)
    monkeypatch.setattr("widemix.analysis.effective_weights.receptive_fields", lambda *_: [{"mean": 0.5}])
    assert call("block", "block_weights").arguments == ("module", (3, 4), 2)
    monkeypatch.setattr("widemix.analysis.effective_weights.block_weights", lambda *_: {})
    monkeypatch.setattr("widemix.analysis.effective_weights.plot_fields", lambda numbers: None)
    monkeypatch.setattr("widemix.plots.style.as_png", lambda figure: b"")
    assert call("values", "plot_weights").arguments == ({NET: {}}, True)


class FakeNetwork:
    """A network by name alone."""

    module = "module"

    def __init__(self, name: str):
        self.name = name
        self.data = argparse.Namespace(image_size=8, num_classes=10)
        self.section = argparse.Namespace(targets="class")


def test_a_study_is_planned_trained_searched_and_reported_as_typed(names, digits, monkeypatch):
    study = Path(names["tmp"], "study.yaml")
    study.write_text(
        f"title: t\nsource: s\nruns:\n- label: a\n  recipes: {{D: {ROOT}/recipes/digits/mixer.yaml}}\n"
        "  axes: {model.depth: [1, 2]}\nfigure: {x: model.depth}\n"
    )

    def call(name: str, target: str) -> Reached:
        words = OTHERS[name].format(**names, study=study, digits=digits)
        return call_of(words, f"widemix.studies.{target}", monkeypatch)

    with monkeypatch.context():
        assert call("run", "runner.Runner").arguments[:3] == (P(names["tmp"], "a"), 3, 2)
    plan, _, search = call("search", "plan.Plan.search").arguments
    span = search.keys["optim.weight_decay"]
    assert (span.low, span.high, span.log, search.split, search.trials) == (0, 3, False, "train", 4)
    assert (len(plan.study_runs), plan.table.path) == (1, P(names["tmp"], "b/study.jsonl"))
    assert call("plan", "requirements.requirements").arguments[1] == "h100"
    study_runs, folder = call("baselines", "baselines.add_baselines").arguments
    assert (len(study_runs), folder) == (1, P(names["tmp"], "b"))
    study_runs, table, _ = call("report", "plan.collect").arguments
    assert (len(study_runs), table.path) == (1, P(names["tmp"], "b/study.jsonl"))


def test_the_options_of_the_page_of_results_reach_it(names, monkeypatch):
    def call(target: str) -> Reached:
        return call_of(OTHERS["results"].format(**names), f"widemix.{target}", monkeypatch)

    assert call("estimate.recipe_tables.split_between").arguments[0] == P(names["names"])
    monkeypatch.setattr("widemix.estimate.recipe_tables.split_between", lambda *_: ("before\n", "after\n"))
    assert call("studies.papers.full_size_csv").arguments[2] == "h100"
    monkeypatch.setattr("widemix.studies.papers.full_size_csv", lambda *_: "")
    assert call("studies.results_page.results_page").arguments[2:] == (P(names["tmp"]), ".")
    monkeypatch.setattr("widemix.studies.results_page.results_page", lambda *_: ("page", "numbers", []))
    assert call("studies.forest.plot_statements").arguments[1] == [P(names["tmp"], "statements.png")]
    monkeypatch.setattr("widemix.studies.forest.plot_statements", lambda *_: None)
    written = []
    monkeypatch.setattr("widemix.files.atomic_write", lambda *each: written.append(each))
    assert run_command(make_parser(), argv=shlex.split(OTHERS["results"].format(**names))) == 0
    assert written[0][0] == P(names["tmp"], "results_full_size.csv").with_name("full_size.csv")
    assert written[1:] == [(P(names["names"]), "before\nnumbers\nafter\n"), (P(names["tmp"], "page.md"), "page")]


def test_a_rank_starts_no_other_ranks(monkeypatch):
    """Which would start some more: every rank has the words of the command that started it."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.chdir(CLONE)
    assert call_of(f"eval {NET} --ranks 3", "widemix.evaluation.assessment.assess", monkeypatch).arguments[0] == NET
    assert call_of(f"bench scale {RECIPE} --ranks 3", "widemix.bench.scale.read_rows", monkeypatch)


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 1), (1, 1), (3, 3)])
def test_there_are_as_many_ranks_as_gpus_and_at_least_one(gpus, ranks, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert _count_gpus() == ranks


def test_a_run_of_all_gpus_is_launched_with_the_command_that_was_typed(digits, monkeypatch, capsys):
    """And a job with more tasks than it trains in is told so."""
    for name in ("RANK", "WORLD_SIZE", "WIDEMIX_COMMAND"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr("widemix.cli.train._count_gpus", lambda: 4)
    monkeypatch.setattr("widemix.cli.train.unused_tasks", lambda environ, ranks: f"warning: of {ranks}")
    monkeypatch.setattr(sys, "argv", ["/bin/widemix", "train", "digits/mixer", "--run-dir", "my run"])
    found = call_of(f"train {RECIPE} --data.path {digits}", "widemix.launch.local.launch", monkeypatch)
    assert found.arguments[1] == 4
    assert not {word for word in found.arguments[0] if word.startswith("--run-dir") or word in ("-q", "-v")}
    assert os.environ["WIDEMIX_COMMAND"] == "widemix train digits/mixer --run-dir 'my run'"
    assert capsys.readouterr().err == "warning: of 4\n"
    call_of(f"train {RECIPE} --data.path {digits} --ranks 1", "widemix.trainer.train", monkeypatch)
    assert capsys.readouterr().err == "warning: of 1\n"


def test_old_copies_are_removed_before_another_is_made_and_its_path_alone_is_printed(tmp_path, monkeypatch, capsys):
    done = []
    monkeypatch.setattr("widemix.launch.stage.remove_old", lambda *words: done.append(words) or [Path("old")])
    monkeypatch.setattr("widemix.launch.stage.stage", lambda *words: done.append(words) or Path("new"))
    words = ["stage", "a", "--to", str(tmp_path / "no"), "--clean", "2.5"]  # a node's first copy makes the folder
    assert run_command(make_parser("stage"), argv=words) == 0
    assert done == [(tmp_path / "no", 2.5), (Path("a"), tmp_path / "no")]
    said = capsys.readouterr()
    assert said.out == "new\n"
    assert "old: removed" in said.err


def test_a_network_is_looked_for_only_where_its_name_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    check_networks("timm:x", "hf:a/b", "no.yaml", "no.yml", "digits/mixer", "run", str(tmp_path))
    for names in (("no",), ("run", "no"), ("no", "timm:x"), ("no.json",), ("digits/no",)):
        with pytest.raises(InputError, match=r"^(digits/)?no(\.json)?: no such run or checkpoint folder"):
            check_networks(*names)


def test_a_cluster_without_a_rated_network_has_none(monkeypatch):
    found = call_of("doctor --cluster", "widemix.doctor.cluster.run_cluster_doctor", monkeypatch)
    assert found.arguments == (None, None, None, 20.0)


def test_batches_are_timed_once_each_and_by_default_those_of_the_help(monkeypatch):
    monkeypatch.setattr("widemix.evaluation.networks.load_network", lambda name, ema=False: FakeNetwork(name))
    target = "widemix.bench.inference.measure_inference"
    assert call_of(f"bench inference {NET}", target, monkeypatch).arguments[1:4] == ([1, 8, 64, 256], 20, "fp32")
    assert call_of(f"bench inference {NET} --batches 8 2 8", target, monkeypatch).arguments[1] == [8, 2]


def test_a_benchmark_names_what_it_needs_and_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr("widemix.bench.mixup.VERSIONS", ["numpy", "no-such-package>=3", "nor-this"])
    monkeypatch.setattr("widemix.bench.mixup.run", lambda arguments: pytest.fail("it ran"))
    assert run_command(make_parser("bench"), argv=["bench", "mixup"]) == 2
    assert "error: bench mixup: needs no-such-package>=3, nor-this; " in capsys.readouterr().err


def test_a_keys_value_may_be_negative_but_no_option():
    words = ["a.yaml", "--train.head_bias", "-6.9", "--to", "b", "--optim.lr=-1"]
    assert split_overrides(words) == (["a.yaml", "--to", "b"], [("train.head_bias", "-6.9"), ("optim.lr", "-1")])
    for rest in (["--to", "b"], []):
        with pytest.raises(InputError, match=r"--train\.epochs: needs a value"):
            split_overrides(["a.yaml", "--train.epochs", *rest])


def test_no_option_is_left_out():
    """submit's are held by what its dry run prints: tests/launch/test_submit.py."""
    typed = [f"widemix {words} " for words in (*(each[0] for each in (*CALLS, *READ)), *OTHERS.values())]
    missing = []
    for parser in _commands(make_parser()):
        own = " ".join(words for words in typed if words.startswith(f"{parser.prog} "))
        for action in parser._actions:
            held = {*re.findall(r"--?[\w-]+", own), *OUTPUTS, "--help", "--version"}
            if action.option_strings and not held & {*action.option_strings} and action.help != argparse.SUPPRESS:
                missing.append(f"{parser.prog} {action.option_strings[-1]}")
    assert "\n".join(each for each in missing if not each.startswith("widemix submit")) == ""

"""Every option of every command reaches the function that does its work, with a value that is not its default."""

import json
import os
import pkgutil
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from inspect import unwrap
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
from PIL import Image

from tests.clone import ROOT
from widemix.analysis.similarity import Samples
from widemix.bench.gpu import PARTS, Where
from widemix.cli.options import choose_networks
from widemix.cli.parser import make_parser
from widemix.cli.reference import commands_page
from widemix.command_line.commands import run_command
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError
from widemix.estimate.hardware import Cluster
from widemix.evaluation.networks import Network
from widemix.recipe import Recipe
from widemix.studies.protocol import Range, Search
from widemix.studies.rows import Table
from widemix.studies.study_run import StudyRun

# Options that `options.write_outputs` and `bench.report.report` handle for all commands: test_outputs.py.
OUTPUTS = {"--to", "--tensorboard", "--json"}


class Reached(BaseException):
    """The call that a command was to end in, its arguments by name."""


def arguments_of(call: Callable[[], Any], target: str) -> dict[str, Any]:
    """The arguments of the first call of a public function, which goes no further, as at a debugger's breakpoint."""
    found = pkgutil.resolve_name(f"widemix.{target}")
    code = unwrap(found.__init__ if isinstance(found, type) else found).__code__

    def stop(frame, event, _):
        if event == "call" and frame.f_code is code:
            raise Reached({name: frame.f_locals[name] for name in frame.f_locals if name != "self"})

    before = sys.getprofile()
    sys.setprofile(stop)
    try:
        assert call() == 0, "the command ended without it"
    except Reached as reached:
        return reached.args[0]
    finally:
        sys.setprofile(before)
    raise AssertionError(f"{target} was not called")


def plain(value: Any) -> Any:
    """A value as the rows have it: a recipe by its depth, a network by its name, images and runs by their number."""
    if isinstance(value, list) and value and isinstance(value[0], Network):
        return [network.name for network in value]
    if isinstance(value, list | tuple) and value and isinstance(value[0], StudyRun | np.ndarray):
        return len(value)
    if isinstance(value, Table):
        return value.path
    if isinstance(value, Namespace):  # of a benchmark
        return {name: each for name, each in vars(value).items() if name in BENCHMARK}
    return value.model.depth if isinstance(value, Recipe) else value.name if isinstance(value, Network) else value


P = Path
PREP = "prep csv --from a --to b --quality 80 --raw --no-restart-markers --max-pixels 99 --to-8-bit-rgb "
PREP += "--on-corrupt error --splits train --targets a,b --part 1/2 --no-shuffle --seed 3 --length 9 --vocab v.txt "
PREP += "--vocab-size 199 --fraction 50% --holdout 0.25 --processes 2 --plugins json"
SETTINGS = {
    "quality": 80, "raw": True, "restart_markers": False, "max_pixels": 99, "to_8_bit_rgb": True,
    "on_corrupt": "error", "splits": "train", "targets": "a,b", "part": "1/2", "per_class": 0, "shuffle": False,
    "seed": 3, "length": 9, "vocab": "v.txt", "vocab_size": 199, "fraction": 0.5, "holdout": 0.25,
}  # fmt: skip
LONGEST, SHORTEST = (
    PrepSettings(max_size=n, side=side, **SETTINGS) for n, side in ((99, "longest"), (88, "shortest"))
)
COEFFICIENTS = PrepSettings(per_class=5, shuffle=True, encoding="coefficients")
RECIPE = "digits/mixer --model.depth 3"
TRAIN = f"train {RECIPE} --data.path data"
TRAINED = ["--model.depth=3", "--data.path=data"]
TINY = "svhn/mixer_square --model.kind s_mixer --model.expansion null --model.norm none --model.project_tokens true"
TINY = f"analyse separation-rank {TINY} --model.tokens 2 --model.channels 2 --model.depth 2"
WEIGHTS, FIELDS = "analysis.effective_weights.", {"module": ANY, "features": ANY, "seed": 0}
BENCHMARK = {"rounds", "origin", "samples", "threads", "timm_train", "recipe", "overrides", "batch", "compiled"}
SEARCH = "study search study.yaml --report b --data.path data --key optim.weight_decay --low 0 --high 3 --linear "
SEARCH += "--split train --trials 4 --at-once 3 --ranks 2 --to a --only *depth-1_*"
SEARCHED = {"optim.weight_decay": Range(low=0, high=3, log=False)}
ONLY = " --only *depth-1_*"
RUNNER = {"program": ANY, "ended": ANY}
PAGE = {"papers": ANY, "studies": ANY}
STEP_3 = "runs/a/checkpoints/00000003"
FROM = {"origin": Path("run")}


def row(words: str, target: str, /, **arguments: Any):
    return pytest.param(words, target, arguments, id=words[:60])


# A command line, the function that it comes to, and its arguments: all of them, those by default too.
CALLS = [
    row(f"{PREP} --max-size 99 --force --max-bad 3%", "data_prep.prepare.prepare", source="csv", origin=P("a"),
     to=P("b"), settings=LONGEST, processes=2, force=True, extend=False, max_bad=0.03),
    row(f"{PREP} --short-side 88 --extend --dry-run", "data_prep.prepare.dry_run", source="csv", origin=P("a"),
     to=P("b"), settings=SHORTEST, processes=2, force=False, extend=True),
    row("prep digits --per-class 5 --encoding coefficients", "data_prep.prepare.prepare", source="digits",
     origin=None, to=P("datasets/digits"), settings=COEFFICIENTS, processes=None, force=False, extend=False,
     max_bad=0.01),
    row("prep --restore a --to b", "data_prep.original_jpeg.restore", prepared=P("a"), to=P("b")),
    row("prep --restore=~/~ --to ~", "data_prep.original_jpeg.restore", prepared=P("~/~"), to=P("~")),
    row("join a b --to c --max-bad 0.5 --force", "data_prep.join.join",
     parts=[P("a"), P("b")], to=P("c"), max_bad=0.5, force=True),
    row("adopt train=a.beton b_val.beton --to c --classes names", "data_prep.adopt.adopt", 
     betons={"train": P("a.beton"), "val": P("b_val.beton")}, to=P("c"), classes=("one", "two"), processes=None),
    row("adopt train=/x=1/a.beton /x=1/b_val.beton --to c", "data_prep.adopt.adopt", 
     betons={"train": P("/x=1/a.beton"), "val": P("/x=1/b_val.beton")}, to=P("c"), classes=(), processes=None),
    row("adopt train=~/a.beton val=a/~/b --to=~", "data_prep.adopt.adopt", 
     betons={"train": P("~/a.beton"), "val": P("a/~/b")}, to=P("~"), classes=(), processes=None),
    row("verify a", "data_prep.verify.verify", folder=P("a")),
    row("--local-rank=3 verify a", "data_prep.verify.verify", folder=P("a")),
    row("--local_rank=3 verify a", "data_prep.verify.verify", folder=P("a")),
    row("stage a --to b", "launch.stage.stage", folder=P("a"), local=P("b"), relay=None),
    row("stage ~/a --to=~/b~", "launch.stage.stage", folder=P("~/a"), local=P("~/b~"), relay=None),
    row("stage s3://a/b --to c", "launch.stage.stage", folder="s3://a/b", local=P("c"), relay=None),
    row("stage --to run --clean 7", "launch.stage.remove_old", local=P("run"), days=7.0),
    row("stage --to run --clean 0", "launch.stage.remove_old", local=P("run"), days=0.0),
    row("stage --environment --to b", "launch.environment.pack", folder=P("b"), prefix=P(sys.prefix)),
    row(f"{TRAIN} --run-dir r --resume never -v", "trainer.train", recipe=3, run_dir=P("r"), resume="never",
     recipe_path=P("digits/mixer"), overrides=[("model.depth", "3"), ("data.path", "data")], verbosity=1),
    row(f"{TRAIN} --ranks 2 --run-dir r --resume never -q", "launch.local.launch", ranks=2, command=[
     *("-m", "widemix", "train", "digits/mixer", "--resume=never", "--run-dir=r", "-q"), *TRAINED]),
    row(f"{TRAIN} --ranks 4 -v", "launch.local.launch", ranks=4, command=[
     *("-m", "widemix", "train", "digits/mixer", "--resume=auto", "-v"), *TRAINED]),
    row(f"{TRAIN} --ranks 4 --dry-run", "estimate.report.estimate",
     recipe=3, cluster=Cluster(4), samples=None, rehearsed=False, measured=False),
    row("eval net.yaml --data d --split s --batch 7 --ema --details --real r.json --to o",
     "evaluation.assessment.assess", name="net.yaml", data=P("d"), split="s", batch=7, ema=True, details=True,
     real=P("r.json")),
    row("eval net.yaml --ranks 3", "launch.local.launch",
     command=["-m", "widemix", "eval", "net.yaml", "--ranks", "3"], ranks=3),
    row("predict net.yaml image.png --ema", "evaluation.networks.load_network", name="net.yaml", ema=True),
    row("predict net.yaml album --top 3 --batch 2 --to o.csv", "evaluation.predict.Predictor.probabilities",
     images=2),
    row("export run --to b --ema --onnx --license mit", "evaluation.trained.export_checkpoint",
     path=P("run"), to=P("b"), ema=True, onnx=True, licence="mit"),
    row("eval runs/a --checkpoint 3", "evaluation.assessment.assess", name=STEP_3, data=None,
     split=None, batch=None, ema=False, details=False, real=None),
    row("export runs/a --to b --checkpoint 3", "evaluation.trained.export_checkpoint", path=P(STEP_3), to=P("b"),
     ema=False, onnx=False, licence="apache-2.0"),
    *(row(f"{words} --checkpoint 3", "evaluation.networks.load_network", name=STEP_3, ema=False) for words in (
        "predict runs/a image.png", "analyse cka runs/a b.yaml", "analyse pixels runs/a", "analyse filters runs/a",
        "bench inference runs/a")),
    row("analyse weights runs/a --checkpoint 3 --ema", "evaluation.networks.load_network", name=STEP_3, ema=True),
    row("push a b/c --private", "models.hub.push", folder=P("a"), repository="b/c", private=True),
    row("push a b/c", "models.hub.push", folder=P("a"), repository="b/c", private=False),
    row("doctor --cluster --data d --network 100 --exclude e --timeout 7", "doctor.cluster.run_cluster_doctor",
     data=P("d"), rated=100e9 / 8, exclude=P("e"), timeout_s=7.0),
    row("doctor --cluster", "doctor.cluster.run_cluster_doctor", data=None, rated=None, exclude=None, timeout_s=20),
    row(f"cost {RECIPE} --samples 77 --rehearse --measure --gpus 8 --gpu h100 --nodes 4 --network 2xedr",
     "estimate.report.estimate",
     recipe=3, cluster=Cluster(8, "h100", 4, "2xedr"), samples=77, rehearsed=True, measured=True),
    row("cost --table recipes --gpus 8", "estimate.rehearse.rehearsal_rows",
     folder=P("recipes"), cluster=Cluster(8), overrides=[]),
    row("cost --omega 1000 --gamma 3", "estimate.tables.pairs_rows", omega=1000.0, gamma=3.0),
    row("cost --recipes a", "estimate.recipe_tables.refresh", folder=P("a")),
    row("cost --named", "estimate.tables.named_table"),
    row(f"analyse augment {RECIPE} --to t --images 7 --seed 5", "analysis.augment.write_sheets",
     recipe=3, folder=P("t"), images=7, seed=5),
    row(f"analyse augment {RECIPE} --train.seed 9", "analysis.augment.write_sheets",
     recipe=3, folder=P("analysis/digits-mixer"), images=32, seed=9),
    row(f"analyse augment {RECIPE} --train.seed 9 --seed 0", "analysis.augment.write_sheets",
     recipe=3, folder=P("analysis/digits-mixer"), images=32, seed=0),
    row("analyse cka a.yaml --with b.yaml --layers x --layers-b y --data d --split s --batch 8 --samples 9 --seed 3",
     "analysis.similarity.compare_each", firsts=["a.yaml"], second="b.yaml",
     samples=Samples(P("d"), "s", 8, 9, 3), row_layers=["x"], column_layers=["y"]),
    row("analyse cka net.yaml b.yaml net.yaml --layers x", "analysis.similarity.compare_each",
     firsts=["net.yaml"], second="b.yaml", samples=Samples(), row_layers=["x"], column_layers=["x"]),
    row("analyse cka net.yaml b.yaml --with c.yaml", "analysis.similarity.compare_each",
     firsts=["net.yaml", "b.yaml"], second="c.yaml", samples=Samples(), row_layers=(), column_layers=()),
    row("analyse cka net.yaml b.yaml --ema", "evaluation.networks.load_network", name="net.yaml", ema=True),
    row("analyse pixels net.yaml --patch 3 --data d --split s --batch 8", "analysis.pixels.pixel_scores",
     network="net.yaml", data=P("d"), split="s", batch=8, patch=3),
    row("analyse pixels net.yaml", "analysis.pixels.pixel_scores",
     network="net.yaml", data=None, split=None, batch=None, patch=None),
    row("analyse pixels net.yaml --ema", "evaluation.networks.load_network", name="net.yaml", ema=True),
    row("analyse filters net.yaml --blocks 1 2", "analysis.filters.layer_filters", module=ANY, blocks=[1, 2]),
    row("analyse filters net.yaml", "analysis.filters.layer_filters", module=ANY, blocks=None),
    row("analyse filters net.yaml --ema", "evaluation.networks.load_network", name="net.yaml", ema=True),
    row("analyse weights net.yaml --units 5", f"{WEIGHTS}receptive_fields", units=5, skips=False, **FIELDS),
    row("analyse weights net.yaml", f"{WEIGHTS}receptive_fields", units=64, skips=False, **FIELDS),
    row("analyse weights net.yaml --block 2", f"{WEIGHTS}block_weights", module=ANY, features=(16, 64), number=2),
    row("analyse weights net.yaml --values --to t", f"{WEIGHTS}plot_weights", networks=ANY, values=True),
    row("analyse spectrum a.yaml --layers a b --ema", "analysis.training_spectrum.course",
     name="a.yaml", patterns=["a", "b"], ema=True, of_products=False),
    row("analyse spectrum a.yaml --products", "analysis.training_spectrum.course",
     name="a.yaml", patterns=(), ema=False, of_products=True),
    row("analyse sparse-spectrum --connections 64 --gamma 3 --widths 30 40 --trials 2 --seed 5",
     "analysis.sparse_spectrum.widening", connections=64, gamma=3.0, widths=[30, 40], trials=2, seed=5),
    row("analyse sparse-spectrum", "analysis.sparse_spectrum.widening",
     connections=2**19, gamma=2.0, widths=(1500, 2000, 2500, 3000, 3500, 4096), trials=10, seed=0),
    row("analyse sparse-spectrum --connections 200 --widths 20 10", "analysis.sparse_spectrum.widening",
     connections=200, gamma=2.0, widths=[20, 10], trials=10, seed=0),
    row("analyse regularisation --tokens 2 --channels 3 --samples 9 --noise 0.5 --seed 4",
     "analysis.regularisation.regression", tokens=2, channels=3, samples=9, noise=0.5, seed=4),
    row("analyse regularisation", "analysis.regularisation.regression",
     tokens=4, channels=4, samples=40, noise=0.3, seed=0),
    row("analyse regularisation --tokens 8 --channels 8", "analysis.regularisation.regression",
     tokens=8, channels=8, samples=40, noise=0.3, seed=0),
    row(TINY, "analysis.separation_rank.mixer_layers", recipe=2, residuals=True, seed=0),
    row(f"{TINY} --no-residuals --seed 5", "analysis.separation_rank.mixer_layers",
     recipe=2, residuals=False, seed=5),
    row(TINY, "analysis.separation_rank.attention_layers", depth=4, channels=2, heads=1, seed=0),
    row(f"{TINY} --heads 2 --seed 5", "analysis.separation_rank.attention_layers",
     depth=4, channels=2, heads=2, seed=5),
    row(f"{TINY} --model.tokens 4 --model.channels 9", "analysis.separation_rank.attention_layers",
     depth=4, channels=9, heads=1, seed=0),
    row(TINY, "analysis.separation_rank.separation_ranks",
     layers=ANY, size=(2, 2), degree=2, partition="tokens", most=512, seed=0),
    row(f"{TINY} --partition channels --most 64 --seed 5", "analysis.separation_rank.separation_ranks",
     layers=ANY, size=(2, 2), degree=2, partition="channels", most=64, seed=5),
    row(f"bench scale {RECIPE} --batch 3 --steps 5 --to run --cpus 1", "bench.scale.measure_scale",
     recipe=3, batch=3, steps=5, cpus=1),
    row(f"bench scale {RECIPE} --ranks 3", "launch.local.launch",
     command=["-m", "widemix", "bench", "scale", *RECIPE.split(), "--ranks", "3"], ranks=3),
    row(f"bench step {RECIPE} --rounds 3 --batch 5 --compiled", "bench.step.run",
     arguments={
         "rounds": 3, "recipe": "digits/mixer", "overrides": [("model.depth", "3")], "batch": 5, "compiled": True}),
    row("bench inference net.yaml --batches 3 5 3 --rounds 2 --precision bf16", "bench.inference.measure_inference",
     network="net.yaml", batches=[3, 5], rounds=2, precision="bf16", device=ANY),
    row("bench inference net.yaml", "bench.inference.measure_inference",
     network="net.yaml", batches=[1, 8, 64, 256], rounds=20, precision="fp32", device=ANY),
    row("bench inference net.yaml --ema", "evaluation.networks.load_network", name="net.yaml", ema=True),
    row("bench gpu --to run --from run --only b16 wait --minutes 5 --small", "bench.gpu.run_parts",
     names=["b16", "wait"], where=Where(P("run"), P("run"), True), minutes=5, parts=PARTS),
    *(row(f"bench {name} --rounds 3{options}", f"bench.{name}.run", arguments={"rounds": 3, "overrides": []} | own)
      for name, options, own in (
          ("augment", " --from run", FROM), ("start", " --from run", FROM), ("views", " --from run", FROM),
          ("checkpoint", "", {}), ("mixup", "", {}), ("prep", " --from run --samples 9", FROM | {"samples": 9}),
          ("trainers", " --from run --timm-train t.py", FROM | {"timm_train": P("t.py")}),
          ("loader", " --from run --samples 9 --threads 1 2", FROM | {"samples": 9, "threads": [1, 2]}))),
    row("study plan figure7 --to a --report b --only *depth-2* --train.epochs 3", "studies.plan.make_plan",
     path=ROOT / "recipes/studies/figure7.yaml", study=ANY, table=P("b/figure7.jsonl"),
     overrides=[("train.epochs", "3")], only="*depth-2*"),
    row("study plan study.yaml --to a", "studies.plan.make_plan",
     path=P("study.yaml"), study=ANY, table=P("a/study.jsonl"), overrides=[], only="*"),
    row(f"study plan study.yaml --gpu h100{ONLY}", "studies.plan.requirements", study_runs=1, gpu="h100"),
    row(f"study run study.yaml --to a --data.path data --at-once 3 --ranks 2 --report b{ONLY}",
     "studies.runner.Runner", folder=P("a"), at_once=3, ranks=2, gpus=["4", "2"], **RUNNER),
    row("study run study.yaml --data.path data", "studies.runner.Runner",
     folder=P("runs/study"), at_once=1, ranks=1, gpus=["4", "2"], **RUNNER),
    row(SEARCH, "studies.plan.Plan.search", run=ANY, search=Search(
     keys=SEARCHED, trials=4, split="train", set={"eval.every_epochs": 30.0})),
    row(f"study baselines study.yaml --report b --to a{ONLY}", "studies.baselines.add_baselines",
     study_runs=1, folder=P("b")),
    row("study baselines study.yaml --to a", "studies.baselines.add_baselines", study_runs=2, folder=P("a")),
    row(f"study report study.yaml --report b --to a{ONLY}", "studies.plan.collect",
     study_runs=1, table=P("b/study.jsonl"), study=ANY),
    row("study results --report run --readme names", "estimate.recipe_tables.split_between",
     path=P("names"), begin=ANY, end="<!-- end -->\n"),
    row("study results --report run --gpu h100", "studies.papers.full_size_csv", gpu="h100", **PAGE),
    row("study results --report run --to run/page.md", "studies.results_page.results_page",
     folder=P("run"), links=".", **PAGE),
    row("study results", "studies.results_page.results_page",
     folder=P("recipes/studies/results"), links="../recipes/studies/results", **PAGE),
    row("study bounds --to t --width 64 --tokens 9 --heads 2 --depth 5", "studies.bounds.bounds",
     depths=range(1, 6), width=64, tokens=9, heads=2),
    row("study bounds --to t", "studies.bounds.bounds", depths=range(1, 25), width=3**30, tokens=196, heads=12),
    row("study bounds --to t --depth 600", "studies.bounds.bounds",
     depths=range(1, 601), width=3**30, tokens=196, heads=12),
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(digits, tmp_path, monkeypatch, system) -> Path:
    """The current folder, with what the rows name, on a machine without GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,2")
    for name in ("RANK", "WORLD_SIZE", "WIDEMIX_COMMAND"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    system({"torch.cuda.device_count": lambda: 0})
    for name in ("album", "docs", "home", "run", STEP_3, "runs/a/checkpoints/00000004", "recipes/studies/results"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("data", "datasets/digits"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).symlink_to(digits)
    for name in ("net", "a", "b", "c"):
        Path(f"{name}.yaml").write_text("extends: digits/mixer")
    Path("study.yaml").write_text(
        "title: t\nsource: s\nruns:\n- {label: a, recipes: {D: digits/mixer}, axes: {model.depth: [1, 2]}}\n"
        "figure: {x: model.depth}\n"
    )
    Path("names").write_text("one\ntwo\n")
    state = {"step": 1, "data_step": 1, "seconds": 1, "scalars": {}, "metrics": {}, "recipe": {}}
    for checkpoint in ("run", STEP_3, "runs/a/checkpoints/00000004"):
        Path(checkpoint, "COMPLETE").touch()
        Path(checkpoint, "state.json").write_text(json.dumps(state))
    Path("image.png").touch()
    for number in range(3):
        Image.new("RGB", (9, 9)).save(f"album/{number}.png")
    return tmp_path


def call(words: str, target: str, system) -> dict[str, Any]:
    """The arguments of a public function, as a command line calls it."""
    system({"sys.argv": ["/bin/widemix", *shlex.split(words)]})
    if words.startswith("bench "):
        system({"importlib.metadata.version": lambda name: "99"})  # as if all packages were installed
    parser = make_parser(re.sub(r"--\S+ ", "", words).split()[0])
    return {name: plain(value) for name, value in arguments_of(lambda: run_command(parser), target).items()}


def at_home(value: Any) -> Any:
    """Paths of an expected value with the user's home for ~, which tests of paths that begin with it have."""
    if isinstance(value, dict):
        return {name: at_home(each) for name, each in value.items()}
    return value.expanduser() if isinstance(value, Path) else value


@pytest.mark.parametrize(("words", "target", "arguments"), CALLS)
def test_what_is_typed_is_what_is_done(words, target, arguments, system):
    assert call(words, target, system) == at_home(arguments)


def test_no_option_is_left_out():
    """submit's are held by what its dry run prints: tests/launch/test_submit.py."""
    missing = []
    for part in commands_page().split("\n## ")[1:]:
        name, _, rest = part.partition("\n")
        typed = " ".join(
            words for words in (each.values[0] for each in CALLS) if f"widemix {words} ".startswith(f"{name} ")
        )
        for row in re.findall(r"^\| (`-.+?) \|", rest, re.MULTILINE):
            options = set(re.findall(r"`(--?[\w-]+)", row))
            if not options & {*re.findall(r"--?[\w-]+", typed), *OUTPUTS} and name != "widemix submit":
                missing.append(f"{name} {row}")
    assert missing == []


RANK = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
RANK |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("words", "target"),
    [
        ("eval net.yaml --ranks 3", "evaluation.assessment.assess"),
        (f"bench scale {RECIPE} --ranks 3", "bench.scale.read_rows"),
    ],
)
def test_a_rank_starts_no_other_ranks(words, target, monkeypatch, system):
    """Which would start some more: every rank has the words of the command that started it."""
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    assert call(words, target, system)


@pytest.mark.parametrize(("gpus", "options", "ranks"), [(0, "", 1), (1, "", 1), (4, "", 4), (4, " --ranks 1", 1)])
def test_there_are_as_many_ranks_as_gpus(gpus, options, ranks, system, monkeypatch, capsys):
    """At least one; and a job with more tasks than it trains in is told so."""
    monkeypatch.setenv("SLURM_NTASKS", "5")
    system({"torch.cuda.device_count": lambda: gpus})
    target = "trainer.train" if ranks == 1 else "launch.local.launch"
    found = call(f"{TRAIN} --run-dir 'my run'{options}", target, system)
    if ranks > 1:
        command = ["-m", "widemix", "train", "digits/mixer", "--resume=auto", "--run-dir=my run", *TRAINED]
        assert found == {"command": command, "ranks": ranks}
        assert os.environ["WIDEMIX_COMMAND"] == f"widemix {TRAIN} --run-dir 'my run'"
    assert f"the job has 5 tasks, and this command trains in {ranks};" in capsys.readouterr().err


def test_old_copies_are_removed_first(capsys):
    prepare("digits", None, Path("few"), PrepSettings(per_class=2), processes=1)
    for clean, removed in ((), 0), (("--clean", "0"), 1):  # a node's first copy makes the folder
        assert run_command(make_parser("stage"), argv=["stage", "few", "--to", "copies/new", *clean]) == 0
        said = capsys.readouterr()
        [copy] = said.out.splitlines()
        assert Path(copy, "manifest.json").is_file()
        assert said.err.count(f"{copy}: removed") == removed


@pytest.mark.parametrize("name", ["timm:x", "hf:a/b", "no.yaml", "no.yml", "digits/mixer", "run", "/tmp"])
def test_a_network_is_looked_for_only_as_a_path(name):
    assert choose_networks(Namespace(), name) == [name]
    for wrong in ("no", "no.json", "digits/no"):
        with pytest.raises(InputError, match=f"^{wrong}: no such run or checkpoint folder"):
            choose_networks(Namespace(), name, wrong, name)


def test_a_benchmark_names_what_it_needs_and_is_not_there(system, capsys):
    def version(name: str) -> str:
        if name in ("torch", "numpy"):
            return "99"
        raise PackageNotFoundError(name)

    system({"importlib.metadata.version": version})
    assert run_command(make_parser("bench"), argv=["bench", "mixup"]) == 2
    assert "error: bench mixup: needs timm; " in capsys.readouterr().err

"""The catalogue of mistakes: what is typed, and the one line that says what is wrong, where, and what would be right.

In one process, since none of them gets far. `tests/end_to_end/test_mistakes.py` has those that need a run.
"""

import shlex
from pathlib import Path

import pytest
from PIL import Image

from pipeline.cli.commands import run_command
from pipeline.cli.parser import make_parser
from tests.conftest import ROOT

# Command -> words of its line. {digits}, {tmp} and {pictures} are folders.
MESSAGES = {
    # recipes and their keys
    "train digits/mixxer": "did you mean digits/mixer?",
    "train digits/mixer --train.epochs ''": "--train.epochs: has an empty value; give one, or null",
    "train digits/mixer --train.epochs=": "--train.epochs: has an empty value",
    "train digits/mixer --train.epochs 1.5": "train.epochs 1.5: ",
    "train digits/mixer --optim.lr 1e30": "optim.lr 1e+30: input should be less than or equal to 1000",
    "train digits/mixer --optim.lr -1": "optim.lr -1: input should be greater than 0",
    "train digits/mixer --augment.auto_augment rand-m900": "part 'm900': must be 0 to 30",
    "train digits/mixer --augment.auto_augment rand-m": "part 'm': needs a whole number such as m1",
    "train digits/mixer --model.kind timm": "model.name is missing",
    "train digits/mixer --model.kind mixxer": "did you mean mixer?",
    "train {tmp}/lr.yaml": "unknown key lr; did you mean optim.lr?",
    "train {tmp}/nonsense.yaml": "unknown key nonsense; choose from",
    "train {tmp}/twice.yaml": "the key 'depth' is duplicated",
    "train {tmp}/loop.yaml": "extends itself",
    "train {tmp}/list.yaml": "a recipe is a mapping of sections (data, model",
    "train recipes/studies/figure7.yaml": "is a study, not a recipe; `widemix study run recipes/studies/figure7",
    "study plan recipes/digits/mixer.yaml": "is a recipe, not a study; `widemix train recipes/digits/mixer.yaml`",
    "study plan {tmp}/none.yaml": "none.yaml: cannot be read (No such file or directory)",
    "train {digits}": "{digits}: is a folder; name a recipe, such as digits/rp_mixer",
    "train {tmp}/run": "{tmp}/run: is a run folder; `widemix train {tmp}/run/recipe.yaml --run-dir {tmp}/run`",
    "train rp_mixer": "did you mean digits/rp_mixer?",
    "train nothing_like_it": "no such recipe; recipes/README.md lists those that there are",
    "train {tmp}/no/way": "(there is no folder {tmp}/no either)",
    "trian digits/mixer": "did you mean train?",
    "analyse filter": "did you mean filters?",
    "cost digits/mixer --gpu a10": "did you mean a100?",
    "train digits/mixer --optim.name adamm": "did you mean adamw?",
    "train digits/mixer --train.precison bf16": "did you mean train.precision?",
    "train digits/mixer --model.tokens 15": "pictures of 8 in patches of 2 have 16 tokens; set model.tokens to that",
    "train digits/mixer --schedule.warmup_epochs 100": "must be shorter than train.epochs 30",
    "train digits/mixer --engine.zero_stage 2": "engine.zero_stage is for engine.kind deepspeed",
    "train digits/mixer --train.keep_best ema_top1": "train.keep_best ema_top1 needs train.ema_decay",
    "train digits/mixer --data.mean '[1, 2'": "--data.mean [1, 2: not valid YAML",
    "train digits/mixer --train.profile 30:20": "should be FIRST:STOP, two step numbers such as 20:30",
    "train digits/mixer --train.profile 20": "train.profile 20: should be FIRST:STOP",
    "train digits/mixer --ranks 3 --data.path {digits}": "= 48; 48 or 96 would",
    "train digits/mixer --ranks -1": "--ranks -1: must be at least 1",
    "train digits/mixer -q -v": "-v/--verbose: not allowed with argument -q/--quiet",
    "train": "give a recipe, such as recipes/digits/rp_mixer.yaml",
    "train --help nothing": "--help nothing: no such section; choose from data, model",
    # data
    "train digits/mixer --data.path {tmp}/no": "/no: no such folder; `widemix prep SOURCE --from DIR --to",
    "train imagenet/mixer_s32 --data.path {digits}": "data.num_classes 1000: {digits} has 10 classes; --data",
    "cost base/own_pictures --data.path {tmp}/no": "/no is not prepared; prepare it, name another",
    "prep image-folder --from {pictures}/train --to {tmp}/o": "move its class folders into {pictures}/train/train",
    "prep image-folder --from {pictures}/train/a --to {tmp}/o": "pictures without classes; put them into folders",
    "prep image-folder --from {digits} --to {tmp}/o": "holds none of the folders train, val and test (each with one",
    "verify {tmp}/no": "no such folder",
    "verify {tmp}": "has no manifest.json; `widemix prep SOURCE --from DIR --to {tmp}` writes one",
    "prep digitz --to {tmp}/o": "no source 'digitz'; did you mean digits?",
    "prep image-folder --from {tmp}/no --to {tmp}/o": "no such file or folder to read image-folder from",
    "train digits/mixer --data.train_split trian --data.path {digits} --run-dir {tmp}/r": "no split 'trian'; it has",
    "train digits/mixer --data.path {digits} --run-dir {digits}": "is not empty and not a run folder; name another",
    # networks and runs
    "eval {tmp}/no": "no such run or checkpoint folder; give a run, a checkpoint, a folder of `widemix export`",
    "export {tmp} --to {tmp}/x": "holds no complete checkpoint",
    "report {pictures}": "is not a run folder, and holds none",
    "runs {tmp}/no": "no such folder; name run folders, or a folder that holds some",
    "runs diff {tmp}": "takes two runs, got 1",
    "predict timm:mixer_b16_224 {digits}": "holds no pictures (.jpg",
    # outputs
    "eval {tmp}/no --json {tmp}/no/x.json": "there is no folder {tmp}/no",
    "eval {tmp}/no --json {tmp}": "is a folder; name a file",
    "eval {tmp}/no --json /proc/x.json": "/proc/x.json: cannot be written to",
    "eval {tmp}/no --details --to {tmp}/lr.yaml": "lr.yaml: is a file; name a folder",
    # Slurm
    "submit digits/mixer --run-dir {tmp}/r --time tomorrow": "--time tomorrow: should be minutes, minutes:seconds",
    "submit digits/mixer --run-dir {tmp}/r --vary train.seed": "should be section.key=VALUE,VALUE",
    "submit digits/mixer --run-dir {tmp}/r --vary model.permutation=none": "model.permutation 'none': input",
    # costs
    "cost digits/mixer --gpus 0": "must be at least 1",
    "cost digits/mixer --samples 0": "--samples 0: must be at least 1",
    "cost digits/mixer --data.path x --samples 20": "train.global_batch 64 exceeds the 20 samples",
}
FILES = {
    "lr.yaml": "extends: {root}/recipes/digits/mixer.yaml\nlr: 0.1\n",
    "nonsense.yaml": "extends: {root}/recipes/digits/mixer.yaml\nnonsense: 0.1\n",
    "twice.yaml": "model: {{depth: 1, depth: 2}}\n",
    "loop.yaml": "extends: loop.yaml\n",
    "run/recipe.yaml": "extends: {root}/recipes/digits/mixer.yaml\n",
    "list.yaml": "[1, 2]\n",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory, digits) -> dict[str, str]:
    tmp, pictures = tmp_path_factory.mktemp("mistakes"), tmp_path_factory.mktemp("pictures")
    for name, text in FILES.items():
        (tmp / name).parent.mkdir(exist_ok=True)
        (tmp / name).write_text(text.format(root=ROOT))
    (pictures / "train/a").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(pictures / "train/a/1.png")
    return {"digits": str(digits), "tmp": str(tmp), "pictures": str(pictures)}


@pytest.mark.parametrize("command", MESSAGES)
def test_a_mistake_has_its_line(command, places, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    before = sorted(Path(places["tmp"]).rglob("*"))
    code = run_command(make_parser(), None, shlex.split(command.format(**places)))
    output = capsys.readouterr()
    assert code == 2, output
    assert output.out == ""
    assert output.err.count("\n") == 1, output.err
    assert output.err.startswith("error: ")
    assert MESSAGES[command].format(**places) in output.err
    assert sorted(Path(places["tmp"]).rglob("*")) == before


def test_another_kind_drops_the_keys_of_the_old_one(places, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = "cost digits/mixer --model.kind timm --model.name resnet10t --data.path x --samples 1000 --model.tokens 3"
    assert run_command(make_parser(), None, shlex.split(words)) == 2
    assert "model.tokens is not a key of kind timm" in capsys.readouterr().err


def test_a_network_that_does_not_fit(places, monkeypatch, capsys):
    from pipeline.errors import InputError
    from pipeline.models.registry import build_model
    from pipeline.recipe import load_recipe

    recipe = load_recipe(ROOT / "recipes/digits/mixer.yaml", [("model.channels", "1000000000")])
    with pytest.raises(InputError, match=r"^model: a mixer with these sizes does not fit into memory"):
        build_model(recipe.model, 8, 10)

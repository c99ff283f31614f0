"""Loading trained weights: of widemix, timm and DeepSpeed's tool; with other heads, for larger images."""

import copy
import re
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file, save_model

from tests.run.saved import position
from widemix.engine.state import State
from widemix.errors import InputError
from widemix.models.mixer.network import Mixer
from widemix.models.mixer.section import MixerSection
from widemix.models.registry import build_model
from widemix.models.sw_mlp.sparse import SparseLinear
from widemix.run import checkpoint
from widemix.training.finetune import check_indices, freeze, load_init_weights, unused_parameters


def section(side: int = 8, token_hidden: int = 6, **others) -> MixerSection:
    widths = {"token_hidden": token_hidden, "channel_hidden": 24} if others.get("kind", "mixer") == "mixer" else {}
    shape = {"kind": "mixer", "patch_size": 4, "channels": 12, "depth": 2}
    return MixerSection(**(shape | widths | others))


def mixer(side: int = 8, classes: int = 5, seed: int = 0, **others) -> Mixer:
    torch.manual_seed(seed)
    model = build_model(section(side, **others), side, classes)
    torch.nn.init.normal_(model.head.weight)
    return model


def written(model: torch.nn.Module, path: Path) -> str:
    save_file(model.state_dict(), path)
    return str(path)


def same(one: torch.nn.Module, other: torch.nn.Module, side: int = 8) -> bool:
    images = torch.randn(2, 3, side, side)
    return torch.equal(one.eval()(images), other.eval()(images))


def saved_run(folder: Path, weights: dict, ema: dict | None = None) -> Path:
    return checkpoint.save(folder, State(weights, {}, {}, ema or {}), position(1), checkpoint.RetentionPolicy(1))


def torch_saved(folder: Path, content: object, **options) -> Path:
    torch.save(content, folder / "weights.pth.tar", **options)
    return folder / "weights.pth.tar"


def of_timms_script(weights: dict, other: dict) -> dict:
    averaged = {f"module.{name}": value for name, value in weights.items()}
    return {"epoch": 3, "args": Namespace(lr=0.1), "state_dict": other, "state_dict_ema": averaged}


SOURCES = {
    "a file": lambda folder, model, _: written(model, folder / "model.safetensors"),
    # As zero_to_fp32 --safe_serialization leaves one.
    "a folder": lambda folder, model, _: Path(written(model, folder / "model.safetensors")).parent,
    "a checkpoint": lambda folder, model, _: saved_run(folder, model.state_dict()),
    "a run": lambda folder, model, _: saved_run(folder, model.state_dict()).parents[1],
    "a run's average": lambda folder, model, other: saved_run(folder, other.state_dict(), model.state_dict()),
    "a state_dict": lambda folder, model, _: torch_saved(folder, model.state_dict()),
    "before torch 1.6": lambda folder, model, _: torch_saved(
        folder, model.state_dict(), _use_new_zipfile_serialization=False
    ),
    "timm's script": lambda folder, model, other: torch_saved(
        folder, of_timms_script(model.state_dict(), other.state_dict())
    ),
    "a compiled one": lambda folder, model, _: torch_saved(
        folder, {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
    ),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_weights_are_read_from_each_kind_of_source(tmp_path, make):
    source, target = mixer(seed=1), mixer(seed=2)
    assert not same(target, source)
    assert load_init_weights(target, str(make(tmp_path, source, mixer(seed=3)))) == []
    assert same(target, source)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        pytest.param({"token_hidden": 24}, "copies", id="copies"),
        pytest.param({"token_hidden": 6}, "bilinear", id="bilinear"),
        pytest.param({"token_hidden": 24, "permutation": "random"}, "copies", id="random-permuted"),
        pytest.param({"kind": "s_mixer"}, "copies", id="S-Mixer"),
        pytest.param({"token_hidden": 24, "project_tokens": 12}, "copies", id="projected"),
    ],
)
def test_a_mixer_for_larger_images_is_grown(tmp_path, kind, method):
    small_kind = kind | ({"token_hidden": 6} if "token_hidden" in kind else {})
    if "project_tokens" in kind:
        small_kind["project_tokens"] = 3
    source, target = mixer(seed=1, **small_kind), mixer(16, seed=2, **kind)
    assert load_init_weights(target, written(source, tmp_path / "weights")) == [f"grown 2 x 2 times by {method}"]
    assert same(target, source.grown(2, method), 16)


def test_a_mixer_of_other_classes_has_a_new_head(tmp_path):
    source, target = mixer(seed=1, classes=5), mixer(16, classes=7, seed=2, token_hidden=24)
    initial, body = target.head.weight.clone(), source.grown(2, "copies").state_dict()
    assert any("2 x 2" in done for done in load_init_weights(target, written(source, tmp_path / "weights")))
    assert torch.equal(target.head.weight, initial)
    loaded = {name: value for name, value in target.state_dict().items() if not name.startswith("head")}
    assert loaded.keys() == body.keys() - {"head.weight", "head.bias"}
    assert all(torch.equal(value, body[name]) for name, value in loaded.items())


def test_a_head_is_reset_on_demand_and_may_be_missing(tmp_path):
    source, target = mixer(seed=1), mixer(seed=2)
    initial = target.head.weight.clone()
    assert len(load_init_weights(target, written(source, tmp_path / "weights"), reset_head=True)) == 2
    assert torch.equal(target.head.weight, initial)
    assert torch.equal(target.stem.proj.weight, source.stem.proj.weight)
    bodies = {name: value for name, value in source.state_dict().items() if not name.startswith("head")}
    save_file(bodies, tmp_path / "body")
    load_init_weights(target, str(tmp_path / "body"), reset_head=True)
    with pytest.raises(InputError, match=r"has no head.bias"):
        load_init_weights(target, str(tmp_path / "body"))


def test_a_shared_head_is_reset_under_all_its_names(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(4, 3)
            self.head.weight = self.embedding.weight

        def get_classifier(self):
            return self.head

    source, target = Tied(), Tied()
    initial = target.head.weight.clone()
    torch.save(source.state_dict(), tmp_path / "weights")
    assert load_init_weights(target, str(tmp_path / "weights"), reset_head=True) == [
        f"{name} newly initialised for 3 classes" for name in ("embedding.weight", "head.bias", "head.weight")
    ]
    assert torch.equal(target.head.weight, initial)
    assert target.head.weight is target.embedding.weight
    for reset in (False, True):  # of tied weights safetensors keeps one name
        save_model(source, str(tmp_path / "once.safetensors"))
        load_init_weights(target, str(tmp_path / "once.safetensors"), reset_head=reset)
        assert torch.equal(target.embedding.weight, source.embedding.weight)


def test_both_heads_of_a_distilled_network_are_new(tmp_path):
    source, target = (timm.create_model(DISTILLED, num_classes=classes) for classes in (7, 5))
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    assert load_init_weights(target, str(tmp_path / "weights.safetensors")) == [
        f"{name}.{part} newly initialised for 5 classes"
        for name in ("head", "head_dist")
        for part in ("bias", "weight")
    ]
    assert torch.equal(target.cls_token, source.cls_token)


DISTILLED = "deit_tiny_distilled_patch16_224"


@pytest.mark.parametrize(
    ("name", "heads"),
    [("resnet10t", ["fc"]), (DISTILLED, ["head", "head_dist"])],
)
def test_the_body_of_any_network_is_frozen(name, heads):
    network = timm.create_model(name, num_classes=5)
    freeze(network, ["body"])
    trained = {key for key, p in network.named_parameters() if p.requires_grad}
    assert trained == {f"{head}.{part}" for head in heads for part in ("weight", "bias")}
    before = {key: value.clone() for key, value in network.state_dict().items()}
    images = torch.randn(2, 3, 224, 224)
    expected = network.eval()(images)
    torch.testing.assert_close(network.train()(images), expected)
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    norms = [part for part in network.modules() if isinstance(part, torch.nn.BatchNorm2d)]
    assert bool(norms) == name.startswith("resnet")
    assert network.training


class Code:
    """What pickle would run."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_timms_pretrained_by_name(system):
    source, target = mixer(seed=1), mixer(seed=2)
    asked = []
    system({"timm.create_model": lambda name, pretrained: asked.append((name, pretrained)) or source})
    load_init_weights(target, "timm:mixer_b16_224.goog_in21k")
    assert asked == [("mixer_b16_224.goog_in21k", True)]
    assert same(target, source)


def test_frozen_parameters_are_named_by_patterns():
    model = mixer()
    assert freeze(model, ["stem.*", "blocks.0.*"]) == sum(
        p.numel() for part in (model.stem, model.blocks[0]) for p in part.parameters()
    )
    assert {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad} == {
        "blocks",
        "norm",
        "head",
    }
    for patterns in (["stem.*", "steam.*"], ["stem.*", "blocks.0"], ["stem.*", "unused"]):
        with pytest.raises(InputError, match=rf"train.freeze {re.escape(patterns[1])}: "):
            freeze(mixer(), patterns)
    model = mixer()
    biases = {name: p.numel() for name, p in model.named_parameters() if name.endswith(".bias")}
    assert freeze(model, ["*.bias"]) == sum(biases.values())
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == biases.keys()
    model = mixer()
    freeze(model, ["stem.*", "body"])
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["head.weight", "head.bias"]


def test_a_run_starts_from_weights_and_trains_the_rest(train, tmp_path):
    source = mixer_of_digits(tmp_path)
    options = ("--train.init_from", source, "--train.freeze", "[stem.*, blocks.*]", "--train.epochs", "3")
    code, output = train("run", *options, "--schedule.warmup_epochs", "0", "--train.max_steps", "1").wait()
    assert code == 0, output
    assert "starting from" in output
    assert "weights are frozen" in output
    before, after = load_file(source), load_file(tmp_path / "run/checkpoints/00000001/model.safetensors")
    moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"norm", "head"}


def mixer_of_digits(tmp_path: Path) -> str:
    torch.manual_seed(5)
    shape = {"kind": "mixer", "patch_size": 2, "channels": 64, "depth": 2, "expansion": 2}
    model = build_model(MixerSection(**shape, permutation="random"), 8, 10)
    torch.nn.init.normal_(model.head.weight, std=0.1)
    return written(model, tmp_path / "weights")


FC1 = "blocks.1.mlp_channels.fc1.weight"
TRANSPOSED = mixer().state_dict() | {FC1: mixer().state_dict()[FC1].T.contiguous()}


def changed(change, **others) -> dict[str, torch.Tensor]:
    """The weights of a mixer with a permutation of which one was changed."""
    model = mixer(permutation="random").to(others.get("kind", torch.float32))
    index = next(part for name, part in model.named_buffers() if name.endswith("index"))
    change(index if others.get("index") else model.get_parameter(FC1).data[3, 2])
    return model.state_dict()


def permuted() -> Mixer:
    return mixer(permutation="random")


MORE, NOT_FINITE = "holds more than a state_dict of weights", "has values that are not finite"
BLOCKED, SHAPE = (
    f"{MORE} (weights_only=True blocked",
    "has shape [12, 3, 4, 4] there, [12, 3, 8, 8] in the recipe's model",
)


@pytest.mark.parametrize(
    ("content", "target", "says"),
    [
        (lambda folder: {"head.weight": Code(folder / "run")}, mixer, BLOCKED),
        (lambda folder: [torch.ones(2)], mixer, MORE),
        (lambda folder: {"epoch": 3}, mixer, "epoch is not a tensor; save the model's state_dict alone"),
        *(
            (mixer().state_dict(), partial(mixer, *size, **keys), says)
            for size, keys, says in (
                ((16,), {"token_hidden": 7}, "D_S is 6, the recipe's 7; model.token_hidden 24 grows it"),
                ((), {"depth": 3}, "has no blocks.2"),
                ((), {"depth": 1}, "has blocks.1"),
                ((), {"channels": 16}, "has shape [24, 12] there, [24, 16] in the recipe's model"),
                ((12,), {}, "reads images of 4 tokens, the recipe's are 9; they may be 2, 3, ... times as high"),
                ((16,), {"permutation": "random"}, "has no blocks.0.mlp_channels.permute_in.index; use the model"),
                ((16,), {"patch_size": 8}, SHAPE),
            )
        ),
        (TRANSPOSED, mixer, f"{FC1} has shape [12, 24] there, [24, 12] in the recipe's model"),
        *(
            (changed(lambda w, value=value: w.fill_(value), kind=kind), permuted, f"{FC1} {NOT_FINITE}")
            for value, kind in ((torch.nan, torch.float32), (torch.inf, torch.bfloat16))
        ),
        (changed(lambda index: index.add_(1), index=True), permuted, "index is not a permutation"),
        (b"\x08\0\0\0\0\0\0\0notjson!", mixer, "train.init_from"),
    ],
)
def test_what_is_no_weights_is_refused_and_never_run(tmp_path, content, target, says):
    """And nothing of it is run."""
    path = tmp_path / "weights.safetensors"
    if callable(content):
        path = torch_saved(tmp_path, content(tmp_path))
    else:
        path.write_bytes(content) if isinstance(content, bytes) else save_file(content, path)
    with pytest.raises(InputError) as raised:
        load_init_weights(target(), str(path))
    assert says in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_damaged_checkpoint_is_refused(tmp_path):
    path = saved_run(tmp_path, mixer().state_dict()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(InputError, match=r"model.safetensors: is damaged"):
        load_init_weights(mixer(), str(tmp_path))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("columns", lambda t: t + 1000, "columns has entries outside of 0 to 11"),
        ("order", lambda t: t.flip(0), "order does not fit"),
        ("row_starts", lambda t: t + 1, "row_starts does not divide"),
    ],
)
def test_positions_of_sparse_weights_that_do_not_fit_are_refused(name, change, words):
    layer = SparseLinear(12, 8, 0.5, (1,))
    check_indices(layer)
    layer.get_buffer(name).copy_(change(layer.get_buffer(name)))
    with pytest.raises(ValueError, match=words):
        check_indices(layer)


class LooksAtNumbers(torch.nn.Module):
    """As routing does: which of its parts are used depends on numbers, which the meta device has none of.

    In training it drops out, and uses another part than in evaluation. Some refuse the meta device with a ValueError.
    """

    def __init__(self, looks: bool | str):
        super().__init__()
        self.norm, self.used, self.other, self.evaluated = (
            torch.nn.BatchNorm1d(4),
            *(torch.nn.Linear(4, 2) for _ in "abc"),
        )
        self.frozen, self.looks = torch.nn.Linear(4, 2).requires_grad_(False), looks

    def forward(self, x):
        if not self.training:
            return self.evaluated(x)
        if self.looks == "refuses" and x.is_meta:
            raise ValueError("no numbers")
        x = torch.nn.functional.dropout(self.norm(x), 0.5)
        return self.used(x) if not self.looks or x.isfinite().all().item() else self.other(x)


@pytest.mark.parametrize("looks", [False, True, "refuses"])
@pytest.mark.parametrize("training", [True, False])
def test_unused_parameters_are_those_of_training(looks, training):
    module = LooksAtNumbers(looks).train(training)
    before, state = copy.deepcopy(module.state_dict()), torch.random.get_rng_state()
    with torch.no_grad():
        unused = unused_parameters(module, torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    assert unused == {f"{part}.{name}" for part in ("other", "evaluated") for name in ("weight", "bias")}
    assert module.training is training
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name

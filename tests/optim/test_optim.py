"""Parameter groups and the learning rate."""

import decimal
import math
import random

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

import widemix  # noqa: F401  puts our names into timm's registry
from tests.sections import train_section
from widemix.errors import InputError
from widemix.models.mixer.section import MixerSection
from widemix.models.registry import build_model
from widemix.models.structured import linear_of
from widemix.models.structured_factors import Structure
from widemix.models.sw_mlp.sparse import SparseLinear
from widemix.optim.build import (
    build_optimizer,
    group_scalars,
    inner_matrices,
    parameter_groups,
    set_group_scalars,
    set_rate,
    undecayed,
)
from widemix.optim.optimizers import FusedSgd, Muon, MuonAndAdamW
from widemix.optim.section import OPTIMIZERS, OptimSection
from widemix.recipe.sections import ScheduleSection
from widemix.training.schedule import build_run_schedule, build_schedule


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", [timm.list_models(module=module)[0] for module in timm.list_modules()])
def test_groups_are_timms(name):
    """Each parameter has the decay that timm's train.py gives it: one network of each of its modules, and ours."""
    with torch.device("meta"):
        try:
            model = timm.create_model(name)
        except (RuntimeError, NotImplementedError):  # it reads values while it is built
            return
    spared = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    theirs = param_groups_weight_decay(model, 0.05, no_weight_decay_list=spared)
    names = {parameter: name for name, parameter in model.named_parameters()}
    expected = {names[p]: group["weight_decay"] for group in theirs for p in group["params"]}
    for prefix, part in model.named_modules():  # a matrix, which timm takes for a vector
        if isinstance(part, SparseLinear):
            expected[f"{prefix}.values"] = 0.05
    groups = parameter_groups(OptimSection(lr=0.1, weight_decay=0.05), model)
    assert {names[p]: group["weight_decay"] for group in groups for p in group["params"]} == expected


EMBEDDING = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 2))
PATTERN = nn.ModuleDict({"one": nn.Linear(2, 2), "ones": nn.Linear(2, 2)})
PATTERN.no_weight_decay = lambda: {"one.*"}
GROUPED = nn.Sequential(nn.Linear(3, 2))
GROUPED[0].bias = nn.Parameter(torch.zeros(4, 2))
NAMED = nn.Module()
NAMED.scale, NAMED.table_bias = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(3, 2))


@pytest.mark.parametrize(
    ("model", "keys", "expected"),
    [
        (nn.Sequential(SparseLinear(4, 4, 0.5, (0,)), nn.LayerNorm(4)), {}, {"0.bias", "1.weight", "1.bias"}),
        (SparseLinear(4, 4, 0.5, (0,)), {}, {"bias"}),  # whose values are a matrix on one axis
        (nn.Embedding(3, 4), {"decay_embeddings": False}, {"weight"}),
        (EMBEDDING, {}, {"1.bias"}),
        (EMBEDDING, {"decay_embeddings": False}, {"0.weight", "1.bias"}),
        (PATTERN, {}, {"one.weight", "one.bias", "ones.bias"}),
        (GROUPED, {}, {"0.bias"}),  # as in timm, whose biases are those whose names end in .bias
        (NAMED, {}, {"scale"}),
    ],
    ids=["sparse", "one layer", "embedding alone", "embedding", "spared embedding", "pattern", "two axes", "names"],
)
def test_what_does_not_decay(model, keys, expected):
    assert undecayed(model, **keys) == expected
    groups = parameter_groups(OptimSection(lr=0.1, weight_decay=0.5, **keys), model)
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(p) for name, p in model.named_parameters() if name not in expected}


@pytest.mark.parametrize("name", ["mixer_s32_224", "rp_mixer_s32_224", "resmlp_12_224", "vit_tiny_patch16_224"])
def test_layer_wise_decay_is_timms(name):
    model = timm.create_model(name, num_classes=10)
    spared = tuple(undecayed(model))
    theirs = param_groups_layer_decay(model, 0.05, spared, layer_decay=0.7, weight_decay_exclude_1d=False)
    expected = {id(p): (g["lr_scale"], g["weight_decay"]) for g in theirs for p in g["params"]}
    section = OptimSection(lr=0.1, weight_decay=0.05, layer_decay=0.7)
    groups = parameter_groups(section, model)
    assert {id(p): (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]} == expected
    assert len({scale for scale, _ in expected.values()}) > 8
    optimizer = build_optimizer(section, model)
    set_rate(optimizer, 0.2)
    assert sorted({g["lr"] for g in optimizer.param_groups}) == pytest.approx(
        sorted({0.2 * scale for scale, _ in expected.values()})
    )


def test_layer_wise_decay_needs_layers():
    with pytest.raises(InputError, match="Linear does not define an order of layers"):
        parameter_groups(OptimSection(lr=0.1, layer_decay=0.5), nn.Linear(2, 2))


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
def test_frozen_weights_are_in_no_group(layer_decay):
    model = build_model(MixerSection(kind="s_mixer", patch_size=4, channels=6, depth=2), 8, 3)
    model.stem.requires_grad_(False)
    groups = parameter_groups(OptimSection(lr=0.1, layer_decay=layer_decay), model)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for group in groups for p in group["params"]} == set(map(id, trained))
    assert max(group["lr_scale"] for group in groups) == 1


def test_groups_come_in_a_fixed_order_with_their_penalty():
    """Matrices for Muon first, slower layers before faster ones, decayed before others: checkpoints go by it."""
    torch.manual_seed(0)
    model = build_model(MixerSection(kind="s_mixer", patch_size=4, channels=6, depth=1), 8, 3)
    names = {id(p): name for name, p in model.named_parameters()}

    def described(**keys):
        groups = parameter_groups(OptimSection(lr=0.1, **keys), model)
        return [({names[id(p)] for p in group.pop("params")}, group) for group in groups]

    weights = {"blocks.0.mlp_tokens.fc.weight", "blocks.0.mlp_channels.fc.weight"}
    ends = {"stem.proj.weight", "head.weight"}
    vectors = {name for name in names.values() if name not in weights | ends}
    rest = {"lr_scale": 1.0, "matrices": False}
    assert described(name="muon", weight_decay=0.3) == [
        (weights, {"weight_decay": 0.3, "lr_scale": 1.0, "matrices": True}),
        (ends, {"weight_decay": 0.3, **rest}),
        (vectors, {"weight_decay": 0.0, **rest}),
    ]
    assert described(name="beta_lasso", weight_decay=0.0, l1=0.2) == [
        (weights | ends, {"l1": 0.2, **rest}),
        (vectors, {"l1": 0.0, **rest}),
    ]
    scales = [(group["lr_scale"], group["weight_decay"]) for _, group in described(layer_decay=0.5)]
    assert scales == [(0.25, 0.05), (0.25, 0.0), (0.5, 0.05), (0.5, 0.0), (1.0, 0.05), (1.0, 0.0)]


def test_counters_of_groups_are_restored_as_numbers():
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(11)]
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters], lr=0.1)
    for number, group in enumerate(optimizer.param_groups):
        group |= {"k": number, "weight_sum": number / 2, "step": torch.tensor(10.0 + number), "other": 5}
    del optimizer.param_groups[3]["k"]
    saved = group_scalars(optimizer, ("k", "weight_sum", "step", "lr_max"))
    assert len(saved) == 3 * 11 - 1
    assert (saved["group10/k"], saved["group10/weight_sum"], saved["group1/step"]) == (10.0, 5.0, 11.0)
    other = torch.optim.SGD([{"params": [p]} for p in parameters], lr=0.1)
    for group in other.param_groups:
        group |= {"k": 99, "weight_sum": 99.0, "other": 99}
    everything = {**saved, "loss_scale": 3.0, **{f"group{n}/k": float(n) for n in range(11)}}
    set_group_scalars(other, ("k", "weight_sum", "step", "lr_max"), everything)
    for number, group in enumerate(other.param_groups):
        assert (group["k"], type(group["k"])) == (number, int)
        assert (group["weight_sum"], type(group["weight_sum"])) == (number / 2, float)
        assert group["step"] == 10 + number
        assert (group["step"].dtype, group["step"].shape) == (torch.float32, ())
        assert group["other"] == 99
        assert "lr_max" not in group  # which was not saved
    set_group_scalars(other, ("k",), {"group0/k": 3.0, "group1/k": 3.0, "group0/k_most": 8.0})
    assert {group["k"] for group in other.param_groups} == {3}  # what two shared, whatever begins with its name


def test_rates_of_a_single_layer_are_those_of_its_factors():
    groups = parameter_groups(OptimSection(lr=0.1), linear_of(Structure("low_rank", 2))(8, 4))
    assert {group["lr_scale"] for group in groups} == {8 / 8 / 2, 8 / 2 / 2, 1.0}


def test_muon_takes_the_matrices_of_the_blocks():
    model = timm.create_model("vit_tiny_patch16_224")
    words = nn.ModuleDict({"words": nn.Embedding(5, 4), "inner": nn.Linear(4, 4)})
    words.get_classifier = nn.Identity
    assert inner_matrices(words) == {"inner.weight"}  # rows of embeddings are looked up one by one
    expected = {
        f"blocks.{i}.{part}.weight" for i in range(12) for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    }
    assert inner_matrices(model) == expected
    assert inner_matrices(timm.create_model("deit_tiny_distilled_patch16_224")) == expected  # which has two heads


@pytest.mark.parametrize("part", ["matrices", "others"])
def test_muon_of_matrices_alone_and_of_none(part):
    weight = nn.Parameter(torch.ones(3, 2))
    groups = [{"params": [weight], "weight_decay": 0.0, "matrices": part == "matrices"}]
    optimizer = MuonAndAdamW(groups, {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "fused": True}, 0.9)
    weight.grad = torch.arange(6.0).reshape(3, 2) - 1
    optimizer.step()
    states = {"matrices": {"momentum_buffer"}, "others": {"step", "exp_avg", "exp_avg_sq"}}[part]
    assert set(optimizer.state[weight]) == states
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_the_table_says_which_state_each_keeps(name):
    torch.manual_seed(0)
    model = build_model(MixerSection(kind="s_mixer", patch_size=4, channels=6, depth=1), 8, 3)
    penalty = {"weight_decay": 0.0, "l1": 0.01} if name == "beta_lasso" else {}
    section = OptimSection(name=name, lr=0.1, **penalty)
    optimizer, spec = build_optimizer(section, model), OPTIMIZERS[name]
    before = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    for _ in range(3):
        model(torch.randn(5, 3, 8, 8)).square().sum().backward()
        optimizer.step()
    weight = model.blocks[0].mlp_tokens.fc.weight
    states = optimizer.state[weight]
    assert [kind for kind, value in states.items() if value.ndim == 0] in ([], ["step"])
    assert sum(value.shape == weight.shape for value in states.values()) == spec.states
    changed = {
        key
        for old, group in zip(before, optimizer.param_groups, strict=True)
        for key, value in group.items()
        if key != "params" and (key not in old or value != old[key])
    }
    assert changed - {"scheduled_lr"} == set(spec.group_counters)  # which is computed anew in each step


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim has no Muon before 2.9")
@pytest.mark.parametrize("shape", [(5, 5), (12, 7), (7, 12), (1, 9)], ids=str)
def test_muon_is_torchs_bit_by_bit(shape):
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    muon = Muon([{"params": [ours], "weight_decay": 0.3}], 0.1, 0.9)
    expected = torch.optim.Muon([theirs], 0.1, 0.3, 0.9, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        for optimizer in (muon, expected):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        muon.step()
        expected.step()
        assert torch.equal(ours, theirs)
    before, ours.grad = ours.detach().clone(), None
    muon.step()
    assert torch.equal(ours, before)  # without a gradient it does not decay
    still, zeros = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    zeros.grad = torch.zeros(shape)
    Muon([{"params": [zeros], "weight_decay": 0.0}], 0.1, 0.9).step()
    assert torch.equal(zeros, still)  # nor does a gradient of zeros make it NaN
    (buffer,) = muon.state[ours].values()
    assert torch.equal(buffer, expected.state[theirs]["momentum_buffer"])


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_sgd_is_torchs_with_nesterovs_momentum_if_any(momentum):
    ours, theirs, idle = (nn.Linear(3, 2, bias=False) for _ in range(3))
    theirs.load_state_dict(ours.state_dict())
    section = OptimSection(name="sgd", lr=0.1, momentum=momentum, weight_decay=0.2)
    fused = build_optimizer(section, nn.ModuleList([ours, idle]))
    plain = torch.optim.SGD(theirs.parameters(), 0.1, momentum, weight_decay=0.2, nesterov=momentum > 0)
    before = idle.weight.clone()
    for _ in range(3):
        ours.weight.grad = torch.randn(2, 3)
        theirs.weight.grad = ours.weight.grad.clone()
        fused.step()
        plain.step()
    torch.testing.assert_close(ours.weight, theirs.weight)
    assert torch.equal(idle.weight, before)  # which has no gradient
    assert idle.weight not in fused.state


def test_a_schedule_free_average_begins_as_a_copy():
    weight = nn.Parameter(torch.ones(3))
    groups = [{"params": [weight], "weight_decay": 0.0}]
    optimizer = OPTIMIZERS["schedule_free"].build(
        groups, OptimSection(name="schedule_free", lr=0.1, betas=(0.5, 0.9))
    )
    average = OPTIMIZERS["schedule_free"].evaluation_weight
    first = average(optimizer, weight)
    assert first.tolist() == [1, 1, 1]
    first.zero_()
    weight.grad = torch.ones(3)
    optimizer.step()
    weight.data.fill_(3.0)
    optimizer.state[weight]["z"].fill_(1.0)
    assert average(optimizer, weight).tolist() == [5, 5, 5]  # 3 = 1 / 2 + 5 / 2
    assert weight.tolist() == [3, 3, 3]


def test_fused_sgd_skips_what_overflows_and_is_torchs_otherwise():
    """The first step too, which must not leave a momentum of anything."""
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(5, 3))
    theirs = nn.Parameter(ours.detach().clone())
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2, "nesterov": True}
    fused, plain = FusedSgd([ours], **options, fused=True), torch.optim.SGD([theirs], **options, foreach=False)
    fused.grad_scale = torch.tensor(8.0)
    for overflows in (True, False, True, False, False):
        theirs.grad = torch.randn(5, 3)
        ours.grad = theirs.grad * 8
        fused.found_inf = torch.tensor(float(overflows))
        fused.step()
        if not overflows:
            plain.step()
        torch.testing.assert_close(ours, theirs)


def test_a_run_ends_after_its_epochs_or_its_max_steps():
    for max_steps, last in ((None, 20), (7, 7), (100, 20)):
        train = train_section(8, epochs=4, max_steps=max_steps)
        schedule = build_run_schedule(ScheduleSection(min_lr=0.1), 1.0, train, steps_per_epoch=5)
        assert schedule.last_step == last
        expected = [0.1 + 0.9 * (1 + math.cos(math.pi * step / 19)) / 2 for step in (0, 6, 19)]
        assert [schedule.lr(step) for step in (0, 6, 19)] == pytest.approx(expected)  # wherever it ends


def test_no_schedule_changes_a_step_early_or_late():
    """Over thousands of random settings, against integers and 60 decimal digits: 0.1 epochs of 10 steps are one."""
    numbers = random.Random(0)
    with decimal.localcontext(prec=60):
        for _ in range(4000):
            steps, epochs = numbers.randint(1, 40), numbers.randint(1, 12)
            name = numbers.choice(["cosine", "linear", "step", "constant"])
            scale = numbers.choice([1, 10, 1000])  # of the decimal numbers of epochs
            warmup = numbers.randint(0, scale * epochs // 2)
            cooldown = numbers.randint(0, scale * epochs // 2) if name == "constant" else 0
            decay, step = numbers.randint(1, 3 * scale), numbers.randrange(steps * epochs)
            peak, low = decimal.Decimal(numbers.randint(500, 999)), decimal.Decimal(numbers.randint(0, 499))
            section = ScheduleSection(
                name=name,
                warmup_epochs=warmup / scale,
                warmup_lr=float(low / 1000),
                min_lr=float(low / 1000),
                decay_epochs=decay / scale,
                decay_rate=0.5,
                cooldown_epochs=cooldown / scale,
            )
            warm, cool = (round(decimal.Decimal(part * steps) / scale) for part in (warmup, cooldown))
            last = steps * epochs - 1
            start = last - cool if name == "constant" else warm
            progress = min(decimal.Decimal(max(step - start, 0)) / max(last - start, 1), decimal.Decimal(1))
            if step < warm:
                expected = (low + (peak - low) * step / warm) / 1000
            elif name == "step":
                expected = peak / 1000 / 2 ** (step * scale // (steps * decay))
            elif name == "constant" and not cool:
                expected = peak / 1000
            elif name == "cosine":
                expected = float(low / 1000) + float((peak - low) / 2000) * (1 + math.cos(math.pi * float(progress)))
            else:
                expected = (low + (peak - low) * (1 - progress)) / 1000
            found = build_schedule(section, float(peak / 1000), steps, epochs)(step)
            close = {"rel": 1e-13} if name == "cosine" and step >= warm else {"rel": 0, "abs": 0}
            assert found == pytest.approx(float(expected), **close), (section, steps, epochs, step)

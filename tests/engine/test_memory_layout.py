"""In which memory layout a Mixer's blocks are computed."""

import json
from pathlib import Path
from subprocess import CalledProcessError
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import ROOT
from tests.engine.ranks import Setting, overrides_for
from widemix.distributed.topology import Topology, read_topology
from widemix.engine import memory_layout
from widemix.engine.memory_layout import choose_memory_layout, set_memory_layout, use_memory_layout
from widemix.errors import InputError
from widemix.models.batch_last import block as batch_last
from widemix.models.registry import build_model
from widemix.recipe import load_recipe

CPU = torch.device("cpu")
ROUNDS = 9


def recipe(*overrides: tuple[str, str], name: str = "digits/rp_mixer"):
    return load_recipe(ROOT / f"recipes/{name}.yaml", overrides)


def network(setting):
    torch.manual_seed(0)
    return build_model(setting.model, setting.data.image_size, setting.data.num_classes)


def chosen(*overrides: tuple[str, str], name: str = "digits/rp_mixer", batch: int = 32, module=None) -> str:
    setting = recipe(*overrides, name=name)
    return choose_memory_layout(module or network(setting), setting.engine, setting.train, batch, CPU)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's, which is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "widemix"


def answers(cache) -> list[dict]:
    return [json.loads(path.read_text()) for path in cache.glob("memory_layout-*.json")]


class Clock:
    """By which batch_last takes `ratio` of the time, but in a disturbed round, and a pass of few images `seconds`."""

    ratio, seconds = 0.5, 1.0

    def __init__(self):
        self.timed = 0
        self._times = self._count()

    def __call__(self) -> float:
        return next(self._times)

    def _count(self):
        now = 0.0
        while True:
            self.timed += 1
            yield now
            yield (now := now + self.seconds)
            for number in range(ROUNDS):
                yield now
                yield (now := now + 4)
                yield (now := now + (4000 if number == 5 else 4 * self.ratio))


@pytest.fixture
def clock(cache, system) -> Clock:
    clock = Clock()
    system({"time.perf_counter": clock})
    return clock


def test_the_faster_way_is_kept_on_disk(clock, cache):
    """By shape and precision; an answer that is none is timed again."""
    for _ in range(2):
        assert [chosen(), chosen(), chosen(batch=64), chosen(("train.precision", "bf16"))] == ["batch_last"] * 4
        assert clock.timed == 3
        assert answers(cache) == [{"memory_layout": "batch_last", "time_ratio": 0.5}] * 3


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"memory_layout": []}', "plain", '"plain"', "[" * 100_000, '{"memory_layout": "other"}']
)
def test_an_answer_that_cannot_be_read_is_timed_again(clock, cache, text):
    chosen()
    (path,) = cache.iterdir()
    path.write_text(text)
    assert chosen() == "batch_last"
    assert clock.timed == 2
    assert answers(cache) == [{"memory_layout": "batch_last", "time_ratio": 0.5}]


def test_without_a_writable_home_the_process_keeps_the_answer(clock, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert chosen(batch=5) == chosen(batch=5) == "batch_last"
    assert clock.timed == 1


def test_whatever_times_depend_on_has_an_answer_of_its_own(clock, system, monkeypatch):
    def is_timed(**options) -> bool:
        before = clock.timed
        assert chosen(**options) == chosen(**options) == "batch_last"
        return clock.timed > before

    assert is_timed()
    assert is_timed(module=network(recipe(("model.activation", "gelu_tanh"))))
    read_text = Path.read_text
    for name, answer in (
        ("torch.get_float32_matmul_precision", lambda: "high"),
        ("torch.get_num_threads", lambda: 77),
        ("torch.__version__", "2.77.0"),
        (
            "pathlib.Path.read_text",
            lambda path, **others: "model name: x" if str(path) == "/proc/cpuinfo" else read_text(path, **others),
        ),
    ):
        system({name: answer})
        assert is_timed()
    monkeypatch.setattr(memory_layout, "version", lambda _: "77.0")
    assert is_timed()
    monkeypatch.setattr(memory_layout, "open_library", lambda: SimpleNamespace(_name="/a/two.so"))
    assert is_timed()


def test_a_micro_batch_of_the_last_block_is_timed(clock, alone, system):
    keys = ("train.grad_accum_steps", "2"), ("model.project_tokens", "9")
    setting = recipe(*keys)
    system({"torch.distributed.broadcast_object_list": lambda *_, **__: None})
    for topology, batch in ((read_topology(), 32), (Topology(0, 4, 0, 2, CPU), 8)):  # the second: two nodes of two
        shapes, module = [], network(setting)
        module.blocks[-1].register_forward_pre_hook(lambda _, given, shapes=shapes: shapes.append(given[0].shape[1:]))
        assert set_memory_layout(module, setting.engine, setting.train, topology) == "batch_last"
        assert set(shapes) == {(9, 64)}
        before = clock.timed
        assert chosen(*keys, batch=batch) == "batch_last"
        assert clock.timed == before
    assert clock.timed == 2
    other = recipe(name="cifar10/sw_mlp")
    assert set_memory_layout(network(other), other.engine, other.train, read_topology()) is None


@pytest.mark.parametrize(("seconds", "images"), [(1.0, 16), (0.1, 16), (0.04, 32), (0.001, 40)])
def test_as_many_images_are_timed_as_take_a_moment(clock, seconds, images):
    """In multiples of 16, at least one; a first pass does not count."""
    clock.seconds, module, sizes = seconds, network(recipe()), []
    module.blocks[-1].register_forward_pre_hook(lambda block, given: sizes.append(len(given[0])))
    assert chosen(batch=40, module=module) == "batch_last"
    assert sizes[:2] == [16, 16]
    assert sizes[-2 * ROUNDS :] == [images] * 2 * ROUNDS


@pytest.mark.parametrize(("ratio", "taken"), [(0.99, "plain"), (0.98, "plain"), (0.97, "batch_last"), (1.5, "plain")])
def test_a_way_hardly_faster_is_not_taken(clock, cache, ratio, taken):
    """By the median of rounds, of which one is disturbed."""
    clock.ratio = ratio
    assert chosen() == taken
    assert answers(cache) == [{"memory_layout": taken, "time_ratio": pytest.approx(ratio)}]


def test_gradients_that_are_zero_are_equal(clock):
    module = network(recipe(("model.drop_path", "0.9"))).train()
    for parameter in module.blocks[-1].mlp_channels.fc2.parameters():
        torch.nn.init.zeros_(parameter)
    assert chosen(module=module) == "batch_last"


def test_one_block_that_does_not_fit_is_enough(clock):
    """Stages are DeepSpeed's alone."""
    setting = recipe()
    module = network(setting)
    stage = setting.engine.model_copy(update={"zero_stage": 3})
    assert choose_memory_layout(module, stage, setting.train, 4, CPU) == "batch_last"
    module.blocks[1].fits_batch_last = lambda: False
    assert choose_memory_layout(module, setting.engine, setting.train, 4, CPU) == "plain"


ZERO_3 = {"engine.kind": "deepspeed", "engine.zero_stage": "3"}


@pytest.mark.parametrize(
    ("keys", "name", "words"),
    [
        ({"engine.memory_layout": "plain"}, "digits/rp_mixer", None),
        ({"train.deterministic": "true"}, "digits/rp_mixer", None),
        ({"train.compile": "true"}, "digits/rp_mixer", "train.compile compiles the blocks"),
        (ZERO_3, "digits/rp_mixer", "engine.zero_stage 3 gathers"),
        ({"model.token_groups": "4", "model.permutation": "commutation"}, "digits/mixer", "groups of tokens"),
        ({}, "cifar10/sw_mlp", "no Mixer of images; take auto or plain"),
    ],
)
def test_what_cannot_be_computed_so_is_refused_and_not_timed(clock, keys, name, words):
    assert chosen(*keys.items(), name=name) == "plain"
    assert clock.timed == 0
    if words:
        with pytest.raises(InputError, match=words):
            chosen(("engine.memory_layout", "batch_last"), *keys.items(), name=name)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_timing_a_block_leaves_the_network_as_it_was(cache, frozen, context, precision):
    """By the real clock, also where no gradients are wanted, and with weights in bf16."""
    setting = recipe(("train.precision", precision))
    module = network(setting).requires_grad_(not frozen)
    module = module.bfloat16() if precision == "bf16" else module
    weights = [parameter.clone() for parameter in module.parameters()]
    with context():
        assert choose_memory_layout(module, setting.engine, setting.train, 8, CPU) in ("plain", "batch_last")
    assert all(map(torch.equal, weights, module.parameters()))
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not any(block.batch_last for block in module.blocks)
    (answer,) = answers(cache)
    assert 0.01 < answer["time_ratio"] < 100


def fail(block, y):
    raise CalledProcessError(1, "gcc")  # what Triton starts


def with_gradient(parameter, y):
    return y + (0.01 * parameter - 0.01 * parameter.detach()).sum()


@pytest.mark.parametrize(
    ("precision", "fault"),
    [
        ("fp32", lambda block, y: 1.01 * y),
        ("fp32", lambda block, y: torch.nan * y),
        ("fp32", fail),
        ("fp32", lambda block, y: with_gradient(block.mlp_channels.fc2.weight, y)),
        # The bias' gradient is off by 96 %, that of all weights together by 3 %.
        ("bf16", lambda block, y: with_gradient(block.norm1.bias, y)),
    ],
    ids=["wrong", "no number", "failing", "wrong gradient", "few wrong gradients"],
)
def test_kernels_that_are_wrong_or_fail_are_not_taken(clock, cache, precision, fault):
    module = network(recipe())
    module.blocks[-1].register_forward_hook(lambda block, _, y: fault(block, y) if block.batch_last else y)
    assert chosen(("train.precision", precision), module=module) == "plain"
    assert answers(cache) == [{"memory_layout": "plain", "time_ratio": float("inf")}]


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "deepspeed 0", "deepspeed 1", "deepspeed 2"])
def test_the_hooks_of_engines_are_not_on_layers(alone, digits, monkeypatch, engine):
    computed, right = [], batch_last.forward
    monkeypatch.setattr(batch_last, "forward", lambda block, x: computed.append(block) or right(block, x))
    setting = Setting("rp_mixer", digits, *overrides_for(f"{engine} batch_last"))
    setting.run(setting.engine(), range(1))
    assert len(computed) == setting.recipe.model.depth * setting.recipe.train.grad_accum_steps


def test_evaluation_is_the_same_to_the_bit_however_training_computes():
    module = network(recipe())
    x = torch.randn(5, 3, 8, 8)
    results = {}
    for layout in ("plain", "batch_last"):
        use_memory_layout(module, layout)
        results[layout] = [module.train(mode).forward_features(x) for mode in (True, False)]
    (plain, expected), (other, found) = results.values()
    assert not torch.equal(other, plain)
    assert torch.equal(found, expected)

"""In which memory layout a Mixer's blocks are computed."""

import json
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
from widemix.native.build import cache_folder
from widemix.recipe import load_recipe

CPU = torch.device("cpu")


def recipe(*overrides: tuple[str, str], name: str = "digits/rp_mixer"):
    return load_recipe(ROOT / f"recipes/{name}.yaml", overrides)


def network(setting):
    torch.manual_seed(0)
    return build_model(setting.model, setting.data.image_size, setting.data.num_classes)


def chosen(*overrides: tuple[str, str], name: str = "digits/rp_mixer", batch: int = 32) -> str:
    setting = recipe(*overrides, name=name)
    return choose_memory_layout(network(setting), setting.engine, setting.train, batch, CPU)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_layout, "cache_folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def timed(cache, monkeypatch):
    """What was timed; batch_last takes half the time."""
    seen: list[tuple] = []

    def time_ratio(block, shape, *rest):
        seen.append(shape)
        return 0.5

    monkeypatch.setattr(memory_layout, "_time_ratio", time_ratio)
    return seen


def test_the_faster_way_is_kept_on_disk_by_shape_and_precision(timed, cache):
    assert [chosen(), chosen(), chosen(batch=64), chosen(("train.precision", "bf16"))] == ["batch_last"] * 4
    assert timed == [(32, 16, 64), (64, 16, 64), (32, 16, 64)]
    (path, *_) = cache.iterdir()
    path.write_text(json.dumps({"memory_layout": "no such layout"}))
    assert {chosen(), chosen(batch=64), chosen(("train.precision", "bf16"))} == {"batch_last"}
    assert len(timed) == 4


def test_where_the_home_cannot_be_written_the_process_keeps_the_answer(timed, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr(memory_layout, "cache_folder", cache_folder)
    monkeypatch.setattr(memory_layout, "open_library", lambda: SimpleNamespace(_name="library.so"))
    assert chosen() == chosen() == "batch_last"
    assert len(timed) == 1


def test_products_in_tf32_are_timed_by_themselves(timed, monkeypatch):
    chosen()
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert chosen() == chosen() == "batch_last"
    assert len(timed) == 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)  # so are other threads, and other releases
    assert chosen() == chosen() == "batch_last"
    assert len(timed) == 3
    monkeypatch.setattr(memory_layout, "version", lambda _: "77.0")
    assert chosen() == chosen() == "batch_last"
    assert len(timed) == 4


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"memory_layout": []}', "plain", '"plain"', "[" * 100_000, '{"memory_layout": "other"}']
)
def test_an_answer_that_cannot_be_read_is_timed_again(timed, cache, text):
    chosen()
    (path,) = cache.iterdir()
    path.write_text(text)
    assert chosen() == "batch_last"
    assert len(timed) == 2
    assert json.loads(path.read_text()) == {"memory_layout": "batch_last", "time_ratio": 0.5}


def test_whatever_times_depend_on_has_an_answer_of_its_own(monkeypatch):
    def key(shape=(4, 16, 64), precision="fp32", *overrides):
        block = network(recipe(*overrides)).blocks[0]
        return memory_layout._key(block, shape, precision, CPU)

    monkeypatch.setattr(memory_layout.by_c, "takes", lambda block, x: True)
    monkeypatch.setattr(memory_layout, "open_library", lambda: SimpleNamespace(_name="/a/one.so"))
    monkeypatch.setattr(memory_layout, "_cpu", lambda: "one")
    other = ("model.activation", "gelu_tanh")
    keys = [key(), key((5, 16, 64)), key((4, 16, 64), "bf16"), key((4, 16, 64), "fp32", other)]
    for owner, name, value in (
        (torch, "__version__", "2.77.0"),
        (memory_layout, "open_library", lambda: SimpleNamespace(_name="/a/two.so")),
        (memory_layout, "_cpu", lambda: "two"),
    ):
        monkeypatch.setattr(owner, name, value)
        keys.append(key())
    monkeypatch.setattr(memory_layout.by_c, "takes", lambda block, x: False)
    keys.append(key())
    assert len(set(keys)) == len(keys)
    assert key() == keys[-1]


def test_the_batch_that_is_timed_is_a_micro_batch_of_the_last_block(timed, alone, monkeypatch):
    setting = recipe(("train.grad_accum_steps", "2"), ("model.tokens", "9"), ("model.project_tokens", "true"))
    assert set_memory_layout(network(setting), setting.engine, setting.train, read_topology()) == "batch_last"
    assert timed == [(32, 9, 64)]
    monkeypatch.setattr(memory_layout, "on_main", lambda topology, choose: choose())
    set_memory_layout(network(setting), setting.engine, setting.train, Topology(0, 4, 0, 2, CPU))  # two nodes of two
    assert timed[1:] == [(8, 9, 64)]


@pytest.mark.parametrize(("seconds", "images"), [(1.0, 16), (0.1, 16), (0.04, 32), (0.001, 40)])
def test_of_a_large_batch_as_many_images_are_timed_as_take_a_moment(monkeypatch, seconds, images):
    """In multiples of 16, at least one; a first pass does not count."""
    clock, sizes = [0.0], []

    def step(block, x, precision):
        sizes.append(len(x))
        clock[0] += 9.0 if len(sizes) == 1 else seconds

    monkeypatch.setattr(memory_layout, "_step", step)
    monkeypatch.setattr(memory_layout, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert memory_layout._images(None, torch.zeros(40, 2, 3), "fp32") == images
    assert sizes == [16, 16]


def test_the_ratio_is_the_median_of_rounds_and_a_pass_begins_without_gradients(monkeypatch):
    block = network(recipe(("model.drop_path", "0.9"))).train().blocks[1]
    x = torch.randn(3, 16, 64)
    plain = memory_layout.copy.deepcopy(block)
    plain.drop_path1 = plain.drop_path2 = torch.nn.Identity()
    one, other = (memory_layout._step(plain, x, "fp32") for _ in range(2))
    assert all(map(torch.equal, one, other))
    assert len(one) == 2 + len(list(plain.parameters()))
    # Of nine rounds one is disturbed: 4 s and 2 s, and once 4 s and 4,000 s.
    times = iter([time for base in range(9) for time in (0, 4, 4 + (4000 if base == 5 else 2))])
    monkeypatch.setattr(memory_layout, "_now", lambda device: next(times))
    monkeypatch.setattr(memory_layout, "_images", lambda block, x, precision: 3)
    assert memory_layout._time_ratio(block, (3, 16, 64), "fp32", CPU) == 0.5
    assert memory_layout._apart(torch.zeros(3), torch.zeros(3)) == 0


def test_one_block_that_does_not_fit_is_enough_and_stages_are_deepspeeds_alone(timed):
    setting = recipe()
    module = network(setting)
    stage = setting.engine.model_copy(update={"zero_stage": 3})
    assert choose_memory_layout(module, stage, setting.train, 4, CPU) == "batch_last"
    module.blocks[1].fits_batch_last = lambda: False
    assert choose_memory_layout(module, setting.engine, setting.train, 4, CPU) == "plain"


@pytest.mark.parametrize(("ratio", "taken"), [(0.99, "plain"), (0.98, "plain"), (0.97, "batch_last"), (1.5, "plain")])
def test_a_way_hardly_faster_is_not_taken(cache, monkeypatch, ratio, taken):
    monkeypatch.setattr(memory_layout, "_time_ratio", lambda *_: ratio)
    assert chosen() == taken
    (path,) = cache.iterdir()
    assert json.loads(path.read_text()) == {"memory_layout": taken, "time_ratio": ratio}


@pytest.mark.parametrize(
    "overrides",
    [
        {"engine.memory_layout": "plain"},
        {"train.deterministic": "true"},
        {"train.compile": "true"},
        {"engine.kind": "deepspeed", "engine.zero_stage": "3"},
        {"model.token_groups": "4", "model.permutation": "commutation"},
    ],
    ids=lambda overrides: "-".join(overrides),
)
def test_where_nothing_is_to_choose_nothing_is_timed(timed, overrides):
    assert chosen(*overrides.items()) == "plain"
    assert timed == []


@pytest.mark.parametrize(
    ("overrides", "name", "words"),
    [
        ({"train.compile": "true"}, "digits/rp_mixer", "train.compile compiles the blocks"),
        ({"engine.kind": "deepspeed", "engine.zero_stage": "3"}, "digits/rp_mixer", "engine.zero_stage 3 gathers"),
        ({"model.token_groups": "4"}, "digits/mixer", "groups of tokens"),
        ({}, "cifar10/sw_mlp", "no Mixer of images; take auto or plain"),
    ],
)
def test_what_cannot_be_computed_so_is_refused(overrides, name, words):
    with pytest.raises(InputError, match=words):
        chosen(("engine.memory_layout", "batch_last"), *overrides.items(), name=name)


@pytest.mark.parametrize("frozen", [False, True])
def test_timing_a_block_leaves_the_network_as_it_was(cache, frozen):
    setting = recipe()
    module = network(setting).requires_grad_(not frozen)
    weights = [parameter.clone() for parameter in module.parameters()]
    assert choose_memory_layout(module, setting.engine, setting.train, 8, CPU) in ("plain", "batch_last")
    assert all(map(torch.equal, weights, module.parameters()))
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not any(block.batch_last for block in module.blocks)
    (path,) = cache.iterdir()
    assert 0.01 < json.loads(path.read_text())["time_ratio"] < 100


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_gradients_are_timed_where_none_are_wanted(cache, context):
    setting = recipe()
    module = network(setting)
    with context():
        assert choose_memory_layout(module, setting.engine, setting.train, 8, CPU) in ("plain", "batch_last")


def test_the_weights_may_be_bf16(cache):
    setting = recipe(("train.precision", "bf16"))
    module = network(setting).bfloat16()
    assert choose_memory_layout(module, setting.engine, setting.train, 8, CPU) in ("plain", "batch_last")
    (path,) = cache.iterdir()
    assert 0.01 < json.loads(path.read_text())["time_ratio"] < 100


@pytest.mark.parametrize("fault", ["wrong", "wrong gradient", "no number", "failing"])
def test_kernels_that_are_wrong_or_fail_are_not_taken(cache, monkeypatch, fault):
    right = batch_last.forward

    def broken(block, x):
        if fault == "failing":
            raise CalledProcessError(1, "gcc")  # what Triton starts
        if fault == "wrong gradient":
            weight = block.mlp_channels.fc2.weight
            return right(block, x) + (0.01 * weight - 0.01 * weight.detach()).sum()
        return right(block, x) * (torch.nan if fault == "no number" else 1.01)

    monkeypatch.setattr(batch_last, "forward", broken)
    assert chosen() == "plain"


def test_a_wrong_gradient_of_few_numbers_is_noticed_in_bf16(cache, monkeypatch):
    right = batch_last.forward

    def broken(block, x):  # the bias' gradient is off by 96 %, that of all weights together by 3 %
        bias = block.norm1.bias
        return right(block, x) + (0.01 * bias - 0.01 * bias.detach()).sum()

    monkeypatch.setattr(batch_last, "forward", broken)
    assert chosen(("train.precision", "bf16")) == "plain"
    (path,) = cache.iterdir()
    assert json.loads(path.read_text())["time_ratio"] == float("inf")


def test_all_blocks_follow(alone):
    setting = recipe(("engine.memory_layout", "batch_last"))
    module = network(setting)
    assert set_memory_layout(module, setting.engine, setting.train, read_topology()) == "batch_last"
    assert all(block.batch_last for block in module.blocks)
    use_memory_layout(module, "plain")
    assert not any(block.batch_last for block in module.blocks)
    other = recipe(name="cifar10/sw_mlp")
    assert set_memory_layout(network(other), other.engine, other.train, read_topology()) is None


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "deepspeed 0", "deepspeed 1", "deepspeed 2"])
def test_the_hooks_of_engines_are_not_on_layers(alone, digits, monkeypatch, engine):
    computed, right = [], batch_last.forward
    monkeypatch.setattr(batch_last, "forward", lambda block, x: computed.append(block) or right(block, x))
    setting = Setting("rp_mixer", digits, *overrides_for(f"{engine} batch_last"))
    setting.run(setting.engine(), range(1))
    assert len(computed) == setting.recipe.model.depth * setting.recipe.train.grad_accum_steps


def test_tracers_see_the_blocks_as_they_are_written():
    setting = recipe()
    module = network(setting)
    use_memory_layout(module, "batch_last")
    x = torch.randn(2, 3, 8, 8)
    exported = torch.export.export(module, (x,))
    assert "layer_norm" in str(exported.graph)
    assert torch.allclose(exported.module()(x), module(x), atol=1e-5)


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

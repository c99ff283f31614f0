"""What a cluster can do, and what an engine sends over it: by data sheets, and each number by hand."""

import pytest

from tests.conftest import ROOT
from widemix.estimate.hardware import GPUS, Cluster, network_bandwidth
from widemix.estimate.network import Pass
from widemix.estimate.traffic import Ring, Traffic, exposed, step_traffic
from widemix.recipe import load_recipe
from widemix.recipe.sections import EngineSection

B16 = ROOT / "recipes/imagenet/mixer_b16.yaml"


def traffic_of(cluster, *overrides):
    """Of a network with 10^8 weights, none of them in its two blocks."""
    recipe = load_recipe(B16, overrides)
    network = Pass([], 0, weights=10**8, trained=10**8, blocks=2, in_blocks=0)
    return step_traffic(recipe.engine, recipe.train, network, cluster)


@pytest.mark.parametrize(("gpus", "hosts"), [(1, 1), (4, 1), (5, 2), (6, 2), (8, 2), (10, 3)])
def test_a_node_has_at_most_four_gpus_by_default(gpus, hosts):
    assert Cluster(gpus).hosts == hosts
    assert Cluster(gpus, nodes=1).hosts == 1
    assert (Cluster(gpus).local, Cluster(gpus, nodes=1).local) == (gpus // hosts, gpus)
    shared = [Cluster(gpus).sharers(kind, "hybrid") for kind in ("fsdp", "ddp", "deepspeed")]
    assert shared == [gpus // hosts, gpus, gpus]


def test_a_link_of_a_node_may_be_the_slowest():
    assert Cluster(8, "rtx3090", nodes=2, network="4xndr").bandwidth == 32e9  # PCIe, of 200 GB/s
    assert Cluster(8, "rtx3090", nodes=2, network="100").bandwidth == 12.5e9


def test_each_precision_has_the_peak_of_its_units():
    """By NVIDIA's data sheets, dense; without bf16 a V100 computes it in fp32."""
    peaks = {kind: [gpu.peak(each) / 1e12 for each in ("fp16", "bf16", "fp32")] for kind, gpu in GPUS.items()}
    assert peaks == {
        "v100": [125, 15.7, 15.7],
        "a100": [312, 312, 19.5],
        "h100": [989, 989, 67],
        "h200": [989, 989, 67],
        "rtx3090": [71, 71, 35.6],
    }
    memory = {kind: gpu.memory / 1e9 for kind, gpu in GPUS.items()}
    assert memory == {"v100": 32, "a100": 80, "h100": 80, "h200": 141, "rtx3090": 24}
    links = {kind: gpu.link / 1e9 for kind, gpu in GPUS.items()}  # of one direction
    assert links == {"v100": 300 / 2, "a100": 600 / 2, "h100": 900 / 2, "h200": 900 / 2, "rtx3090": 32}
    assert (GPUS["h100"].bandwidth, GPUS["h200"].bandwidth) == (3.35e12, 4.8e12)


def test_networks_by_name_by_adapters_and_by_number():
    for speed in (10, 25, 100, 400):
        assert network_bandwidth(f"{speed}gbe") == speed * 1e9 / 8
    assert network_bandwidth("xdr") == 2 * network_bandwidth("ndr") == 4 * network_bandwidth("hdr")
    for text, gigabits in (("hdr", 200), ("4xNDR", 1600), ("2xedr", 200), ("100", 100), ("2x12.5", 25)):
        assert network_bandwidth(text) == gigabits * 1e9 / 8


def test_a_ring_hides_what_it_moves_behind_the_backward_pass():
    sums = Traffic("all-reduce", 1e9, 10, Ring(128, 25e9), hidden=True)
    alone = 2 * 127 / 128 * 1e9 / 25e9 + 10 * 50e-6
    assert sums.seconds == pytest.approx(alone)
    assert sums._replace(ring=Ring(1, 25e9)).seconds == 0
    assert exposed([sums], backward=1) == pytest.approx(alone / 10)  # the last bucket
    assert exposed([sums], backward=alone / 2) == pytest.approx(alone / 2)
    gathers = Traffic("all-gather", 1e9, 1, Ring(2, 1e9), hidden=False)
    assert exposed([gathers], backward=1) == pytest.approx(0.5 + 50e-6)
    of_each = Traffic("all-gather", 4e9, 4 * 2, Ring(2, 1e9), hidden=True, times=4)
    one = 0.5 + 2 * 50e-6
    assert exposed([of_each], backward=0.4) == pytest.approx(3 * (one - 0.4) + one / 2)
    assert exposed([of_each], backward=0.1) == pytest.approx(4 * (one - 0.1))
    assert exposed([of_each, sums], backward=0.1) == pytest.approx(4 * (one - 0.1) + alone)
    assert exposed([of_each, sums], backward=1) == pytest.approx(one / 2 + alone / 10)


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_weights_are_gathered_in_the_precision_that_is_computed_in(precision, size):
    network = Pass([], 0, weights=1000, trained=600, blocks=2, in_blocks=900)
    zero = ("engine.kind", "deepspeed")
    for engine, elements in (
        ((("engine.kind", "fsdp"),), 1000 + 900),  # blocks once more for the backward pass
        ((zero, ("engine.zero_stage", "3")), 1000),
        ((zero, ("engine.zero_stage", "2")), 600),
    ):
        recipe = load_recipe(B16, [*engine, ("train.precision", precision)])
        traffic = step_traffic(recipe.engine, recipe.train, network, Cluster(4))
        assert [each.bytes for each in traffic if each.kind == "all-gather"] == [size * elements], engine


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "deepspeed"])
def test_a_ring_is_as_slow_as_what_is_between_nodes(kind):
    for nodes, speed in ((1, 300e9), (2, 12.5e9)):  # NVLink of A100s, 100 Gbit/s
        traffic = traffic_of(Cluster(8, nodes=nodes, network="edr"), ("engine.kind", kind))
        assert {each.ring for each in traffic} == {Ring(8, speed)}


def test_only_sums_of_hybrid_shards_pass_between_nodes():
    hybrid = ("engine.kind", "fsdp"), ("engine.sharding", "hybrid")
    within, between = Ring(4, 300e9), Ring(2, 12.5e9 / 4)
    traffic = traffic_of(Cluster(8, nodes=2, network="edr"), *hybrid)
    assert [each.ring for each in traffic] == [within, within, between]
    alone = traffic_of(Cluster(4), *hybrid)  # whose node has no other
    assert [(each.kind, each.ring) for each in alone] == [("all-gather", within), ("reduce-scatter", within)]


@pytest.mark.parametrize(("reduce_dtype", "reduced"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize(
    ("engine", "collectives"),
    [  # kind, bytes a weight, calls, whether hidden; in lists what each of three micro-batches has
        ({"kind": "ddp"}, [("all-reduce", "R", 12, True)]),
        ({"zero_stage": 0}, [("all-reduce", "R", 12, True)]),
        ({"zero_stage": 1}, [("all-reduce", "R", 12, True), ("all-gather", 2, 12, False)]),
        ({"zero_stage": 2}, [("all-reduce", ["R"], [12], True), ("all-gather", 2, 12, False)]),
        ({"zero_stage": 3}, [("all-gather", 2, 12, True), ("reduce-scatter", ["R"], [12], True)]),
        ({"zero_stage": 3, "overlap_comm": False},
         [("all-gather", 2, 12, False), ("reduce-scatter", ["R"], [12], False)]),
        ({"kind": "fsdp"}, [("all-gather", [3.8], [9], True), ("reduce-scatter", "R", 5, True)]),
        ({"kind": "fsdp", "sharding": "hybrid"},
         [("all-gather", [3.8], [9], True), ("reduce-scatter", "R", 5, True), ("all-reduce", "R/4", 5, True)]),
    ],
)  # fmt: skip
def test_each_engine_sends_what_its_collectives_have(engine, collectives, reduce_dtype, reduced):
    """Buckets of 2 MiB of gradients in fp32, a twelfth begun; R: the bytes that gradients are added up in."""
    weights = 11 * 2**19 + 1
    network = Pass([], 0, weights=weights, trained=weights, blocks=4, in_blocks=0.9 * weights)  # type: ignore[arg-type]
    values = {"kind": "deepspeed", "bucket_cap_mb": 2, "reduce_dtype": reduce_dtype, **engine}
    train = load_recipe(B16).train.model_copy(update={"grad_accum_steps": 3})
    found = step_traffic(EngineSection().model_copy(update=values), train, network, Cluster(8))
    sizes = {"R": reduced, "R/4": reduced / 4}
    for each, (kind, size, calls, hidden) in zip(found, collectives, strict=True):
        times, of_each, of_calls = (3, size[0], calls[0]) if isinstance(size, list) else (1, size, calls)
        assert (each.kind, each.calls, each.hidden, each.times) == (kind, times * of_calls, hidden, times)
        assert each.bytes == pytest.approx(times * sizes.get(of_each, of_each) * weights)

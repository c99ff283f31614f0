"""Keys that change how an engine works and not what it computes; DeepSpeed's own JSON; reproducible bits."""

import os
from dataclasses import replace

import pytest
import torch

from tests.conftest import ROOT
from tests.engine.ranks import FIXED, Setting, assert_same, overrides_for
from widemix.distributed.topology import Topology, read_topology
from widemix.engine import check_engine
from widemix.engine.deepspeed_config import deepspeed_config, import_deepspeed
from widemix.engine.interface import set_timeout
from widemix.engine.torch_engine import without_buffer_sync
from widemix.errors import InputError
from widemix.recipe import load_recipe

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("alone")]


@pytest.fixture(scope="module")
def reference(alone, digits):
    setting = Setting("mixer", digits)
    return setting.run(setting.engine())


@pytest.mark.long
def test_hybrid_sharding_computes_and_saves_what_one_rank_does(ranks, digits, reference):
    """Two nodes of two ranks."""
    found = ranks(4, "hybrid")
    assert found["losses"] == pytest.approx(reference, rel=1e-6)
    assert 0.49 < found["held"] < 0.6
    for kind in ("model", "optimizer", "ema"):
        assert_same(found["saved"][kind], found["state"][kind], kind)
    assert max(found["sizes"]) < 1.5 * min(found["sizes"])
    weights = sum(value.double().square().sum() for value in found["state"]["model"].values())
    assert found["norm"] == pytest.approx(weights.sqrt().item())


def test_hybrid_sharding_needs_nodes_of_one_size():
    recipe = load_recipe(ROOT / "recipes/digits/mixer.yaml", [*overrides_for("fsdp"), ("engine.sharding", "hybrid")])
    topology = Topology(0, 6, 0, 4, torch.device("cpu"))
    with pytest.raises(InputError, match="this node has 4 of 6"):
        check_engine(recipe.engine, recipe.optim, recipe.train, topology)
    for world, local_world in ((8, 4), (4, 4), (3, 1)):
        topology = Topology(0, world, 0, local_world, torch.device("cpu"))
        check_engine(recipe.engine, recipe.optim, recipe.train, topology)


@pytest.mark.long
@pytest.mark.parametrize("engine", FIXED)
def test_deterministic_runs_resume_bit_by_bit_on_three_ranks(ranks, engine):
    (losses, weights), (other_losses, other_weights) = ranks(3, "resumed")[engine]
    assert losses == other_losses
    assert_same(weights, other_weights)


def test_timeouts_and_buffer_sync_have_this_torchs_names(monkeypatch, system):
    given = []

    def note(timeout, group):
        given.append((timeout.total_seconds(), group))

    monkeypatch.setattr(torch.distributed, "set_timeout", note, raising=False)
    set_timeout(90, "group")
    monkeypatch.delattr(torch.distributed, "set_timeout")
    system({"torch.distributed.distributed_c10d._set_pg_timeout": note})
    set_timeout(3456, "other")
    assert given == [(90, "group"), (3456, "other")]

    def newer(self, module, broadcast_buffers=True, forward_sync_buffers=True):
        pass

    def older(self, module, broadcast_buffers=True):
        pass

    for constructor, name in ((newer, "forward_sync_buffers"), (older, "broadcast_buffers")):
        system({"torch.nn.parallel.DistributedDataParallel.__init__": constructor})
        assert without_buffer_sync() == {name: False}


@pytest.mark.parametrize(
    ("stage", "precision"), [*((stage, "fp32") for stage in range(4)), *((stage, "bf16") for stage in (1, 2, 3))]
)
def test_what_deepspeed_is_told_follows_from_the_recipe(stage, precision):
    """On four ranks of two nodes, in two micro-batches; without a file of its own."""
    keys = [*overrides_for(f"deepspeed {stage}"), ("train.precision", precision), ("train.grad_accum_steps", "2")]
    keys += [("engine.bucket_cap_mb", "3"), ("optim.clip_grad", "null")]
    keys += [("engine.reduce_dtype", "bf16")]
    keys += [("engine.cpu_offload", "true"), ("engine.overlap_comm", "false")] if stage else []
    recipe = load_recipe(ROOT / "recipes/digits/mixer.yaml", keys)
    topology = Topology(2, 4, 0, 2, torch.device("cpu"))
    found = deepspeed_config(recipe.engine, recipe.optim, recipe.train, topology)
    zero = {"stage": stage, "overlap_comm": False, "offload_optimizer": {"device": "cpu"}}
    zero |= dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), 3 * 2**20 // 4)
    assert found == {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 64 // 4 // 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": zero if stage else {"stage": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": False},
        "communication_data_type": "bf16",
        "data_types": {"grad_accum_dtype": precision},
        "steps_per_print": 1 << 62,
        "timers": {"throughput": {"enabled": stage == 3}},
    }


def test_no_kernel_of_deepspeeds_is_tried_or_built():
    deepspeed = import_deepspeed(read_topology())
    assert vars(deepspeed.ops)["__compatible_ops__"] == {"deepspeed_shm_comm": False}


def test_deepspeed_is_told_the_local_rank_unless_a_launcher_has(monkeypatch):
    topology = replace(read_topology(), local_rank=3)
    monkeypatch.setenv("LOCAL_RANK", "5")
    import_deepspeed(topology)
    assert os.environ["LOCAL_RANK"] == "5"
    monkeypatch.delenv("LOCAL_RANK")
    import_deepspeed(topology)
    assert os.environ["LOCAL_RANK"] == "3"

"""Other tools read our checkpoints, and we read theirs; and shards against gathered states."""

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from tests.engine.ranks import ENGINES, Setting, assert_same
from tests.run.saved import position
from widemix.engine import broadcasts_rank0_weights
from widemix.recipe.sections import EngineSection
from widemix.run import checkpoint
from widemix.training.finetune import load_init_weights

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("alone")]


@pytest.mark.parametrize("name", ENGINES)
def test_all_ranks_shards_are_the_gathered_state(ranks, name):
    saved, gathered, sizes = ranks(3, "shards")[name]
    assert saved["scalars"] == gathered["scalars"]
    for kind in ("model", "optimizer", "ema"):
        assert_same(saved[kind], gathered[kind], kind)
        assert len(saved[kind]) > 10
    assert max(sizes) < 1.5 * min(sizes)  # the ranks have about as much to write each


@pytest.mark.parametrize("kind", ["repmlp", "mixer"])
def test_fsdp_broadcasts_the_weights_of_rank_0(ranks, kind):
    found = ranks(2, "handed_out")[kind]
    assert found["had"] == [True, False]
    assert found["on_meta"] == {True}
    assert_same(found["saved"], found["initial"])
    for buffers in found["buffers"]:
        assert buffers
        for name, tensor in buffers.items():
            assert torch.equal(tensor, found["initial"][name])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_zero_to_fp32_finds_our_weights(ranks, digits, stage):
    theirs, ours = ranks(2, "deepspeeds_own")[stage]
    names = [name for name, _ in Setting("rp_mixer", digits, ("model.depth", "1")).model().named_parameters()]
    assert set(names) <= theirs.keys()
    for name in names:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.fixture(scope="module")
def saved(alone, digits, tmp_path_factory):
    """An engine with an average, and its checkpoint."""
    setting = Setting("mixer", digits, ("train.ema_decay", "0.9"))
    engine = setting.engine()
    setting.run(engine, range(2))
    state = engine.state()
    return checkpoint.save(tmp_path_factory.mktemp("run"), state, position(2), checkpoint.RetentionPolicy(1)), state


def test_torchs_distributed_checkpoint_reads_ours(saved):
    folder, state = saved
    for expected, place in ((state.model | state.optimizer, folder), (state.ema, folder / "ema")):
        wanted = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
        dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(place)))
        assert all(torch.equal(wanted[key], tensor) for key, tensor in expected.items())


def test_we_start_from_torchs_distributed_checkpoint(saved, digits, tmp_path):
    state = saved[1]
    writer = HuggingFaceStorageWriter(str(tmp_path / "theirs"), dict.fromkeys(state.model, 1))
    dcp.save(dict(state.model), storage_writer=writer)
    (single,) = (tmp_path / "theirs").glob("*.safetensors")
    shutil.copy(single, tmp_path / "weights.safetensors")
    model = Setting("mixer", digits).model()
    load_init_weights(model, str(tmp_path / "weights.safetensors"))
    assert all(torch.equal(tensor, state.model[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("keys", "broadcasts"),
    [
        ({"kind": "ddp"}, False),
        ({"kind": "fsdp"}, True),
        ({"kind": "fsdp", "cpu_offload": True}, False),
        ({"kind": "deepspeed", "zero_stage": 3}, False),
    ],
)
def test_only_fsdp_on_the_device_broadcasts_weights(keys, broadcasts):
    assert broadcasts_rank0_weights(EngineSection(**keys)) is broadcasts

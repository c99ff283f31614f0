"""Every key of section `engine` reaches torch or DeepSpeed, with a value that is not its default.

What the keys change over several ranks: test_tuning.py, test_reduction.py, test_states.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.engine.ranks import Setting
from widemix.distributed.topology import Topology
from widemix.engine import fsdp
from widemix.recipe.sections import EngineSection

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("alone")]

FSDP = (("engine.kind", "fsdp"),)
ZERO_1 = (("engine.kind", "deepspeed"),)
ZERO_3 = (*ZERO_1, ("engine.zero_stage", "3"))


def of_engine(read: Callable[[Any], Any]) -> Callable[[Setting], Any]:
    return lambda setting: read(setting.engine())


def rounded(setting: Setting) -> bool:
    """Whether the gradients that the optimizer gets are numbers of bf16."""
    engine, found = setting.engine(), []
    step = engine.optimizer.step

    def watched() -> None:
        gradients = [getattr(t.grad, "_local_tensor", t.grad) for t in engine.optimizer_tensors()]
        found.extend(torch.equal(gradient, gradient.bfloat16().float()) for gradient in gradients)
        step()

    engine.optimizer.step = watched
    setting.run(engine, range(1))
    return all(found)


def offloaded(engine: Any) -> bool:
    return fully_shard.state(engine.module)._fsdp_param_group.fsdp_params[0].offload_to_cpu


class FakeMesh:
    """Of four ranks on two nodes, for FSDP, which is not built: it stops at `mesh.size`."""

    groups = ("nodes", "ranks")

    def get_all_groups(self) -> tuple[str, ...]:
        return self.groups

    def size(self, dimension: int) -> int:
        raise StopIteration


def mesh_and_timeouts(setting: Setting) -> tuple[Any, list[Any]]:
    """The mesh that FSDP asks for on two nodes of two ranks, and the timeouts of its groups."""
    shapes, timeouts = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "init_device_mesh", lambda _, shape, **__: shapes.append(shape) or FakeMesh())
        patch.setattr(fsdp, "set_timeout", lambda seconds, group: timeouts.append((seconds, group)))
        recipe, topology = setting.recipe, Topology(0, 4, 0, 2, torch.device("cpu"))
        with pytest.raises(StopIteration):
            fsdp.FSDPEngine(setting.model(), recipe.engine, recipe.optim, recipe.train, topology)
    return shapes, timeouts


def zero_timeout(engine: Any) -> float:
    group = engine.engine.data_parallel_group
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


HYBRID = (*FSDP, ("engine.sharding", "hybrid"))
# A key, its value, and what is seen of an engine with it, which is not seen without; and other keys of both.
ROWS: list[tuple[str, str, Callable[[Setting], Any], Any, tuple[tuple[str, str], ...]]] = [
    ("kind", "fsdp", of_engine(lambda e: {type(p) for p in e.parameters.values()} == {DTensor}), True, ()),
    ("kind", "deepspeed", of_engine(lambda e: e.config is not None), True, ()),
    ("zero_stage", "3", of_engine(lambda e: e.engine.zero_optimization_stage()), 3, ZERO_1),
    ("cpu_offload", "true", of_engine(offloaded), True, FSDP),
    ("cpu_offload", "true", of_engine(lambda e: e.zero.cpu_offload), True, ZERO_1),
    ("deepspeed_config", "DS.json", of_engine(lambda e: e.zero.round_robin_gradients), True, ZERO_1),
    ("sharding", "hybrid", mesh_and_timeouts, ([(2, 2)], [(1800, "nodes"), (1800, "ranks")]), FSDP),
    ("bucket_cap_mb", "1", of_engine(lambda e: e.model.bucket_bytes_cap), 2**20, ()),
    ("gradient_as_bucket_view", "false", of_engine(lambda e: e.model.gradient_as_bucket_view), False, ()),
    ("static_graph", "true", of_engine(lambda e: e.model.static_graph), True, ()),
    ("reduce_dtype", "bf16", rounded, True, ()),
    ("reduce_dtype", "bf16", rounded, True, FSDP),
    ("memory_layout", "batch_last", of_engine(lambda e: [b.batch_last for b in e.module.blocks]), [True] * 2, ()),
    ("overlap_comm", "false", of_engine(lambda e: e.engine.zero_overlap_comm()), False, ZERO_3),
    *(("timeout_s", "3456", of_engine(zero_timeout), 3456, (*ZERO_1, ("engine.zero_stage", n))) for n in "0123"),
    ("timeout_s", "3456", mesh_and_timeouts, ([(2, 2)], [(3456, "nodes"), (3456, "ranks")]), HYBRID),
]


@pytest.mark.parametrize(("key", "value", "seen", "expected", "others"), ROWS, ids=[row[0] for row in ROWS])
def test_a_key_reaches_what_it_is_for(key, value, seen, expected, others, digits, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"round_robin_gradients": true, "stage": "auto"}}')
    assert seen(Setting("mixer", digits, *others, (f"engine.{key}", value.replace("DS.json", str(path))))) == expected
    assert seen(Setting("mixer", digits, *others)) != expected


def test_ddps_buckets_are_torchs_by_default(digits):
    """Of which the first is of 1 MB."""
    model = Setting("mixer", digits).engine().model
    assert (model.bucket_bytes_cap, model.bucket_bytes_cap_default) == (25 * 2**20, True)


def test_the_table_has_every_key():
    assert {key for key, *_ in ROWS} == set(EngineSection.model_fields)

"""Section `engine`: how a step is computed on many ranks."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from widemix.section import Positive, Seconds, Section, key


def _no_bool(value: Any) -> Any:
    """Refuse true, which is equal to 1."""
    if isinstance(value, bool):
        raise ValueError("input should be 0, 1, 2 or 3")
    return value


class EngineSection(Section):
    """The engine that runs a training step on many ranks, and its options."""

    kind: Literal["ddp", "fsdp", "deepspeed"] = key(
        "ddp", "ddp: a replica on each rank; fsdp: sharded by block (FSDP2); deepspeed: ZeRO"
    )
    zero_stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_no_bool)] = key(
        1, "deepspeed: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also weights"
    )
    cpu_offload: bool = key(False, "fsdp, ZeRO 1 to 3: keep the optimizer state in host memory, fsdp also the shards")
    deepspeed_config: str | None = key(
        None, "a DeepSpeed JSON for settings that recipes have no key for; contradicting the recipe is an error"
    )
    sharding: Literal["full", "hybrid"] = key(
        "full", "fsdp: shards over all ranks; hybrid: over the ranks of a node, and every node has all shards"
    )
    bucket_cap_mb: Positive = key(25, "bucket size of ddp and ZeRO, in MB of gradients")
    gradient_as_bucket_view: bool = key(True, "ddp: gradients are views of the buckets, which saves a copy of them")
    static_graph: bool = key(False, "ddp: every step uses the same parameters in the same order")
    reduce_dtype: Literal["fp32", "bf16"] = key(
        "fp32", "dtype in which gradients are summed over ranks; with ZeRO also over micro-batches"
    )
    memory_layout: Literal["auto", "plain", "batch_last"] = key(
        "auto",
        "memory layout of the blocks of Mixers in training: plain: as written; batch_last: the images next to each "
        "other in memory, where permutations move whole rows; auto: the faster, timed at the start; plain if "
        "deterministic",
    )
    overlap_comm: bool = key(True, "ZeRO: communicate during the backward pass")
    timeout_s: Seconds = key(1800, "timeout of collectives, in seconds")

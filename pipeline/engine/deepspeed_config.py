"""DeepSpeed's configuration: what the recipe implies, with the JSON file of `engine.deepspeed_config` merged in."""

import difflib
import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.files import parse_json, read_regular
from widemix.optim.section import OptimSection
from widemix.recipe.sections import EngineSection, TrainSection

# Keys of DeepSpeed that have a place in the recipe, and that place.
_OURS = {"optimizer": "optim", "scheduler": "schedule", "amp": "train.precision", "torch_autocast": "train.precision"}
_OF_ALL_RANKS = ("train_batch_size", "gradient_accumulation_steps")


def deepspeed_config(
    engine: EngineSection, optim: OptimSection, train: TrainSection, topology: Topology
) -> dict[str, Any]:
    """The whole configuration, as `deepspeed.initialize` takes it.

    `InputError` where the file of `engine.deepspeed_config` contradicts the recipe, or DeepSpeed does not know a key.
    """
    config: dict[str, Any] = {
        "train_batch_size": train.global_batch,
        "train_micro_batch_size_per_gpu": train.micro_batch_size(topology.world),
        "gradient_accumulation_steps": train.grad_accum_steps,
        "gradient_clipping": optim.clip_grad or 0.0,
        "zero_optimization": _zero(engine),
        "zero_allow_untested_optimizer": True,  # such as torch's AdamW and SGD
        "zero_force_ds_cpu_optimizer": False,  # offloaded, torch's optimizers run on the CPU
        "bf16": {"enabled": train.precision == "bf16"},
        "fp16": {"enabled": train.precision == "fp16"},
        "communication_data_type": engine.reduce_dtype,
        "data_types": {"grad_accum_dtype": "fp32" if train.precision == "fp32" else engine.reduce_dtype},
        "steps_per_print": 1 << 62,
        # For this it waits for the GPU twice a step. Stage 3, which waits anyway, may need it: the stream on which it
        # gathers weights does not wait for the optimizer.
        "timers": {"throughput": {"enabled": engine.zero_stage == 3}},
    }
    if engine.deepspeed_config is None:
        return config
    path = Path(engine.deepspeed_config)
    theirs = _read(path)
    for key, section in _OURS.items():
        if key in theirs:
            raise InputError(f"{path}: {key} is set by the recipe, in {section}; remove it")
    merged = _merged(config, theirs, path)
    import_deepspeed(topology)
    _check(merged, theirs, path)
    return merged


def _check(merged: dict[str, Any], theirs: dict[str, Any], path: Path) -> None:
    """`InputError` for what DeepSpeed would refuse with a traceback, or ignore: sections that it does not know."""
    from deepspeed.runtime import constants
    from deepspeed.runtime.config import DeepSpeedConfig

    known = merged.keys() - theirs.keys() | {name for name in vars(constants).values() if isinstance(name, str)}
    for key in theirs.keys() - known:
        if close := difflib.get_close_matches(key, known, n=1, cutoff=0.8):
            raise InputError(f"{path}: unknown key {key}; did you mean {close[0]}?")
    try:  # without the numbers that depend on the world size
        DeepSpeedConfig({key: value for key, value in merged.items() if key not in _OF_ALL_RANKS})
    except ValidationError as error:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"]]
        section = [key for key, value in theirs.items() if isinstance(value, dict) and place and place[0] in value]
        raise InputError(f"{path}: {'.'.join([*section[:1], *place])}: {first['msg']}") from None
    except (AssertionError, AttributeError, TypeError, ValueError) as error:  # a list where it wants an object, ...
        raise InputError(f"{path}: DeepSpeed refuses it ({error})") from None


def _zero(engine: EngineSection) -> dict[str, Any]:
    if engine.zero_stage == 0:
        return {"stage": 0}
    elements = engine.bucket_cap_mb * 2**20 // 4
    zero = {
        "stage": engine.zero_stage,
        "overlap_comm": engine.overlap_comm,
        "reduce_bucket_size": elements,
        "allgather_bucket_size": elements,
    }
    return zero | ({"offload_optimizer": {"device": "cpu"}} if engine.cpu_offload else {})


def _read(path: Path) -> dict[str, Any]:
    try:
        theirs = parse_json(read_regular(path))
    except OSError as error:
        raise InputError(f"engine.deepspeed_config {path}: cannot be read ({error.strerror})") from None
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"engine.deepspeed_config {path}: is not JSON ({error})") from None
    if not isinstance(theirs, dict):
        raise InputError(f"engine.deepspeed_config {path}: is not a JSON object")
    return theirs


def _merged(ours: dict[str, Any], theirs: dict[str, Any], path: Path, above: str = "") -> dict[str, Any]:
    merged = dict(ours)
    for key, value in theirs.items():
        name = f"{above}{key}"
        if isinstance(value, dict) and isinstance(ours.get(key, {}), dict):
            merged[key] = _merged(ours.get(key, {}), value, path, f"{name}.")
        elif key in ours and value not in (ours[key], "auto"):
            raise InputError(f"{path}: {name} {json.dumps(value)}, but the recipe says {json.dumps(ours[key])}")
        elif key not in ours:
            merged[key] = value
    return merged


def import_deepspeed(topology: Topology) -> Any:
    """The imported module, without its compilations of a minute: torch's optimizers and collectives are used."""
    os.environ.setdefault("LOCAL_RANK", str(topology.local_rank))  # DeepSpeed requires it
    os.environ.setdefault("DS_ACCELERATOR", topology.device.type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own deprecations
        import deepspeed
        import deepspeed.ops
        from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # Asked for, this table has a compiler try each of DeepSpeed's kernels, in every rank.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    return deepspeed

"""Starting from trained weights: with a new head, for larger images, with frozen parameters."""

from collections.abc import Mapping, Sequence, Set
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import shorten
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call

from widemix.engine.batch_norm import freeze_batch_norms
from widemix.errors import InputError
from widemix.models.hub import WEIGHTS, timm_name
from widemix.models.registry import classifier
from widemix.models.timm_registry import load_pretrained
from widemix.run import checkpoint

Weights = Mapping[str, torch.Tensor]
BODY = "body"  # of train.freeze: all parameters but the head's
UNUSED = "unused"  # of train.freeze: what the network has and does not use
_TORCH_MAGIC = (b"PK\x03\x04", b"\x80\x02\x8a\n")  # of files of torch.save: zip archives, before 1.6 pickles


def load_init_weights(module: nn.Module, source: str, reset_head: bool = False) -> list[str]:
    """Load the weights that `train.init_from` names into a newly initialised model; return the changes as text.

    `source` is a widemix run or checkpoint (its averaged weights if it has them), a .safetensors file, a folder with
    a model.safetensors (as `widemix export`, timm and DeepSpeed's zero_to_fp32 write), a state_dict written by
    torch.save, a checkpoint of timm's training script, timm:NAME for timm's pretrained weights, or hf:OWNER/NAME
    for those of a network on the Hugging Face Hub; a published file whose names a network knows (`from_published`).
    A head for other classes keeps its new weights, with `reset_head` every head does, and the source may have none; a
    Mixer for larger images is grown. `InputError` if the weights cannot be read or do not fit the model.
    """
    published = getattr(module, "from_published", lambda weights: weights)
    weights, changes = dict(published(_read(source))), []
    if small := _smaller(module, weights, source):
        network, factor, method = small
        _load(network, weights, source)
        weights = dict(network.grown(factor, method).state_dict())
        changes.append(f"grown {factor} x {factor} times by {method}")
    wanted, head = module.state_dict(), _head(module, "train.init_from")
    for name in sorted(head):
        if reset_head or (name in weights and weights[name].shape != wanted[name].shape):
            changes.append(f"{name} newly initialised for {len(wanted[name])} classes")
            weights[name] = wanted[name]
    _load(module, weights, source)
    return changes


def _load(module: nn.Module, weights: Weights, source: str) -> None:
    """Load weights into a module; `InputError` names the first whose name or shape differs.

    A tensor with several names, of tied weights, needs one of them: safetensors' `save_model` keeps one.
    """
    wanted = module.state_dict(keep_vars=True)
    tied = {id(wanted[name]): weights[name] for name in wanted.keys() & weights.keys()}
    others = {name: tied[id(own)] for name, own in wanted.items() if id(own) in tied and name not in weights}
    weights = {**weights, **others}
    missing, unknown = wanted.keys() - weights.keys(), weights.keys() - wanted.keys()
    if missing or unknown:
        what = f"has no {min(missing)}" if missing else f"has {min(unknown)}, which the model does not have"
        raise InputError(f"train.init_from {source}: {what}; use the model that it was trained with")
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            loaded, expected = list(tensor.shape), list(wanted[name].shape)
            raise InputError(
                f"train.init_from {source}: {name} has shape {loaded} there, {expected} in the recipe's model"
            )
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise InputError(f"train.init_from {source}: {name} has values that are not finite; the training failed")
    module.load_state_dict(weights)
    try:
        check_indices(module)
    except ValueError as error:
        raise InputError(f"train.init_from {source}: {error}") from None


def check_indices(module: nn.Module) -> None:
    """ValueError where a module's indices, such as a permutation, are none: they would read any memory."""
    for name, part in module.named_modules():
        check = getattr(part, "check_indices", None)
        if check is not None:
            try:
                check()
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None


def freeze(module: nn.Module, patterns: Sequence[str], unused: Set[str] = frozenset()) -> int:
    """Exclude the parameters whose names match a pattern (`stem.*`) from training; return their number of weights.

    The pattern `body` matches all but the head, whatever its name, and `unused` the names in `unused`. Batch norms
    whose parameters are all frozen keep their running statistics and normalise by them. `InputError` if a pattern
    matches no parameter, or if nothing is left to train.
    """
    names = [name for name, _ in module.named_parameters()]
    head = _head(module, "train.freeze body") if BODY in patterns else set()

    def matches(name: str, pattern: str) -> bool:
        if pattern in (BODY, UNUSED):
            return name in unused if pattern == UNUSED else name not in head
        return fnmatchcase(name, pattern)

    for pattern in patterns:
        if pattern == UNUSED and not unused:
            raise InputError("train.freeze unused: the network uses all of its parameters; leave it out")
        if not any(matches(name, pattern) for name in names):
            raise InputError(
                f"train.freeze {pattern}: matches no parameter; their names are {', '.join(names[:3])}, ..."
            )
    frozen = [p for name, p in module.named_parameters() if any(matches(name, each) for each in patterns)]
    if len(frozen) == len(names):
        raise InputError(f"train.freeze {', '.join(patterns)}: leaves nothing to train")
    for parameter in frozen:
        parameter.requires_grad_(False)
    freeze_batch_norms(module)
    return sum(p.numel() for p in frozen)


def unused_parameters(module: nn.Module, inputs: Tensor) -> set[str]:
    """Names of the parameters that have no part in what `module` computes of `inputs` in training.

    It is computed on the meta device, without numbers, or with them where the network needs them. `module`, and
    torch's generators of random numbers, stay as they are.
    """
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    trained = module.training
    module.train()
    try:
        with torch.random.fork_rng():
            try:
                return _unreached(module, _on_meta(parameters), _on_meta(buffers), inputs.to("meta"))
            except (RuntimeError, ValueError):  # it looks at numbers, or has tensors that are no parameters
                copies = {name: buffer.clone() for name, buffer in buffers.items()}
                return _unreached(module, parameters, copies, inputs)
    finally:
        module.train(trained)


def _on_meta(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("meta").requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()}


def _unreached(
    module: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Tensor
) -> set[str]:
    with torch.enable_grad():
        output = functional_call(module, {**parameters, **buffers}, (inputs,))
    nodes, reached = [output.grad_fn], set()
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        reached.add(id(getattr(node, "variable", None)))
        following = {parent for parent, _ in getattr(node, "next_functions", ())} - seen - {None}
        seen |= following
        nodes += following
    return {name for name, tensor in parameters.items() if tensor.requires_grad and id(tensor) not in reached}


def _read(source: str) -> Weights:
    if known_to_timm := timm_name(source):
        return load_pretrained(known_to_timm, f"train.init_from {source}").state_dict()
    path = Path(source)
    single = path / "model.safetensors" if path.is_dir() and not (path / checkpoint.COMPLETE).exists() else path
    if not single.is_file():  # a run or a checkpoint
        try:
            state = checkpoint.find(path).load()
        except InputError as error:
            raise InputError(f"train.init_from {error}; {WEIGHTS}") from None
        return state.ema or state.model
    try:
        with single.open("rb") as file:
            saved_by_torch = file.read(4) in _TORCH_MAGIC
        return _read_torch(single) if saved_by_torch else load_file(single)
    except (OSError, SafetensorError) as error:
        raise InputError(f"train.init_from {single}: is damaged, or not a safetensors file ({error})") from None


def _read_torch(path: Path) -> Weights:
    """Read a file of torch.save, of timm's checkpoints the averaged weights; no code in the pickle is executed."""
    try:
        weights = timm.models.load_state_dict(str(path), weights_only=True)
    except Exception as error:  # the unpickler raises errors of any kind
        reason = shorten(str(error).partition(". ")[0] or type(error).__name__, 120, placeholder=" ...")
        raise InputError(
            f"train.init_from {path}: is damaged, or holds more than a state_dict of weights ({reason})"
        ) from None
    others = [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise InputError(f"train.init_from {path}: {others[0]} is not a tensor; save the model's state_dict alone")
    return weights


def _head(module: nn.Module, key: str) -> set[str]:
    """The names of the head's parameters, also those under which the rest of the network shares them."""
    parameters = {id(p) for p in classifier(module, key).parameters()}
    return {name for name, p in module.named_parameters(remove_duplicate=False) if id(p) in parameters}


def _smaller(module: nn.Module, weights: Weights, source: str) -> Any:
    """Return the answer of `smaller_for` of a network that can be grown (`widemix.models.mixer`); None for others."""
    try:
        return getattr(module, "smaller_for", lambda weights: None)(weights)
    except ValueError as error:
        raise InputError(f"train.init_from {source}: {error}") from None

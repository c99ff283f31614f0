"""Starting from weights trained before: with another head, for larger pictures, with some of them frozen."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, cast

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from pipeline.errors import InputError
from pipeline.models.grow import grow
from pipeline.models.mixer import Mixer
from pipeline.run import checkpoint

Weights = Mapping[str, torch.Tensor]
_TIMM = "timm:"
_TORCH = (b"PK\x03\x04", b"\x80\x02\x8a\n")  # how files of torch.save begin: zip archives, before 1.6 pickles


def start_from(module: nn.Module, source: str) -> list[str]:
    """Load the weights that `train.init_from` names into a freshly drawn network; what had to be changed, in words.

    `source` is a run or checkpoint of ours (its averaged weights where it has them), a .safetensors file, a folder
    with a model.safetensors (as `widemix export`, timm and DeepSpeed's zero_to_fp32 write), what torch.save wrote of
    a state_dict or timm's training of a model, or timm:NAME for timm's own pretrained weights.
    """
    weights, told = dict(_read(source)), []
    if isinstance(module, Mixer):
        factor = _times_as_large(module, weights, source)
        if factor > 1:
            method = _method(module, weights, factor, source)
            weights = _grown(module, weights, factor, method, source)
            told.append(f"grown {factor} x {factor} times by {method}")
    wanted, head = module.state_dict(), _head(module)
    for name in head:
        if name in weights and name in wanted and weights[name].shape != wanted[name].shape:
            told.append(f"{name} drawn anew for {len(wanted[name])} classes")
            weights[name] = wanted[name]
    _load(module, weights, source)
    return told


def _load(module: nn.Module, weights: Weights, source: str) -> None:
    """All of them into a module that has the same; `InputError` names the first that differs."""
    wanted = module.state_dict()
    missing, unknown = wanted.keys() - weights.keys(), weights.keys() - wanted.keys()
    if missing or unknown:
        what = f"has no {min(missing)}" if missing else f"has {min(unknown)}, which the model has not"
        raise InputError(f"train.init_from {source}: {what}; take the model that it was trained with")
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            theirs, ours = list(tensor.shape), list(wanted[name].shape)
            raise InputError(f"train.init_from {source}: {name} is {theirs} there, {ours} in the recipe's model")
    module.load_state_dict(weights)


def freeze(module: nn.Module, patterns: Sequence[str]) -> int:
    """Parameters whose names match a pattern (`stem.*`) are trained no more; how many weights that are."""
    names = [name for name, _ in module.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"train.freeze {pattern}: matches no parameter; they are called {', '.join(names[:3])}, ..."
            )
    frozen = [p for name, p in module.named_parameters() if any(fnmatchcase(name, each) for each in patterns)]
    if len(frozen) == len(names):
        raise InputError(f"train.freeze {', '.join(patterns)}: leaves nothing to train")
    for parameter in frozen:
        parameter.requires_grad_(False)
    return sum(p.numel() for p in frozen)


def _read(source: str) -> Weights:
    if source.startswith(_TIMM):
        return _of_timm(source.removeprefix(_TIMM))
    path = Path(source)
    single = path / "model.safetensors" if path.is_dir() and not (path / checkpoint.MARK).exists() else path
    if not single.is_file():  # a run or a checkpoint
        try:
            state = checkpoint.find(path).load()
        except InputError as error:
            raise InputError(f"train.init_from {error}; a weights file or timm:NAME would do too") from None
        return state.ema or state.model
    try:
        with single.open("rb") as file:
            saved_by_torch = file.read(4) in _TORCH
        return _of_torch(single) if saved_by_torch else load_file(single)
    except (OSError, SafetensorError) as error:
        raise InputError(f"train.init_from {single}: is no safetensors file ({error})") from None


def _of_torch(path: Path) -> Weights:
    """Weights that torch.save wrote, the averaged ones of timm's checkpoints; nothing that it holds is ever run."""
    try:
        found = timm.models.load_state_dict(str(path), weights_only=True)
    except Exception as error:  # whatever the unpickler makes of a file that is not one
        reason = shorten(str(error) or type(error).__name__, 200, placeholder=" ...")
        raise InputError(
            f"train.init_from {path}: is damaged, or no state_dict but more than weights ({reason})"
        ) from None
    others = [name for name, value in found.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise InputError(f"train.init_from {path}: {others[0]} is no tensor; save the model's state_dict alone")
    return found


def _of_timm(name: str) -> Weights:
    try:
        return timm.create_model(name, pretrained=True).state_dict()
    except (RuntimeError, OSError, ValueError) as error:
        raise InputError(f"train.init_from timm:{name}: cannot be loaded ({str(error).splitlines()[0]})") from None


def _head(module: nn.Module) -> set[str]:
    network: Any = module  # all of ours have timm's methods
    parameters = {id(p) for p in network.get_classifier().parameters()}
    return {name for name, p in module.named_parameters() if id(p) in parameters}


def _tokens(weights: Weights) -> int:
    """Of the picture, S0: what the first layer along the tokens reads."""
    names = ("blocks.0.skip.fc.weight", "blocks.0.mlp_tokens.fc1.weight", "blocks.0.mlp_tokens.fc.weight")
    return next((weights[name].shape[1] for name in names if name in weights), 0)


def _times_as_large(module: Mixer, weights: Weights, source: str) -> int:
    """K of a module whose pictures are K times as high and wide as those of the weights."""
    wanted, stem = module.state_dict(), "stem.proj.weight"
    ours, theirs = _tokens(wanted), _tokens(weights)
    if not theirs or stem not in weights or weights[stem].shape != wanted[stem].shape:
        return 1  # not a Mixer's, or with other patches
    factor = math.isqrt(ours // theirs)
    if factor**2 * theirs != ours:
        raise InputError(
            f"train.init_from {source}: reads pictures of {theirs} tokens, the recipe's are {ours}; "
            f"they may be 2, 3, ... times as high and wide, with {4 * theirs}, {9 * theirs}, ... tokens"
        )
    return factor


def _method(module: Mixer, weights: Weights, factor: int, source: str) -> Literal["copies", "bilinear"]:
    """How the hidden widths of token mixing, D_S, must have been meant to grow."""
    hidden, name = module.shape.token_hidden, "blocks.0.mlp_tokens.fc1.weight"
    if hidden is None or name not in weights:
        return "copies"
    theirs = weights[name].shape[0]
    if hidden not in (theirs, theirs * factor**2):
        raise InputError(
            f"train.init_from {source}: its D_S is {theirs}, the recipe's {hidden}; model.token_hidden "
            f"{theirs * factor**2} grows it by block-diagonal copies, {theirs} bilinearly"
        )
    return "bilinear" if hidden == theirs else "copies"


def _grown(module: Mixer, weights: dict, factor: int, method: Literal["copies", "bilinear"], source: str) -> dict:
    """The weights of a network for smaller pictures, grown."""
    shape, parts = module.shape, factor**2
    if method == "copies":
        hidden = None if shape.token_hidden is None else shape.token_hidden // parts
        tokens = None if shape.tokens is None else shape.tokens // parts
        shape = replace(shape, token_hidden=hidden, tokens=tokens)
    side, patch = cast(tuple[int, int], module.stem.img_size)[0], module.stem.patch_size[0]
    classes = len(weights["head.bias"]) if "head.bias" in weights else module.num_classes
    small = Mixer(img_size=side // factor, patch_size=patch, num_classes=classes, **vars(shape))
    _load(small, weights, source)
    return dict(grow(small, factor, method).state_dict())

"""timm's optimizers, as `optim.name: timm:NAME`. What checkpoints need to know of one is found by trying it."""

import difflib
import functools
import math
import warnings
from typing import Any

import torch
from timm.optim import get_optimizer_class, get_optimizer_info, list_optimizers

from widemix.errors import InputError
from widemix.optim.spec import Groups, OptimizerSpec

# Those that compute each weight's step from its own gradients alone, so that ZeRO may cut parameters into slices.
ELEMENTWISE = frozenset(
    {"adadelta", "adagrad", "adam", "adamax", "adamw", "adan", "adanw", "adopt", "adoptw", "lion", "nadamw", "radam"}
    | {"radamw", "rmsprop", "rmsproptf", "sgd", "nesterov", "momentum"}
)
_STEPS = 3
# Of biases, matrices and convolutions, also so large that an optimizer may keep rows and columns in their place.
_SHAPES = [(8,), (2, 4), (256,), (160, 144), (48, 36, 3, 3)]


@functools.cache
def timm_spec(name: str) -> OptimizerSpec:
    """Return the entry of timm's optimizer; ValueError where there is none, or checkpoints cannot hold its state."""
    if name not in list_optimizers():
        close = difflib.get_close_matches(name, list_optimizers(), n=1)
        raise ValueError(f"timm has no such optimizer{f'; did you mean timm:{close[0]}?' if close else ''}")
    for shapes in (_SHAPES[:2], _SHAPES):  # small ones first: with all of them Kron, which they refuse, takes minutes
        try:
            optimizer = tried(name, shapes)
        except (RuntimeError, AssertionError) as error:  # it needs a GPU or the graph of the gradients
            raise ValueError(f"timm's optimizer cannot be tried here ({error})") from None
        for weight in optimizer.param_groups[0]["params"]:
            states = optimizer.state[weight]
            others = [
                kind for kind, value in states.items() if getattr(value, "shape", None) != _kept_shape(kind, weight)
            ]
            if others:
                raise ValueError(f"timm's optimizer keeps {', '.join(others)} in a form that checkpoints do not hold")
    before, after = _build(name, _groups(_SHAPES), {"lr": 0.1}).param_groups[0], optimizer.param_groups[0]
    counters = [key for key, value in after.items() if key != "params" and value != before.get(key)]
    # Those that come with the first step, and are plain numbers: a checkpoint's would otherwise become a tensor.
    zeros = dict.fromkeys((key for key in counters if key not in before and isinstance(after[key], int)), 0)

    def build(groups: Groups, section: Any) -> torch.optim.Optimizer:
        try:
            built = _build(name, groups, _options(name, section))
        except ValueError as error:
            raise InputError(f"optim.name timm:{name}: does not take the other values of optim ({error})") from None
        for group in built.param_groups:
            group.update(zeros)
        return built

    return OptimizerSpec(
        build,
        f"timm's {name}",
        states=sum(value.ndim > 0 for value in states.values()),
        needs_whole=None if name in ELEMENTWISE else "more than each weight's own gradient, perhaps",
        group_counters=tuple(counters),
    )


def _kept_shape(kind: str, weight: torch.Tensor) -> torch.Size:
    """The shape that checkpoints keep of a tensor of the optimizer's state."""
    return torch.Size() if kind == "step" else weight.shape


def tried(name: str, shapes: list[tuple[int, ...]]) -> torch.optim.Optimizer:
    """Return the optimizer of parameters of these shapes, after some steps."""
    numbers, groups = torch.Generator("cpu").manual_seed(0), _groups(shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Kron advises to install a package
        optimizer, sizes = _build(name, groups, {"lr": 0.1}), [math.prod(shape) for shape in shapes]
    for _ in range(_STEPS):
        gradients = torch.randn(sum(sizes), generator=numbers, dtype=torch.float32, device="cpu").split(sizes)
        for parameter, gradient in zip(groups[0]["params"], gradients, strict=True):
            parameter.grad = gradient.view(parameter.shape)
        with torch.compiler.set_stance("force_eager"):  # Kron's step would be compiled, which takes minutes
            optimizer.step()
    return optimizer


def _groups(shapes: list[tuple[int, ...]]) -> Groups:
    sizes = [math.prod(shape) for shape in shapes]
    weights = torch.arange(1.0, 1 + sum(sizes), dtype=torch.float32, device="cpu").split(sizes)
    parts = zip(weights, shapes, strict=True)
    return [{"params": [torch.nn.Parameter(part.clone().view(shape)) for part, shape in parts], "weight_decay": 0.1}]


def _options(name: str, section: Any) -> dict[str, Any]:
    """Those of the section's values that the optimizer takes."""
    info = get_optimizer_info(name)
    options: dict[str, Any] = {"lr": section.lr}
    if info.has_betas and info.num_betas == 2:
        options["betas"] = section.betas
    if info.has_eps:
        options["eps"] = section.eps
    if info.has_momentum:
        options["momentum"] = section.momentum
    return options


def _build(name: str, groups: Groups, options: dict[str, Any]) -> torch.optim.Optimizer:
    if get_optimizer_info(name).has_momentum:
        options = {"momentum": 0.9, **options}
    make: Any = get_optimizer_class(name, bind_defaults=True)
    built: torch.optim.Optimizer = make(groups, **options)
    return built

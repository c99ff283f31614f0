"""One rank's forward and backward pass on fake tensors: memory, products and traffic, and a roofline of the time."""

from typing import NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pipeline.engine.loss import DTYPES, LOSSES, autocast
from pipeline.estimate.fake import MemoryTracker, Work, fake_inputs, fake_mode, fake_network
from pipeline.estimate.hardware import Gpu
from pipeline.recipe import Recipe


class Pass(NamedTuple):
    """Of one micro-batch on one rank."""

    operators: list[tuple[str, int, int]]  # precision, FLOPs, bytes of memory traffic
    peak: int  # bytes at most, beyond weights and inputs; when it is reached few weights have a gradient yet
    weights: int
    blocks: int
    in_blocks: int  # weights that lie in blocks

    @property
    def flops(self) -> int:
        return sum(flops for _, flops, _ in self.operators)

    def seconds(self, gpu: Gpu) -> float:
        """Each operator as long as its products take at the peak, or its traffic at the memory's full bandwidth."""
        return sum(max(flops / gpu.peak(kind), traffic / gpu.bandwidth) for kind, flops, traffic in self.operators)


def fake_pass(recipe: Recipe, micro: int) -> Pass:
    """Forward, loss and backward of `micro` samples, in the precision of the engine as it is on a GPU."""
    train, mode = recipe.train, fake_mode()
    precision = DTYPES[train.precision]
    half = torch.bfloat16 if train.precision == "fp16" else precision  # a CPU's autocast lacks some of fp16
    casts = recipe.engine.kind == "ddp"  # the others keep the network itself in half precision
    module = fake_network(recipe, mode, None if casts else half)
    with mode:
        inputs = fake_inputs(recipe, micro)
        if not casts and inputs.is_floating_point():
            inputs = inputs.to(half)
        targets = torch.zeros(micro, recipe.data.num_classes)
        module.train()
        ledger = MemoryTracker()
        ledger.watch(*module.parameters(), *module.buffers(), inputs, targets)
        before = ledger.alive
        with ledger, Work() as work:
            with autocast(torch.device("cpu"), half if casts else torch.float32), _Norms():
                logits = module(inputs)
            LOSSES[train.loss](logits, targets).backward()
    operators = [
        (train.precision if kind == "bf16" else kind, flops, traffic) for kind, flops, traffic in work.operators
    ]
    blocks = list(getattr(module, "blocks", ()))
    sizes = [sum(p.numel() for p in part.parameters()) for part in (module, nn.ModuleList(blocks))]
    return Pass(operators, ledger.peak - before, sizes[0], len(blocks), sizes[1])


class _Norms(TorchFunctionMode):
    """Under autocast a GPU's norms compute in fp32 and keep such a copy of their inputs; a CPU's do not."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.nn.functional.layer_norm, torch.nn.functional.group_norm) and torch.is_autocast_enabled(
            "cpu"
        ):
            args = (args[0].float(), *args[1:])
        return function(*args, **(kwargs or {}))

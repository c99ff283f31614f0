"""The forward and backward pass of one rank on fake tensors: its memory, FLOPs and traffic, and a roofline."""

from typing import NamedTuple

import torch
from torch import nn

from widemix.data.precision import DTYPES, autocast
from widemix.estimate.fake import GPU, MemoryTracker, OpRecorder, fake_inputs, fake_mode, fake_network
from widemix.estimate.hardware import Gpu
from widemix.recipe import Recipe
from widemix.recipe.losses import LOSSES


class Pass(NamedTuple):
    """A pass of one micro-batch on one rank."""

    operators: list[tuple[str, int, int]]  # precision, FLOPs, bytes of memory traffic
    peak: int  # most bytes alive, without weights and inputs; few weights have a gradient at that moment
    weights: int
    trained: int  # of the weights: those that are not frozen
    blocks: int  # number of blocks
    in_blocks: int  # weights of the blocks
    buffers: int = 0  # bytes of what is no weight: positions of masked weights, permutations, statistics of norms

    @property
    def flops(self) -> int:
        """FLOPs of all operators."""
        return sum(flops for _, flops, _ in self.operators)

    def seconds(self, gpu: Gpu) -> float:
        """Return the roofline, s: each operator takes its FLOPs at the peak or its traffic at the bandwidth."""
        return sum(max(flops / gpu.peak(kind), traffic / gpu.bandwidth) for kind, flops, traffic in self.operators)


def fake_pass(recipe: Recipe, micro: int, device: torch.device = GPU) -> Pass:
    """Run forward, loss and backward of `micro` samples on fake tensors, in the engine's precision on a GPU.

    Masked weights are multiplied as on `device`.
    """
    train, mode = recipe.train, fake_mode()
    precision = DTYPES[train.precision]
    half = torch.bfloat16 if train.precision == "fp16" else precision  # autocast on a CPU supports fp16 only in part
    autocasts = recipe.engine.kind == "ddp"  # with the other engines the network itself is in half precision
    module = fake_network(recipe, mode, None if autocasts else half, device)
    if autocasts:
        _convert_inputs_of_norms(module)
    with mode:
        inputs = fake_inputs(recipe, micro)
        if not autocasts and inputs.is_floating_point():
            inputs = inputs.to(half)
        targets = torch.zeros(micro, recipe.data.num_classes)
        memory = MemoryTracker()
        memory.watch(*module.parameters(), *module.buffers(), inputs, targets)
        before = memory.alive
        with memory, OpRecorder() as recorder:
            with autocast(torch.device("cpu"), half if autocasts else torch.float32):
                logits = module(inputs)
            LOSSES[train.loss].build()(logits, targets).backward()
    operators = [
        (train.precision if kind == "bf16" else kind, flops, traffic) for kind, flops, traffic in recorder.operators
    ]
    blocks = list(getattr(module, "blocks", ()))
    weights, in_blocks = (sum(p.numel() for p in m.parameters()) for m in (module, nn.ModuleList(blocks)))
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    buffers = sum(buffer.nbytes for buffer in module.buffers())
    return Pass(operators, memory.peak - before, weights, trained, len(blocks), in_blocks, buffers)


def _convert_inputs_of_norms(module: nn.Module) -> None:
    """To fp32, as autocast does on a GPU but not on a CPU; also in blocks that the backward pass computes again."""
    for part in module.modules():
        if isinstance(part, nn.LayerNorm | nn.GroupNorm):
            part.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(), *inputs[1:]))

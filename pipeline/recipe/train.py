"""Section `train`: length, batch, precision, loss, initial weights and checkpoints of a run."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from widemix.recipe.losses import LOSSES
from widemix.section import Amount, ByClass, Decay, OneOf, Positive, PositiveAmount, Section, key


def _is_range(text: object) -> object:
    first, _, stop = str(text).partition(":")
    if not (first.isdecimal() and stop.isdecimal() and int(first) < int(stop)):
        raise ValueError("should be FIRST:STOP, two step numbers such as 20:30")
    return text


class TrainSection(Section):
    """Length, batch, precision, loss, initial weights and checkpoints of a run."""

    epochs: Annotated[int, Field(gt=0, le=1_000_000)] = key(..., "passes over the training split")
    global_batch: Positive = key(..., "samples per step over all ranks, whatever their number")
    grad_accum_steps: Positive = key(1, "micro-batches per step over which each rank accumulates its gradient")
    precision: Literal["fp32", "bf16", "fp16"] = key("fp32", "precision of forward and backward; weights stay fp32")
    fp8: bool = key(
        False,
        "with bf16, products of the mixings in float8 while training (torchao): on Hopper GPUs and newer ones, with "
        "compile (without, a step of Mixer-B/16 takes four times bf16's on an H100)",
    )
    loss: Annotated[str, OneOf("loss", LOSSES)] = key("softmax", "the loss, mean over samples")
    class_weights: Literal["inverse", "sqrt", "effective"] | ByClass | None = key(
        None,
        "weights of classes in the loss: of a sample's classes with softmax, of positives with sigmoid; inverse: 1 / "
        "the class's samples; sqrt: the square root of that; effective: 1 / their effective number (Cui et al. 2019, "
        "beta 0.999); these three times a constant, for a mean of 1 over the samples; {name: weight}: as given, "
        "others 1; null: all 1",
    )
    matmul_precision: Literal["highest", "high"] = key(
        "highest", "what GPUs compute fp32 products in: highest: fp32; high: TF32, faster, with 10 bits of mantissa"
    )
    head_bias: Annotated[float, Field(ge=-1000, le=1000)] = key(
        0.0, "initial bias of the head; with the sigmoid loss -6.9 is usual for 1000 classes"
    )
    activation_checkpointing: bool = key(False, "recompute each block in the backward pass, to save memory")
    compile: bool = key(
        False,
        "torch.compile the model: a minute at the start; on a GPU faster steps of small networks, but not of large "
        "Mixers, for which engine.memory_layout has kernels",
    )
    ema_decay: Decay | None = key(
        None, "decay of an exponential moving average of the weights, evaluated too; 0.9999 is usual, null is off"
    )
    ema_warmup: bool = key(False, "raise the decay of the average as 1 - step^(-2/3) until it reaches ema_decay")
    ema_device: Literal["same", "cpu"] = key("same", "device of the average: that of the weights, or host memory")
    sync_batch_norm: bool = key(
        True,
        "batch norms take statistics over the batches of all ranks; false: of each rank alone, and their running "
        "statistics are averaged over ranks before evaluation and saving",
    )
    deterministic: bool = key(
        False, "bit-identical results of runs on the same number of ranks, at the cost of speed"
    )
    init_from: str | None = key(
        None,
        "weights to start from: a run, a checkpoint, a .safetensors file or a folder with one, a state_dict that "
        "torch.save wrote, timm:NAME, or hf:OWNER/NAME; "
        "a head for other classes is newly initialised, a Mixer for larger images is grown",
    )
    reset_head: bool = key(
        False, "newly initialise the head also where init_from has one of as many classes: for data of other classes"
    )
    freeze: Annotated[tuple[str, ...], Field(strict=False)] = key(
        (),
        "name patterns of parameters that are not trained: [stem.*, blocks.0.*]; [body] is all but the head, "
        "[unused] what the network has and does not use",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = key(0, "seed of weights, data order, augmentation and mixup")
    profile: Annotated[str, BeforeValidator(_is_range)] | None = key(
        None,
        "FIRST:STOP, steps (from 0) of which PyTorch's profiler writes a trace to RUN/profile/; null is off",
    )
    max_steps: Positive | None = key(None, "stop after this many steps; the schedule does not change; null is off")
    save_every_steps: Positive | None = key(
        None, "steps between checkpoints; null, and save_minutes too, saves at the end of each epoch"
    )
    save_minutes: PositiveAmount | None = key(
        None, "minutes between checkpoints, by the clock of rank 0; null is off"
    )
    keep_last: Positive = key(2, "newest checkpoints to keep")
    keep_best: str | None = key(
        None,
        "save after each evaluation, and also keep the checkpoint that is best in this metric: top1, top5, "
        "balanced_accuracy, macro_f1, map, mae, r2, loss, one of a plug-in, or ema_ and its name; null is off",
    )
    patience_epochs: Positive | None = key(
        None,
        "end the run at the first evaluation so many epochs after the last gain in keep_best's metric; null is off",
    )
    patience_gain: Amount = key(0.0, "least gain in that metric, in its unit, that counts")
    keep_every_steps: Positive | None = key(None, "also keep the checkpoints of steps that this divides; null is off")

    def micro_batch_size(self, world: int) -> int:
        """Samples that each of `world` ranks computes at once."""
        return self.global_batch // world // self.grad_accum_steps

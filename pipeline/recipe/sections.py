"""The sections of a recipe about a run: its training, engine, schedule, evaluation, failed steps and log."""

from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from widemix.recipe.losses import LOSSES
from widemix.section import Amount, ByClass, Decay, Epochs, OneOf, Positive, PositiveAmount, Seconds, Section, key


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


Rate = Annotated[float, Field(ge=0, le=1000)]


class ScheduleSection(Section):
    """Learning rate by step: a linear warm-up, then one of four schedules."""

    name: Literal["cosine", "linear", "step", "constant"] = key(
        "cosine",
        "cosine or linear down to min_lr; step: by decay_rate every decay_epochs; constant, then a cool-down",
    )
    warmup_epochs: Epochs = key(0.0, "length of the warm-up, epochs")
    warmup_lr: Rate = key(1e-6, "learning rate at the first step of the warm-up")
    min_lr: Rate = key(0.0, "learning rate at the last step (cosine, linear, cool-down)")
    decay_epochs: Annotated[float, Field(ge=1e-6, le=1_000_000)] = key(
        30.0, "step: epochs between decays, warm-up included"
    )
    decay_rate: Annotated[float, Field(gt=0, le=1)] = key(0.1, "step: factor of each decay")
    cooldown_epochs: Epochs = key(0.0, "constant: epochs of the linear cool-down at the end")


def exact(number: float) -> Fraction:
    """Return the decimal number that a recipe has, of which the float is the nearest: 0.1 is a tenth."""
    return Fraction(str(number))


class EvalSection(Section):
    """Evaluation during training."""

    every_epochs: Positive = key(1, "epochs between evaluations; the last epoch is always evaluated")
    every_minutes: PositiveAmount | None = key(
        None, "evaluate only at the first of these epochs that ends so many minutes after the last evaluation"
    )
    batch_size: Positive = key(128, "samples per batch and rank")


class FaultsSection(Section):
    """Failed steps, loss spikes and hangs."""

    max_skipped_steps: Annotated[int, Field(ge=0, lt=2**63)] = key(
        3, "steps in a row whose loss or gradient may be non-finite: they change nothing; one more rolls back"
    )
    max_rollbacks: Annotated[int, Field(ge=0, lt=2**63)] = key(
        2, "rollbacks to the last checkpoint, which skip the data of the failed steps, over the whole run"
    )
    loss_spike_std: PositiveAmount | None = key(
        6.0, "warn of a step whose loss is this many standard deviations above the mean of the last 100; null is off"
    )
    hang_timeout_s: Seconds = key(
        600, "seconds without a finished step or evaluated batch after which the run writes its stacks and exits"
    )


class LogSection(Section):
    """Metrics, images and trackers of a run."""

    every: Positive = key(50, "steps between lines of metrics.jsonl")
    tensorboard: bool = key(True, "also write the metrics for TensorBoard, into the run folder")
    wandb: bool = key(
        False, "also send the metrics to Weights & Biases; WANDB_PROJECT and WANDB_MODE (offline) say where"
    )
    mlflow: bool = key(
        False, "also send the metrics to MLflow; MLFLOW_TRACKING_URI says where (default: sqlite:///mlflow.db)"
    )
    block_norms: bool = key(False, "also log the gradient norm of each block, of the last step before a line")
    mistakes: Annotated[int, Field(ge=0, le=256)] | None = key(
        None,
        "misclassified images to show after each evaluation, the surest first, with the confusion matrix; 0 is off; "
        "null: 32 where there are at most 50 classes",
    )
    images: Annotated[int, Field(ge=0, lt=2**31)] = key(32, "images in the grid of the first step; 0 is off")

    def shown_mistakes(self, targets: str, classes: int) -> int:
        """Return how many misclassified images are shown of a run with so many classes."""
        if self.mistakes is not None:
            return self.mistakes
        return 32 if targets == "class" and classes <= 50 else 0

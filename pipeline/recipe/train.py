"""How long, on which engine, with what measured and kept."""

from typing import Annotated, Literal

from pydantic import Field

from pipeline.section import Decay, Positive, Section, key


class TrainSection(Section):
    """How long, how many pictures a step, in which precision, to which end."""

    epochs: Positive = key(..., "passes over the training split")
    global_batch: Positive = key(..., "pictures a step over all ranks; the world size belongs to the launch")
    grad_accum_steps: Positive = key(1, "micro-batches that each rank sums its gradient over")
    precision: Literal["fp32", "bf16", "fp16"] = key("fp32", "arithmetic of the network; weights stay in fp32")
    loss: Literal["softmax", "sigmoid"] = key(
        "softmax", "cross-entropy over classes, or the sum of a binary one for each class (mean over pictures)"
    )
    head_bias: float = key(0.0, "first value of the head's bias; with the sigmoid loss -6.9 is usual at 1000 classes")
    activation_checkpointing: bool = key(False, "compute each block again in the backward pass, to save memory")
    compile: bool = key(False, "torch.compile the network: a minute at the start, faster steps on a GPU")
    ema_decay: Decay | None = key(
        None, "keep an exponential moving average of the weights, evaluated beside them; 0.9999 is usual, null is off"
    )
    ema_warmup: bool = key(False, "let the average's decay rise like 1 - step^(-2/3) until it reaches ema_decay")
    ema_device: Literal["same", "cpu"] = key(
        "same", "where the average lies: with the weights, or in the host's memory"
    )
    deterministic: bool = key(False, "the same bits from every run on the same number of ranks, at the cost of speed")
    init_from: str | None = key(
        None,
        "weights to start from: a run, a checkpoint, a .safetensors file or a folder with one, a state_dict that "
        "torch.save wrote, or timm:NAME; "
        "a head for other classes is drawn anew, a Mixer for larger pictures grown",
    )
    freeze: Annotated[tuple[str, ...], Field(strict=False)] = key(
        (), "parameters not to train, by pattern: [stem.*, blocks.0.*]"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = key(0, "of the weights, the order, augmentation and mixing")
    max_steps: Positive | None = key(None, "stop after this many steps, without changing the schedule; null is off")
    save_every_steps: Positive | None = key(None, "steps between checkpoints; null saves at the end of each epoch")
    keep_last: Positive = key(2, "newest checkpoints to keep")
    keep_best: Literal["top1", "top5", "loss", "ema_top1", "ema_top5", "ema_loss"] | None = key(
        None, "save after each evaluation, and keep the checkpoint with the best such figure too; null is off"
    )
    keep_every_steps: Positive | None = key(None, "keep the checkpoints of steps that this divides too")


class EngineSection(Section):
    """What turns a module and an optimiser into a step on many ranks."""

    kind: Literal["ddp", "fsdp", "deepspeed"] = key(
        "ddp", "ddp: whole on each rank; fsdp: sharded block by block (FSDP2); deepspeed: ZeRO"
    )
    zero_stage: Literal[0, 1, 2, 3] = key(
        1, "deepspeed: 0 shares nothing out, 1 optimiser state, 2 gradients too, 3 weights too"
    )
    cpu_offload: bool = key(False, "fsdp, ZeRO 1 to 3: keep optimiser state (fsdp: shards too) in the host's memory")
    deepspeed_config: str | None = key(
        None, "a DeepSpeed JSON with what the recipe does not say; what contradicts the recipe is an error"
    )
    bucket_cap_mb: Positive = key(25, "MB of gradients that ddp and ZeRO send together")
    gradient_as_bucket_view: bool = key(
        True, "ddp: gradients lie in the buckets themselves, which saves a copy of them"
    )
    static_graph: bool = key(False, "ddp: every step uses the same parameters in the same order")
    bf16_compress: bool = key(False, "ddp: gradients travel as bf16")
    overlap_comm: bool = key(True, "ZeRO: communicate while the backward pass goes on")
    timeout_s: Positive = key(1800, "seconds a rank waits for the others before it gives up")


class EvalSection(Section):
    """How often the evaluation split is measured."""

    every_epochs: Positive = key(1, "epochs between evaluations; the last epoch is always measured")
    batch_size: Positive = key(128, "pictures a batch and rank")


class LogSection(Section):
    """What is written down while it trains."""

    every: Positive = key(50, "steps between lines of metrics.jsonl")
    tensorboard: bool = key(True, "draw the same record in TensorBoard, under tb/")
    images: Annotated[int, Field(ge=0)] = key(32, "pictures in the grid of the first step; 0 is off")

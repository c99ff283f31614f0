"""What a recipe may say: one frozen section per builder, and the rules that hold between sections.

Validation checks and never changes a value. Every key states its unit, and its default is what stands here.
"""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.errors import InputError
from pipeline.recipe.model import ModelSection
from pipeline.recipe.policy import parse_policy
from pipeline.recipe.section import Fraction, Jitter, Pair, Positive, Section, Triple, key

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class DataSection(Section):
    """Which prepared pictures, and how they reach the model."""

    path: str = key(..., "folder that `widemix prep` wrote (manifest.json and the .beton files)")
    train_split: str = key("train", "split to train on")
    eval_split: str = key("val", "split to evaluate on")
    num_classes: Positive = key(..., "classes that the head tells apart; no fewer than the manifest's")
    image_size: Positive = key(224, "side of the square picture the model sees, pixels")
    crop_pct: Annotated[float, Field(gt=0, le=1)] = key(
        0.875, "evaluation: side of the centre crop, as a share of the picture's shorter side"
    )
    mean: Triple = key(IMAGENET_MEAN, "subtracted per RGB channel, on a scale of 0 to 1")
    std: Triple = key(IMAGENET_STD, "divided by per RGB channel, on a scale of 0 to 1")
    workers: Annotated[int, Field(ge=0)] = key(
        0, "decoding threads per rank; 0 shares the allowed CPUs among the ranks of a node"
    )
    batches_ahead: Positive = key(3, "batches decoded ahead of the step, per rank")


class AugmentSection(Section):
    """What happens to a training picture, in timm's words. Evaluation sees the centre crop alone."""

    crop: Literal["resized", "padded"] = key(
        "resized", "resized: any box, resized; padded: the picture with a black border, image_size cut out of it"
    )
    padding: Annotated[int, Field(ge=0)] = key(4, "padded crop: width of the border, pixels")
    scale: Pair = key((0.08, 1.0), "random-resized crop: least and greatest share of the picture's area")
    ratio: Pair = key((3 / 4, 4 / 3), "random-resized crop: least and greatest width over height")
    hflip: Fraction = key(0.5, "probability of a horizontal flip")
    auto_augment: str | None = key(None, "timm policy such as rand-m9-mstd0.5-inc1, original, 3a or augmix, or null")
    color_jitter: Jitter = key(
        (0.0, 0.0, 0.0, 0.0),
        "greatest change of brightness, contrast, saturation, hue (up to 0.5, half a turn)",
    )
    color_jitter_prob: Fraction = key(1.0, "probability of colour jitter for each picture")
    grayscale_prob: Fraction = key(0.0, "probability of losing all colour")
    gaussian_blur_prob: Fraction = key(0.0, "probability of a Gaussian blur of 0.1 to 2 pixels")
    re_prob: Fraction = key(0.0, "random erasing: probability for each picture")
    re_mode: Literal["const", "rand", "pixel"] = key(
        "pixel", "random erasing: zero, one normal colour a box, or normal noise a pixel"
    )
    re_count: Positive = key(1, "random erasing: greatest number of boxes")
    mixup: Annotated[float, Field(ge=0)] = key(0.0, "alpha of mixup; 0 is off")
    cutmix: Annotated[float, Field(ge=0)] = key(0.0, "alpha of CutMix; 0 is off")
    cutmix_minmax: Pair | None = key(
        None, "CutMix by boxes of these shares of the side, least and greatest, instead of by alpha; null is off"
    )
    mix_mode: Literal["batch", "pair", "elem"] = key(
        "batch", "one draw for a whole mix_group, one for each pair in it, or one for each picture"
    )
    mixup_prob: Fraction = key(1.0, "probability that a group (pair, picture) is mixed at all")
    mixup_switch_prob: Fraction = key(0.5, "probability of CutMix where both are on")
    mix_group: Positive = key(
        32, "pictures mixed among themselves, by one draw in mode batch, whatever the world size"
    )
    smoothing: Annotated[float, Field(ge=0, lt=1)] = key(0.0, "label smoothing")

    @field_validator("auto_augment")
    @classmethod
    def policy_is_known(cls, text: str | None):
        if text is not None:
            parse_policy(text)
        return text

    @model_validator(mode="after")
    def ranges_are_ordered(self):
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale {list(self.scale)} must rise within (0, 1]")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"ratio {list(self.ratio)} must rise and be positive")
        if self.cutmix_minmax and not 0 <= self.cutmix_minmax[0] < self.cutmix_minmax[1] <= 1:
            raise ValueError(f"cutmix_minmax {list(self.cutmix_minmax)} must rise within [0, 1]")
        if min(self.color_jitter) < 0 or self.color_jitter[3] > 0.5:
            raise ValueError(f"color_jitter {list(self.color_jitter)} must not be negative, its hue not above 0.5")
        if self.mixing and self.mix_group % 2:
            raise ValueError(f"mix_group {self.mix_group} must be even: pictures are mixed in pairs")
        return self

    @property
    def cut_alpha(self) -> float:
        """Alpha that CutMix draws by: with boxes of their own it only decides how often nothing is cut."""
        return self.cutmix if self.cutmix_minmax is None else 1.0

    @property
    def mixing(self) -> bool:
        return self.mixup > 0 or self.cut_alpha > 0


class OptimSection(Section):
    """The optimiser. Biases and norms are never decayed."""

    name: Literal["adamw", "sgd", "lamb", "beta_lasso"] = key(
        "adamw", "adamw; sgd with Nesterov momentum; lamb (timm's); beta_lasso (Neyshabur 2020)"
    )
    lr: Annotated[float, Field(gt=0)] = key(..., "peak learning rate, for the global batch as it stands")
    weight_decay: Annotated[float, Field(ge=0)] = key(0.05, "decay of weights; decoupled in adamw and lamb")
    betas: Pair = key((0.9, 0.999), "adamw, lamb: decay of the two moments")
    eps: Annotated[float, Field(gt=0)] = key(1e-8, "adamw, lamb: added to the root of the second moment")
    momentum: Fraction = key(0.9, "sgd: Nesterov momentum; beta_lasso: heavy-ball momentum")
    l1: Annotated[float, Field(ge=0)] = key(0.0, "beta_lasso: lambda, weight of the l1 penalty")
    lasso_beta: Annotated[float, Field(ge=0)] = key(50.0, "beta_lasso: weights under beta * lambda become zero")
    clip_grad: Annotated[float, Field(gt=0)] | None = key(None, "greatest global gradient norm, or null")

    @model_validator(mode="after")
    def lasso_has_its_own_penalty(self):
        if self.name == "beta_lasso" and (self.weight_decay > 0 or self.l1 == 0):
            raise ValueError("beta_lasso takes l1 in place of weight_decay: set weight_decay 0 and l1 above 0")
        if self.name != "beta_lasso" and self.l1 > 0:
            raise ValueError(f"l1 is beta_lasso's, {self.name} would ignore it")
        return self


class ScheduleSection(Section):
    """Learning rate by step: linear warm-up, then one of four ways down."""

    name: Literal["cosine", "linear", "step", "constant"] = key(
        "cosine",
        "cosine or linear down to min_lr; step: by decay_rate every decay_epochs; constant, then a cool-down",
    )
    warmup_epochs: Annotated[float, Field(ge=0)] = key(0.0, "length of the warm-up, epochs")
    warmup_lr: Annotated[float, Field(ge=0)] = key(1e-6, "learning rate at the first step of the warm-up")
    min_lr: Annotated[float, Field(ge=0)] = key(0.0, "learning rate at the last step (cosine, linear, cool-down)")
    decay_epochs: Annotated[float, Field(gt=0)] = key(30.0, "step: epochs between decays, warm-up included")
    decay_rate: Annotated[float, Field(gt=0, le=1)] = key(0.1, "step: factor of each decay")
    cooldown_epochs: Annotated[float, Field(ge=0)] = key(0.0, "constant: epochs of the linear cool-down at the end")


class TrainSection(Section):
    """How long, how many pictures a step, in which precision, to which end."""

    epochs: Positive = key(..., "passes over the training split")
    global_batch: Positive = key(..., "pictures a step over all ranks; the world size belongs to the launch")
    accumulation: Positive = key(1, "micro-batches that each rank sums its gradient over")
    precision: Literal["fp32", "bf16", "fp16"] = key("fp32", "arithmetic of the network; weights stay in fp32")
    loss: Literal["softmax", "sigmoid"] = key(
        "softmax", "cross-entropy over classes, or the sum of a binary one for each class (mean over pictures)"
    )
    head_bias: float = key(0.0, "first value of the head's bias; with the sigmoid loss -6.9 is usual at 1000 classes")
    checkpointing: bool = key(False, "compute each block again in the backward pass, to save memory")
    compile: bool = key(False, "torch.compile the network: a minute at the start, faster steps on a GPU")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = key(0, "of the weights, the order, augmentation and mixing")
    max_steps: Positive | None = key(None, "stop after this many steps, without changing the schedule; null is off")
    save_every: Positive | None = key(None, "steps between checkpoints; null saves at the end of each epoch")
    keep: Positive = key(2, "newest checkpoints to keep")


class EngineSection(Section):
    """What turns a module and an optimiser into a step on many ranks."""

    kind: Literal["ddp", "fsdp", "deepspeed"] = key(
        "ddp", "ddp: whole on each rank; fsdp: sharded block by block (FSDP2); deepspeed: ZeRO"
    )
    zero_stage: Literal[0, 1, 2] = key(1, "deepspeed: 0 shares nothing out, 1 optimiser state, 2 gradients too")
    timeout: Positive = key(1800, "seconds a rank waits for the others before it gives up")


class EvalSection(Section):
    """How often the evaluation split is measured."""

    every: Positive = key(1, "epochs between evaluations; the last epoch is always measured")
    batch: Positive = key(128, "pictures a batch and rank")


class LogSection(Section):
    """What is written down while it trains."""

    every: Positive = key(50, "steps between lines of metrics.jsonl")
    tensorboard: bool = key(True, "draw the same record in TensorBoard, under tb/")
    images: Annotated[int, Field(ge=0)] = key(32, "pictures in the grid of the first step; 0 is off")


class Recipe(Section):
    """A whole experiment, but for where it runs."""

    data: DataSection
    model: ModelSection
    augment: AugmentSection = AugmentSection()
    optim: OptimSection
    schedule: ScheduleSection = ScheduleSection()
    train: TrainSection
    engine: EngineSection = EngineSection()
    eval: EvalSection = EvalSection()
    log: LogSection = LogSection()

    @model_validator(mode="after")
    def sections_agree(self):
        for check in (_picture_fits, _batch_divides, _schedule_fits, _engine_can):
            check(self)
        return self


def _picture_fits(recipe: Recipe) -> None:
    side = recipe.data.image_size
    recipe.model.check_image_size(side)
    least, greatest = recipe.augment.cutmix_minmax or (0.0, 1.0)
    if int(side * least) == int(side * greatest):
        raise ValueError(
            f"augment.cutmix_minmax [{least:g}, {greatest:g}] is no whole pixel of data.image_size {side}"
        )


def _batch_divides(recipe: Recipe) -> None:
    check_world(recipe, world=1)


def _schedule_fits(recipe: Recipe) -> None:
    schedule, train = recipe.schedule, recipe.train
    if schedule.warmup_epochs >= train.epochs:
        raise ValueError(
            f"schedule.warmup_epochs {schedule.warmup_epochs:g} must be shorter than train.epochs {train.epochs}"
        )
    if schedule.name == "constant" and schedule.warmup_epochs + schedule.cooldown_epochs > train.epochs:
        raise ValueError(
            f"schedule.warmup_epochs {schedule.warmup_epochs:g} and schedule.cooldown_epochs "
            f"{schedule.cooldown_epochs:g} together exceed train.epochs {train.epochs}"
        )
    for name in ("warmup_lr", "min_lr"):
        if getattr(schedule, name) > recipe.optim.lr:
            raise ValueError(f"schedule.{name} {getattr(schedule, name):g} exceeds optim.lr {recipe.optim.lr:g}")


def _engine_can(recipe: Recipe) -> None:
    if recipe.engine.kind == "deepspeed" and recipe.engine.zero_stage == 0 and recipe.train.precision != "fp32":
        raise ValueError(
            f"engine.zero_stage 0 with train.precision {recipe.train.precision}: DeepSpeed takes a false first "
            "step there; engine.kind ddp does the same job, or take stage 1 or 2"
        )
    if recipe.optim.name == "lamb" and recipe.engine.kind == "deepspeed" and recipe.engine.zero_stage > 0:
        raise ValueError(
            "optim.name lamb needs the norm of each parameter, which ZeRO lays end to end in slices; "
            "take engine.kind ddp or fsdp"
        )


def check_world(recipe: Recipe, world: int) -> None:
    """The global batch must fall into whole mixing groups on every rank and micro-batch, or `InputError`."""
    batch, accumulation = recipe.train.global_batch, recipe.train.accumulation
    group = recipe.augment.mix_group if recipe.augment.mixing else 1
    unit = world * accumulation * group
    if batch % unit:
        below, above = batch // unit * unit, -(-batch // unit) * unit
        fits = f"{below} or {above}" if below else f"{above}"
        grouped = f" x augment.mix_group {group}" if group > 1 else ""
        raise InputError(
            f"train.global_batch {batch} does not divide by {world} ranks x train.accumulation {accumulation}"
            f"{grouped} = {unit}; {fits} would"
        )

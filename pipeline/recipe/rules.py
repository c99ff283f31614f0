"""The rules that hold between the sections of a recipe."""

from typing import TYPE_CHECKING

from widemix.errors import InputError
from widemix.metrics import MEASURED
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection
from widemix.recipe.losses import LOSSES
from widemix.recipe.sections import EngineSection, exact

if TYPE_CHECKING:
    from widemix.recipe.schema import RecipeFields


def _model_reads_data(recipe: "RecipeFields") -> None:
    takes = recipe.model.takes
    if takes != recipe.data.kind:
        raise ValueError(
            f"model.kind {recipe.model.kind} takes {takes}, data.kind is {recipe.data.kind}; "
            f"set data.kind to {takes} or take another model"
        )


def _text_is_left_alone(recipe: "RecipeFields") -> None:
    """Of all that happens to a training image only smoothing the label means anything to a sentence."""
    if recipe.data.kind == "text":
        for name, info in AugmentSection.model_fields.items():
            if name != "smoothing" and getattr(recipe.augment, name) != info.default:
                raise ValueError(
                    f"augment.{name} changes images, data.kind is text; only augment.smoothing is for both"
                )


def _image_fits(recipe: "RecipeFields") -> None:
    if not isinstance(recipe.data, DataSection):
        return
    side = recipe.data.image_size
    recipe.model.check_image_size(side)
    recipe.augment.check_image_size(side)


def _targets_fit(recipe: "RecipeFields") -> None:
    """Loss, label smoothing and CutMix make sense for what is predicted."""
    targets, augment = recipe.data.targets, recipe.augment
    fitting = [name for name, loss in LOSSES.items() if targets in loss.targets]
    if recipe.train.loss not in fitting:
        raise ValueError(
            f"train.loss {recipe.train.loss} is not for data.targets {targets}; set it to "
            f"{' or '.join(fitting)}, or set data.targets"
        )
    if targets != "class" and recipe.data.sampling:
        raise ValueError(f"data.sampling is by class, and data.targets is {targets}; set it to null")
    if targets != "class" and augment.smoothing > 0:
        raise ValueError(f"augment.smoothing {augment.smoothing:g} is for classes, data.targets is {targets}; set 0")
    if targets == "regression" and augment.cut_alpha > 0:
        raise ValueError(
            "augment.cutmix mixes targets by area, and numbers of data.targets regression are not fractions of an "
            "area; turn it off (augment.mixup mixes images and numbers alike)"
        )


def _weights_reach_the_loss(recipe: "RecipeFields") -> None:
    loss = recipe.train.loss
    if recipe.train.class_weights and "weights" not in LOSSES[loss].takes:
        fitting = [name for name, spec in LOSSES.items() if "weights" in spec.takes]
        raise ValueError(
            f"train.class_weights: train.loss {loss} takes no weights; {', '.join(fitting)} do, and data.sampling "
            "needs none"
        )


def _schedule_fits(recipe: "RecipeFields") -> None:
    schedule, train = recipe.schedule, recipe.train
    if schedule.warmup_epochs >= train.epochs:
        raise ValueError(
            f"schedule.warmup_epochs {schedule.warmup_epochs:g} must be shorter than train.epochs {train.epochs}; "
            f"{int(train.epochs > 1)} would do"
        )
    if schedule.name == "constant" and exact(schedule.warmup_epochs) + exact(schedule.cooldown_epochs) > train.epochs:
        raise ValueError(
            f"schedule.warmup_epochs {schedule.warmup_epochs:g} and schedule.cooldown_epochs "
            f"{schedule.cooldown_epochs:g} together exceed train.epochs {train.epochs}"
        )
    for name in ("warmup_lr", "min_lr"):
        if getattr(schedule, name) > recipe.optim.lr:
            raise ValueError(f"schedule.{name} {getattr(schedule, name):g} exceeds optim.lr {recipe.optim.lr:g}")


# Keys that only some engines read.
_ENGINE_KEYS = {
    "zero_stage": ("deepspeed",),
    "bucket_cap_mb": ("ddp", "deepspeed"),
    "gradient_as_bucket_view": ("ddp",),
    "static_graph": ("ddp",),
    "sharding": ("fsdp",),
    "overlap_comm": ("deepspeed",),
}


def _zero_stage(recipe: "RecipeFields") -> int:
    """The ZeRO stage in use; 0 where the engine is not DeepSpeed."""
    return recipe.engine.zero_stage if recipe.engine.kind == "deepspeed" else 0


def _engine_fits(recipe: "RecipeFields") -> None:
    """The engine supports the precision, and reads every key that is set."""
    engine, train = recipe.engine, recipe.train
    if engine.kind == "deepspeed" and engine.zero_stage == 0 and train.precision != "fp32":
        raise ValueError(
            f"engine.zero_stage 0 with train.precision {train.precision}: DeepSpeed's first step there uses zero "
            "gradients; take engine.kind ddp, which does the same otherwise, or engine.zero_stage 1, 2 or 3"
        )
    if train.fp8 and (train.precision != "bf16" or engine.kind == "deepspeed"):
        raise ValueError("train.fp8 true needs train.precision bf16, and engine.kind ddp or fsdp")
    if engine.cpu_offload and engine.kind != "fsdp" and _zero_stage(recipe) == 0:
        raise ValueError("engine.cpu_offload needs engine.kind fsdp, or deepspeed with engine.zero_stage 1, 2 or 3")
    for name, kinds in _ENGINE_KEYS.items():
        default = EngineSection.model_fields[name].default
        if getattr(engine, name) != default and engine.kind not in kinds:
            raise ValueError(f"engine.{name} is for engine.kind {' or '.join(kinds)}, {engine.kind} would ignore it")
    if engine.static_graph and (train.deterministic or train.grad_accum_steps > 1):
        other = "train.deterministic" if train.deterministic else "train.grad_accum_steps above 1"
        raise ValueError(f"engine.static_graph true does not go with {other}: DDP fails there; set it to false")
    if engine.deepspeed_config is not None and engine.kind != "deepspeed":
        raise ValueError("engine.deepspeed_config needs engine.kind deepspeed")


def _optimizer_fits(recipe: "RecipeFields") -> None:
    """The optimizer can run on this engine's tensors, and its own average goes with schedule and EMA."""
    name, spec, zero = recipe.optim.name, recipe.optim.spec, _zero_stage(recipe)
    if spec.needs_whole and zero > 0:
        raise ValueError(
            f"optim.name {name} needs {spec.needs_whole}, and ZeRO gives an optimizer slices of many parameters; "
            "take engine.kind ddp or fsdp"
        )
    if spec.group_counters and zero == 3:
        raise ValueError(
            f"optim.name {name} counts its steps in its parameter groups, and ZeRO 3 calls it several times a step; "
            "take engine.zero_stage 1 or 2, or engine.kind ddp or fsdp"
        )
    if spec.evaluation_weight is None:
        return
    schedule = recipe.schedule
    if schedule.name != "constant" or schedule.cooldown_epochs > 0:
        raise ValueError(
            f"optim.name {name} averages the weights, which replaces a decay of the learning rate: set schedule.name "
            "constant and schedule.cooldown_epochs 0 (a warm-up is fine)"
        )
    if recipe.train.ema_decay is not None:
        raise ValueError(f"optim.name {name} averages the weights itself; set train.ema_decay to null")


def _hangs_are_found(recipe: "RecipeFields") -> None:
    if recipe.faults.hang_timeout_s >= recipe.engine.timeout_s:
        raise ValueError(
            f"faults.hang_timeout_s {recipe.faults.hang_timeout_s} must be shorter than engine.timeout_s "
            f"{recipe.engine.timeout_s}: collectives that give up first leave no stacks"
        )


def _best_is_measured(recipe: "RecipeFields") -> None:
    metric, targets = recipe.train.keep_best or "", recipe.data.targets
    if metric.startswith("ema_") and recipe.train.ema_decay is None:
        raise ValueError(f"train.keep_best {metric} needs train.ema_decay")
    if metric and metric.removeprefix("ema_") not in (*MEASURED[targets], "loss"):
        raise ValueError(
            f"train.keep_best {metric} is not measured with data.targets {targets}; take "
            f"{', '.join(MEASURED[targets])} or loss"
        )


def _patience_has_a_metric(recipe: "RecipeFields") -> None:
    train = recipe.train
    if train.patience_epochs is None:
        if train.patience_gain:
            raise ValueError(f"train.patience_gain {train.patience_gain:g} needs train.patience_epochs")
        return
    if train.keep_best is None:
        raise ValueError("train.patience_epochs needs train.keep_best, the metric that it waits for")
    if recipe.eval.every_minutes is not None:
        raise ValueError(
            "train.patience_epochs does not go with eval.every_minutes: the clock would say when the run ends; set "
            "eval.every_epochs"
        )


def _kept_steps_are_saved(recipe: "RecipeFields") -> None:
    train = recipe.train
    if train.keep_every_steps and train.save_minutes and not train.save_every_steps:
        raise ValueError(
            "train.keep_every_steps needs train.save_every_steps where train.save_minutes is set: "
            "the clock saves at any step"
        )


def _reset_heads_have_bodies(recipe: "RecipeFields") -> None:
    if recipe.train.reset_head and recipe.train.init_from is None:
        raise ValueError("train.reset_head is for weights of train.init_from; without it the head is new anyway")


MOST_CONFUSED = 2000  # classes: a confusion matrix of 32 MB on each rank


def _log_is_possible(recipe: "RecipeFields") -> None:
    if recipe.log.block_norms and recipe.engine.kind == "deepspeed":
        raise ValueError("log.block_norms true: DeepSpeed does not give its gradients; take engine.kind ddp or fsdp")
    if recipe.log.mistakes and recipe.data.targets != "class":
        raise ValueError(f"log.mistakes is for data.targets class, not {recipe.data.targets}; set it to 0")
    if recipe.log.mistakes and recipe.data.num_classes > MOST_CONFUSED:
        raise ValueError(
            f"log.mistakes {recipe.log.mistakes}: data.num_classes {recipe.data.num_classes} are too many for a "
            f"confusion matrix (at most {MOST_CONFUSED}); set it to 0"
        )


def batch_unit(recipe: "RecipeFields", world: int) -> int:
    """Return what the global batch must be a multiple of: a mixup group on every rank and micro-batch."""
    group = recipe.augment.mix_group if recipe.augment.mixes_images else 1
    return world * recipe.train.grad_accum_steps * group


def check_world(recipe: "RecipeFields", world: int = 1) -> None:
    """The global batch must fall into whole mixup groups on every rank and micro-batch, or `InputError`."""
    batch, grad_accum_steps = recipe.train.global_batch, recipe.train.grad_accum_steps
    unit = batch_unit(recipe, world)
    group = unit // (world * grad_accum_steps)
    if batch % unit:
        below, above = batch // unit * unit, -(-batch // unit) * unit
        fits = f"{below} or {above}" if below else f"{above}"
        grouped = f" x augment.mix_group {group}" if group > 1 else ""
        raise InputError(
            f"train.global_batch {batch} does not divide by {world} ranks x train.grad_accum_steps {grad_accum_steps}"
            f"{grouped} = {unit}; {fits} would"
        )


# In this order, the first one that a recipe breaks is its error; each raises `ValueError`.
RULES = (
    _model_reads_data,
    _image_fits,
    _targets_fit,
    _text_is_left_alone,
    check_world,
    _schedule_fits,
    _engine_fits,
    _optimizer_fits,
    _hangs_are_found,
    _weights_reach_the_loss,
    _best_is_measured,
    _patience_has_a_metric,
    _kept_steps_are_saved,
    _reset_heads_have_bodies,
    _log_is_possible,
)

"""What goes together in a recipe, next to what does not: `tests/messages/recipes.yaml` has the rules' other sides."""

import pytest

from widemix.recipe import load_recipe

# Of digits/mixer: 30 epochs, 2 of warm-up; a batch of 64 in mixup groups of 16; a rate of 0.004, label smoothing 0.1.
SCHEDULE_FREE = "optim.name=schedule_free schedule.name=constant"
NUMBERS = "data.targets=regression train.loss=mse augment.smoothing=0"
LABELS = "data.targets=multilabel train.loss=sigmoid augment.smoothing=0"
READ_BY = {  # a value of a key that is not the default: the engines that read it
    "zero_stage=2": ("deepspeed",),
    "bucket_cap_mb=30": ("ddp", "deepspeed"),
    "gradient_as_bucket_view=false": ("ddp",),
    "static_graph=true": ("ddp",),
    "sharding=hybrid": ("fsdp",),
    "overlap_comm=false": ("deepspeed",),
    "reduce_dtype=bf16": ("ddp", "fsdp", "deepspeed"),
    "timeout_s=700": ("ddp", "fsdp", "deepspeed"),
}
TAKEN = [
    *(f"engine.kind={kind} engine.{key}" for key, kinds in READ_BY.items() for kind in kinds),
    "schedule.warmup_epochs=29.5",
    "schedule.name=constant schedule.cooldown_epochs=28",
    "schedule.name=linear schedule.cooldown_epochs=29",
    "schedule.warmup_lr=0.004 schedule.min_lr=0.004",
    "engine.kind=deepspeed engine.zero_stage=0",
    *(f"engine.kind=deepspeed engine.zero_stage={stage} train.precision=fp16" for stage in (1, 2, 3)),
    *(f"train.fp8=true train.precision=bf16 engine.kind={kind}" for kind in ("ddp", "fsdp")),
    "engine.cpu_offload=true engine.kind=fsdp",
    *(f"engine.cpu_offload=true engine.kind=deepspeed engine.zero_stage={stage}" for stage in (1, 2, 3)),
    "engine.deepspeed_config=a.json engine.kind=deepspeed",
    *(f"optim.name={name} engine.kind={kind}" for name in ("lamb", "muon") for kind in ("ddp", "fsdp")),
    "optim.name=muon engine.kind=deepspeed engine.zero_stage=0",
    *(f"{SCHEDULE_FREE} engine.kind=deepspeed engine.zero_stage={stage}" for stage in (0, 1, 2)),
    "faults.hang_timeout_s=1799",
    "faults.hang_timeout_s=600 engine.timeout_s=601",
    *(f"train.keep_best={metric}" for metric in ("top1", "top5", "macro_f1", "loss")),
    *(f"train.keep_best=ema_{metric} train.ema_decay=0" for metric in ("top5", "loss")),
    f"{LABELS} train.keep_best=map",
    f"{NUMBERS} train.keep_best=r2",
    "train.keep_every_steps=4",
    "train.keep_every_steps=4 train.save_minutes=2 train.save_every_steps=2",
    "train.save_minutes=2",
    "train.keep_best=ema_loss train.ema_decay=0.9 train.patience_epochs=3 train.patience_gain=0.5",
    "train.reset_head=true train.init_from=runs/a",
    "log.block_norms=true engine.kind=fsdp",
    "log.mistakes=1 data.num_classes=2000",
    "log.mistakes=0 data.num_classes=2001",
    "train.loss=sigmoid",
    f"{LABELS} augment.cutmix=1",
    f"{LABELS} train.class_weights=inverse",
    'data.sampling=sqrt train.class_weights={"0":2,"1":0.5} train.loss=sigmoid',
    f"{NUMBERS} augment.mixup=0.2",
    "augment.mixup=0 train.global_batch=61",
    "data.pixel_order=all data.pixel_seed=1",
    "data.pixel_order=patches data.pixel_patch=4 data.pixel_seed=1",
    "augment.cutmix_minmax=[0.5,0.63]",
    *(f"augment.{name}={value}" for name, value in (("scale", "[1e-9,1]"), ("scale", "[0.5,0.5]"))),
    *(f"augment.ratio={value}" for value in ("[1e-3,1e3]", "[1,1]")),
    *(f"augment.cutmix_minmax={value} data.image_size=100" for value in ("[0,1]", "[0.3,0.31]")),
    *(f"augment.color_jitter={value}" for value in ("[0,0,0,0]", "[1000,1000,1000,0.5]")),
    "augment.mixup=0 augment.mix_group=3",  # nothing is mixed
    "optim.betas=[0.0,0.9] optim.weight_decay=0",
    f"{SCHEDULE_FREE} optim.betas=[0.001,0.9]",
    "optim.name=beta_lasso optim.weight_decay=0 optim.l1=0.1 optim.lr=1000 optim.layer_decay=1",
]


@pytest.mark.parametrize("words", TAKEN)
def test_what_goes_together_is_taken(words):
    load_recipe("digits/mixer", [tuple(word.split("=", 1)) for word in words.split()])


def test_text_may_be_smoothed():
    assert load_recipe("mnli/mixer", [("augment.smoothing", "0.1")]).augment.smoothing == 0.1

"""The rules between sections, each on both sides of where it begins, and by each of its clauses."""

import pytest

from widemix.errors import InputError
from widemix.recipe import load_recipe

# 30 epochs, 2 of warm-up; a batch of 64 in mixup groups of 16; a rate of 0.004, label smoothing 0.1.
BASE = "digits/mixer"
SCHEDULE_FREE = "optim.name=schedule_free schedule.name=constant"
NUMBERS = "data.targets=regression train.loss=mse augment.smoothing=0"
LABELS = "data.targets=multilabel train.loss=sigmoid augment.smoothing=0"
TOO_EARLY = "faults.hang_timeout_s 1800 must be shorter than engine.timeout_s 1800"

TAKEN = [
    "schedule.warmup_epochs=29.5",
    "schedule.name=constant schedule.cooldown_epochs=28",
    "schedule.name=linear schedule.cooldown_epochs=29",
    "schedule.warmup_lr=0.004 schedule.min_lr=0.004",
    "engine.kind=deepspeed engine.zero_stage=0",
    *(f"engine.kind=deepspeed engine.zero_stage={stage} train.precision=fp16" for stage in (1, 2, 3)),
    *(f"train.fp8=true train.precision=bf16 engine.kind={kind}" for kind in ("ddp", "fsdp")),
    "engine.cpu_offload=true engine.kind=fsdp",
    *(f"engine.cpu_offload=true engine.kind=deepspeed engine.zero_stage={stage}" for stage in (1, 2, 3)),
    "engine.static_graph=true",
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
]
REFUSED = [
    ("schedule.warmup_epochs=30", "schedule.warmup_epochs 30 must be shorter than train.epochs 30"),
    ("schedule.name=constant schedule.cooldown_epochs=28.1", "and schedule.cooldown_epochs 28.1 together exceed"),
    ("schedule.warmup_lr=0.0041", "schedule.warmup_lr 0.0041 exceeds optim.lr 0.004"),
    ("schedule.min_lr=0.0041", "schedule.min_lr 0.0041 exceeds optim.lr 0.004"),
    *(
        (f"engine.kind=deepspeed engine.zero_stage=0 train.precision={precision}", "first step there uses zero")
        for precision in ("bf16", "fp16")
    ),
    ("train.fp8=true", "train.fp8 true needs train.precision bf16"),
    ("train.fp8=true train.precision=fp16", "train.fp8 true needs train.precision bf16"),
    ("train.fp8=true train.precision=bf16 engine.kind=deepspeed", "and engine.kind ddp or fsdp"),
    ("engine.cpu_offload=true", "engine.cpu_offload needs engine.kind fsdp"),
    ("engine.cpu_offload=true engine.kind=deepspeed engine.zero_stage=0", "engine.cpu_offload needs"),
    ("engine.deepspeed_config=a.json engine.kind=fsdp", "engine.deepspeed_config needs engine.kind deepspeed"),
    *(
        (f"optim.name={name} engine.kind=deepspeed engine.zero_stage={stage}", f"optim.name {name} needs ")
        for name in ("lamb", "muon")
        for stage in (1, 2, 3)
    ),
    (f"{SCHEDULE_FREE} engine.kind=deepspeed engine.zero_stage=3", "counts its steps in its parameter groups"),
    ("optim.name=schedule_free", "set schedule.name constant and schedule.cooldown_epochs 0"),
    (f"{SCHEDULE_FREE} schedule.cooldown_epochs=0.5", "set schedule.name constant and schedule.cooldown_epochs 0"),
    (f"{SCHEDULE_FREE} train.ema_decay=0", "averages the weights itself; set train.ema_decay to null"),
    ("faults.hang_timeout_s=1800", TOO_EARLY),
    ("train.keep_best=mae", "mae is not measured with data.targets class; take top1, top5, balanced_accuracy, macro"),
    (f"{LABELS} train.keep_best=macro_f1", "train.keep_best macro_f1 is not measured with data.targets multilabel"),
    (f"{LABELS} data.sampling=sqrt", "data.sampling is by class, and data.targets is multilabel; set it to null"),
    (f"{NUMBERS} data.sampling={{\"a\":1}}", "data.sampling is by class, and data.targets is regression"),
    (f"{NUMBERS} train.class_weights=sqrt", "train.loss mse takes no weights; softmax, sigmoid do, and"),
    ("train.keep_best=ema_loss", "train.keep_best ema_loss needs train.ema_decay"),
    ("train.keep_best=ema_mae train.ema_decay=0.9", "train.keep_best ema_mae is not measured"),
    (f"{LABELS} train.keep_best=top1", "train.keep_best top1 is not measured with data.targets multilabel"),
    ("train.keep_every_steps=4 train.save_minutes=2", "train.keep_every_steps needs train.save_every_steps"),
    ("train.reset_head=true", "train.reset_head is for weights of train.init_from"),
    ("log.block_norms=true engine.kind=deepspeed", "log.block_norms true: DeepSpeed does not give its gradients"),
    (f"{LABELS} log.mistakes=1", "log.mistakes is for data.targets class, not multilabel"),
    (f"{NUMBERS} log.mistakes=1", "log.mistakes is for data.targets class, not regression"),
    ("log.mistakes=1 data.num_classes=2001", "data.num_classes 2001 are too many for a confusion matrix (at"),
    ("data.targets=multilabel augment.smoothing=0", "softmax is not for data.targets multilabel; set it to sigmoid"),
    (f"{LABELS} train.loss=mse", "train.loss mse is not for data.targets multilabel; set it to sigmoid"),
    (f"{NUMBERS} train.loss=sigmoid", "train.loss sigmoid is not for data.targets regression; set it to mse"),
    ("train.loss=mse", "train.loss mse is not for data.targets class; set it to softmax or sigmoid"),
    (f"{LABELS} augment.smoothing=0.01", "augment.smoothing 0.01 is for classes, data.targets is multilabel"),
    (f"{NUMBERS} augment.cutmix=0.1", "augment.cutmix mixes targets by area"),
    (f"{NUMBERS} augment.cutmix_minmax=[0.2,0.8]", "augment.cutmix mixes targets by area"),
    ("data.path=s3://bucket/a", "s3://bucket/a is a URL; `widemix stage s3://bucket/a --to DIR` copies it"),
    ("train.global_batch=8", "= 16; 16 would"),
    ("train.global_batch=65", "= 16; 64 or 80 would"),
    ("train.global_batch=61 train.grad_accum_steps=2 augment.mixup=0", "grad_accum_steps 2 = 2; 60 or 62 would"),
    ("augment.mixup=0 augment.cutmix=1 train.global_batch=65", "augment.mix_group 16 = 16; 64 or 80 would"),
    ("augment.cutmix_minmax=[0.5,0.62]", "augment.cutmix_minmax [0.5, 0.62] is no whole pixel of data.image_size 8"),
]  # fmt: skip


def pairs(words: str) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (word.partition("=") for word in words.split())]


@pytest.mark.parametrize("words", TAKEN)
def test_what_goes_together_is_taken(words):
    load_recipe(BASE, pairs(words))


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_what_does_not_go_together_is_refused_and_named(words, message):
    with pytest.raises(InputError) as caught:
        load_recipe(BASE, pairs(words))
    assert message in str(caught.value)


KINDS = {"ddp", "fsdp", "deepspeed"}
# A value that is not the default, and the engines that read the key.
READ_BY = {
    "zero_stage=2": {"deepspeed"},
    "bucket_cap_mb=30": {"ddp", "deepspeed"},
    "gradient_as_bucket_view=false": {"ddp"},
    "static_graph=true": {"ddp"},
    "sharding=hybrid": {"fsdp"},
    "overlap_comm=false": {"deepspeed"},
    "reduce_dtype=bf16": KINDS,
    "timeout_s=700": KINDS,
}


@pytest.mark.parametrize("words", READ_BY)
def test_a_key_of_some_engines_is_refused_by_the_others(words):
    for kind in sorted(KINDS):
        overrides = [("engine.kind", kind), *pairs(f"engine.{words}")]
        if kind in READ_BY[words]:
            load_recipe(BASE, overrides)
        else:
            with pytest.raises(InputError, match=rf"engine\.\w+ is for engine\.kind .*, {kind} would ignore it"):
                load_recipe(BASE, overrides)

"""What timm calls the arguments of `Loader`, where the names or the defaults are not the same.

`Loader` has timm's names where it has timm's meanings. It has one list of arguments for `create_loader` and `Mixup`,
so those of Mixup have names that say what they are for; and its defaults are those of a recipe, which leave out what
is not asked for.
"""

# The argument of `create_loader` or `Mixup`: the one of `Loader`.
RENAMED = {
    "dataset": "path and split",
    "input_size": "image_size",
    "fp16": "img_dtype",
    "distributed": "rank and world",
    "mixup_alpha": "mixup",
    "cutmix_alpha": "cutmix",
    "prob": "mixup_prob",
    "switch_prob": "mixup_switch_prob",
    "mode": "mixup_mode",
    "label_smoothing": "smoothing",
}
# The argument of `create_loader` or `Mixup` that `Loader` has no use for: why.
WITHOUT = {
    "no_aug": "is_training=False, or scale=(1, 1), ratio=(1, 1), hflip=0",
    "train_crop_mode": "training crops are random-resized ones",
    "vflip": "there is no vertical flip",
    "re_split": "augmentation splits are views here: views=[View(...), View(re_prob=...)]",
    "num_aug_splits": "augmentation splits are views here: views=2",
    "crop_mode": "evaluation has centre crops",
    "crop_border_pixels": "evaluation has centre crops",
    "collate_fn": "batches are tensors from the start",
    "pin_memory": "batches come on the device, from pinned memory",
    "use_prefetcher": "batches are always prefetched and normalised on the device",
    "use_multi_epochs_loader": "there are no worker processes to keep",
    "persistent_workers": "there are no worker processes to keep",
    "worker_seeding": "the images depend on seed, epoch and sample, whatever the workers",
    "tf_preprocessing": "crops are Pillow's",
    "input_size_choices": "all batches have one size; views may have several",
    "batch_size_choices": "all batches have one size",
    "batch_choice_weights": "all batches have one size",
    "batch_choice_seed": "all batches have one size",
    "batch_choice_schedule": "all batches have one size",
    "batch_schedule_epochs": "all batches have one size",
    "batch_schedule_spread": "all batches have one size",
    "batch_schedule_random_mix": "all batches have one size",
    "num_batches": "leave the loop",
    "correct_lam": "CutMix's proportion is always that of the pixels",
    "multi_label": "targets are those of the prepared folder",
}
# What None, a default of `create_loader`, stands for.
NONE_MEANS = {"scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3), "crop_pct": 0.875, "color_jitter_prob": 1.0}
ADVICE = {name: f"is timm's; here it is {ours}" for name, ours in RENAMED.items()}
ADVICE |= {name: f"is timm's, and not needed here: {why}" for name, why in WITHOUT.items()}

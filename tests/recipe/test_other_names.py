"""What other libraries call our keys: a message names ours."""

import inspect
import re

import pytest
import torch
from timm.data import Mixup, create_loader
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

from widemix.recipe import key_names, suggest
from widemix.recipe.other_names import OTHER_NAMES, other_name


# What these have that is no key: the data and the network themselves, and how they work inside.
@pytest.mark.parametrize(
    ("function", "names"),
    [
        (torch.optim.AdamW, "lr betas eps weight_decay"),
        (torch.optim.SGD, "lr momentum weight_decay"),
        (torch.utils.data.DataLoader, "dataset batch_size num_workers prefetch_factor sampler"),
        (torch.optim.lr_scheduler.CosineAnnealingLR, "eta_min"),
        (torch.optim.lr_scheduler.StepLR, "step_size gamma"),
        (torch.nn.CrossEntropyLoss, "label_smoothing"),
        (torch.nn.utils.clip_grad_norm_, "max_norm"),
        (
            create_loader,
            "input_size batch_size re_prob re_count auto_augment hflip color_jitter num_workers crop_pct",
        ),
        (Mixup, "mixup_alpha cutmix_alpha label_smoothing num_classes"),
        (create_optimizer_v2, "opt lr weight_decay momentum layer_decay"),
        (create_scheduler_v2, "sched num_epochs warmup_epochs min_lr decay_epochs decay_rate"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_name_of_others_finds_its_key(function, names):
    assert set(names.split()) <= set(inspect.signature(function).parameters)
    for name in names.split():
        [key] = re.findall(r"; did you mean (.+)\?", suggest(f"training.{name}", key_names()))
        assert key.rsplit(".")[-1] == name or key == other_name(name)


def test_what_is_suggested_is_there_and_once():
    assert set(OTHER_NAMES) <= {*key_names(), "--ranks", "--run-dir"}
    names = " ".join(OTHER_NAMES.values()).split()
    assert sorted(set(names)) == sorted(names)

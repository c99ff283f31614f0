"""Shuffled pixels: plain loops, the loaders' batches, and the Mixer that does not notice shuffled patches."""

import numpy as np
import pytest
import torch

from tests.sections import train_section
from widemix.data.loader import EvalLoader, TrainLoader
from widemix.data.pixel_order import permute_pixels, pixel_permutation
from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.models.mixer.network import Mixer
from widemix.recipe import load_recipe
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection

CPU = torch.device("cpu")
ALONE = Topology(0, 1, 0, 1, CPU)


def section(order: str, side: int = 12, **keys) -> DataSection:
    patch = {"pixel_patch": 4} if order == "patches" else {}
    return DataSection(path="", num_classes=2, image_size=side, pixel_order=order, **patch, **keys)


def test_patches_and_the_pixels_within_them_move_alike_in_all_patches():
    order = pixel_permutation(section("patches"), CPU)
    within, patches = {}, []
    for place, origin in enumerate(order.tolist()):
        (y, x), (from_y, from_x) = divmod(place, 12), divmod(origin, 12)
        patches.append(((y // 4, x // 4), (from_y // 4, from_x // 4)))
        within.setdefault((y % 4, x % 4), set()).add((from_y % 4, from_x % 4))
    assert all(len(origins) == 1 for origins in within.values())  # one permutation for the pixels of every patch
    assert len(set.union(*within.values())) == 16
    moved = set(patches)
    assert len(moved) == len({origin for _, origin in moved}) == 9  # each patch comes whole from one other
    assert any(place != origin for place, origin in moved)
    assert any(place not in origins for place, origins in within.items())


def test_all_pixels_move_by_a_permutation_of_the_seed_alone():
    assert pixel_permutation(section("original"), CPU) is None
    order = pixel_permutation(section("all"), CPU)
    assert sorted(order.tolist()) == list(range(144))
    assert order.tolist() == np.random.RandomState(0).permutation(144).tolist()  # of all runs: it must not change
    assert torch.equal(order, pixel_permutation(section("all"), CPU))
    assert not torch.equal(order, pixel_permutation(section("all", pixel_seed=1), CPU))


@pytest.mark.parametrize("order", ["patches", "all"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_loaders_shuffle_what_they_yield_otherwise(digits, order, precision):
    plain = DataSection(path=str(digits), num_classes=10, image_size=8, eval_split="test")
    keys = {"pixel_order": order, "pixel_seed": 3} | ({"pixel_patch": 2} if order == "patches" else {})
    shuffled = plain.model_copy(update=keys)
    augment = AugmentSection(mixup=0.4, cutmix=1.0, mix_group=4)
    train = train_section(16, precision=precision)
    place = pixel_permutation(shuffled, CPU).numpy()
    pairs = [[TrainLoader(data, augment, train, ALONE) for data in (plain, shuffled)]]
    pairs.append([EvalLoader(data, 16, ALONE) for data in (plain, shuffled)])
    for loaders in pairs:
        with loaders[0].batches() if isinstance(loaders[0], EvalLoader) else loaders[0].batches(1) as batches:
            one = next(batches)
        with loaders[1].batches() if isinstance(loaders[1], EvalLoader) else loaders[1].batches(1) as batches:
            other = next(batches)
        expected = one.inputs.float().numpy().reshape(16, 3, 64)[:, :, place].reshape(16, 3, 8, 8)
        assert np.array_equal(other.inputs.float().numpy(), expected)
        assert other.inputs.dtype == one.inputs.dtype
        assert other.inputs.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(one.targets, other.targets)


def test_a_mixer_with_its_weights_in_the_same_order_gives_the_same_logits():
    """The invariance that the paper states: to the order of patches, and of the pixels within all of them."""
    torch.manual_seed(0)
    model = Mixer(
        img_size=12, patch_size=4, num_classes=5, channels=6, depth=2, token_hidden=7, channel_hidden=8
    ).eval()
    torch.nn.init.normal_(model.head.weight)
    x = torch.randn(3, 3, 12, 12)
    expected = model(x)
    order = pixel_permutation(section("patches"), CPU)
    origins = order.view(3, 4, 3, 4).transpose(1, 2).reshape(9, 16)  # [patch, pixel of it]
    y, xs = origins // 12, origins % 12
    patches, pixels = (y[:, 0] // 4) * 3 + xs[:, 0] // 4, (y[0] % 4) * 4 + xs[0] % 4
    with torch.no_grad():
        model.stem.proj.weight.copy_(model.stem.proj.weight.flatten(2)[:, :, pixels].view(6, 3, 4, 4))
        for block in model.blocks:
            mlp = block.mlp_tokens
            mlp.fc1.weight.copy_(mlp.fc1.weight[:, patches])
            mlp.fc2.weight.copy_(mlp.fc2.weight[patches])
            mlp.fc2.bias.copy_(mlp.fc2.bias[patches])
    torch.testing.assert_close(model(permute_pixels(x, order)), expected)
    assert not torch.allclose(model(x), expected, atol=1e-3)


@pytest.mark.parametrize(
    ("overrides", "error_message"),
    [
        ([("data.pixel_order", "patches")], "pixel_patch 16 does not divide image_size 8"),
        ([("data.pixel_patch", "4")], "pixel_patch is not used with pixel_order original"),
        ([("data.pixel_order", "all"), ("data.pixel_patch", "4")], "pixel_patch is not used with pixel_order all"),
        ([("data.pixel_seed", "1")], "pixel_seed is not used with pixel_order original"),
    ],
)
def test_contradictions_are_one_line(overrides, error_message):
    with pytest.raises(InputError, match=error_message):
        load_recipe("digits/mixer", overrides)

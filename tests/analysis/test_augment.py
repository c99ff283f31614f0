"""Sheets of images: they show the run's images and every difference, and are written atomically."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.sections import train_section
from widemix.analysis import augment
from widemix.analysis.augment import AMPLIFIED, Comparison, all_comparisons, comparison_tiles, first_batch, write_png
from widemix.data.augment.program import compile_policy
from widemix.data.augment.registry import OPERATIONS
from widemix.data.batches import Batch
from widemix.data.grid import BACKGROUND, GUTTER, denormalise, grid, training_grid
from widemix.data.loader import EvalLoader, TrainLoader
from widemix.data.normalise_and_mix import normalise
from widemix.data.split import open_split
from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.formats.beton import open_beton
from widemix.recipe import load_recipe
from widemix.recipe.data import DataSection
from widemix.recipe.policy import parse_policy


def rp_mixer(digits):
    return load_recipe("recipes/digits/rp_mixer.yaml", [("data.path", str(digits))])


def test_the_grid_shows_what_the_first_step_trains_on(digits):
    recipe = rp_mixer(digits)
    topology = Topology(0, 1, 0, 1, torch.device("cpu"))
    train = train_section(recipe.train.global_batch, seed=3)
    loader = TrainLoader(recipe.data, recipe.augment, train, topology)
    with loader.batches(0) as batches:
        expected = next(batches)
    batch = first_batch(recipe, 20, seed=3)
    assert len(batch) == 32  # two groups of 16
    assert torch.equal(batch.inputs, expected.inputs[:32])
    assert torch.equal(batch.targets, expected.targets[:32])


def test_unmixed_images_are_as_many_as_were_asked_for(digits):
    """All of the split at most, in whole groups where they are mixed."""
    count = len(open_split(rp_mixer(digits).data, "train", open_beton))
    for mixup, group, most in (("0", 1, count), ("0.2", 16, count // 16 * 16)):
        keys = [("data.path", str(digits)), ("augment.mixup", mixup), ("augment.cutmix", "0")]
        recipe = load_recipe("recipes/digits/rp_mixer.yaml", keys)
        assert len(first_batch(recipe, 17, seed=3)) == (17 if group == 1 else 32)
        assert len(first_batch(recipe, most, seed=3)) == most
        with pytest.raises(InputError, match=f"--images {most + 1}: the training split has {most}"):
            first_batch(recipe, most + 1, seed=3)


def test_images_are_fp32_and_a_sheet_has_the_settings(digits):
    recipe = load_recipe("recipes/digits/rp_mixer.yaml", [("data.path", str(digits)), ("train.precision", "bf16")])
    assert first_batch(recipe, 1, seed=3).inputs.dtype == torch.float32
    augment_section = type(recipe.augment)
    for section, said in (
        (augment_section(), "augmentation: all defaults"),
        (augment_section(mixup=0.25, hflip=0.0), {"mixup 0.25", "hflip 0.0"}),
    ):
        text = augment.settings_line(recipe.model_copy(update={"augment": section}))
        assert (text if isinstance(said, str) else set(text.split(", "))) == said


def test_parts_of_a_sheet_have_their_headings():
    tiles = [np.full((height, width, 3), value, np.uint8) for height, width, value in ((20, 300, 1), (9, 40, 2))]
    sheet = np.asarray(augment.stacked([("one", tiles[0]), ("two\nlines", tiles[1])]))
    line = augment.TEXT + 7
    assert sheet.shape == (20 + 9 + 3 * line + GUTTER, 300, 3)
    for value, top, height, width in ((1, GUTTER + line, 20, 300), (2, GUTTER + 3 * line + 20, 9, 40)):
        rows, columns = np.nonzero((sheet == value).all(2))
        assert (rows.min(), rows.max() + 1, columns.min(), columns.max() + 1) == (top, top + height, 0, width)
    assert ((sheet != BACKGROUND) & (sheet > 2)).any()  # its headings


def test_undoing_the_normalisation_gives_the_bytes_back():
    section = DataSection(path="", num_classes=2)
    images = torch.arange(256, dtype=torch.uint8).repeat(3).reshape(1, 16, 16, 3)
    mean, std = (255 * torch.tensor(values)[:, None, None] for values in (section.mean, section.std))
    assert torch.equal(torch.from_numpy(denormalise(normalise(images, mean, std), section)), images)


def test_tiles_are_placed_in_rows_without_interpolation():
    tiles = [np.full((8, 8, 3), value, np.uint8) for value in (1, 2, 3)]
    sheet = grid(tiles, ["", "two\nlines", ""], columns=2)
    places = [(GUTTER, GUTTER), (GUTTER, 2 * GUTTER + 112), (None, GUTTER)]
    second_row = np.flatnonzero((sheet == 3).all(2).any(1))[0]
    for value, (y, x) in enumerate(places, 1):
        y = second_row if y is None else y
        assert (sheet[y : y + 112, x : x + 112] == value).all()
    assert (sheet[:, :GUTTER] == BACKGROUND).all()


def test_tiles_are_as_far_apart_as_their_captions_need():
    """Those of 60 pixels at twice their size; no column is left empty."""
    tiles = [np.full((60, 60, 3), value, np.uint8) for value in (1, 2)]
    width, line = 120, 16
    assert grid(tiles, ["", ""], columns=1).shape == (2 * (width + GUTTER) + GUTTER, width + 2 * GUTTER, 3)
    assert grid(tiles, ["a\nb\nc", "d"], columns=9).shape == (width + 3 * line + 2 * GUTTER, 2 * 120 + 3 * GUTTER, 3)
    large = np.arange(120 * 130 * 3).reshape(120, 130, 3).astype(np.uint8)
    assert np.array_equal(grid([large], [""], columns=8)[GUTTER:-GUTTER, GUTTER:-GUTTER], large)
    for small, factor in ((large[:60, :70], 2), (large[:50], 3), (large[:, :50], 1)):  # by their height
        enlarged = small.repeat(factor, 0).repeat(factor, 1)
        assert np.array_equal(grid([small], [""], 8)[GUTTER:-GUTTER, GUTTER:-GUTTER], enlarged)
    dark = (grid(tiles, ["", "x"], columns=2)[GUTTER + width :] < 100).all(2)
    assert dark[:, 2 * GUTTER + width :].any()
    assert not dark[:, : 2 * GUTTER + width].any()


def test_a_training_grid_names_what_its_images_are_made_of(digits):
    """The two likeliest classes, without those that label smoothing alone has given something."""
    section = DataSection(path=str(digits), num_classes=12, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 0.75))
    pixels = torch.randint(256, (4, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(values)[:, None, None] for values in (section.mean, section.std))
    targets = torch.full((4, 12), 0.01)
    targets[0, 7], targets[0, 0] = 0.85, 0.05
    targets[1, 9], targets[1, 10] = 0.3, 0.6
    targets[2, :3] = torch.tensor([0.2, 0.5, 0.3])
    batch = Batch((pixels / 255 - mean) / std, targets, np.arange(4))
    captions = ["7: 0.85\n0: 0.05", "class 10: 0.60\n9: 0.30", "1: 0.50\n2: 0.30"]
    tiles = list(pixels.permute(0, 2, 3, 1).byte().numpy())
    assert np.array_equal(training_grid(batch, 3, section), grid(tiles[:3], captions, columns=8))
    number = Batch(batch.inputs, torch.ones(4, 1), np.arange(4))  # of which there is nothing to name
    assert np.array_equal(training_grid(number, 1, section), grid(tiles[:1], [""], columns=8))


def test_noise_beyond_black_and_white_is_clipped():
    section = DataSection(path="", num_classes=2)
    images = torch.tensor([-9.0, 9.0])[:, None, None, None].expand(2, 3, 1, 1)
    assert denormalise(images, section).reshape(2, 3).tolist() == [[0] * 3, [255] * 3]


def test_a_difference_is_amplified_and_stated():
    image = np.full((300, 150, 3), 100, np.uint8)

    def wrong(image, argument):
        changed = image.copy()
        changed[7, 9, 1] -= np.uint8(argument)  # darker: a difference below zero
        return changed

    comparison = Comparison("", None, (0.0, 1.0), "its peer", wrong, lambda image, _: image)
    tiles, captions = comparison_tiles(comparison, image)
    assert captions == ["ours 0", "ours 1", "its peer 0", "its peer 1", "identical", "max 1, mean 7e-06"]
    assert not tiles[4].any()
    assert tiles[5].max() == AMPLIFIED  # seen, though the tile is smaller than the image
    assert all(tile.shape == (100, 50, 3) for tile in tiles)
    assert tuple(zip(*np.nonzero(tiles[5]), strict=True)) == ((7 // 3, 9 // 3, 1),)
    alone = replace(comparison, theirs=None)
    tiles, captions = comparison_tiles(alone, image)
    assert (len(tiles), captions) == (2, ["ours 0", "ours 1"])
    for apart in (2.0, 100.0):  # twice as much is no more than white
        tiles, _ = comparison_tiles(replace(comparison, arguments=(apart,)), image)
        assert [tile.max() for tile in tiles] == [100, 100, 255]
    assert comparison_tiles(replace(comparison, arguments=(1.0,)), image)[1][:2] == ["ours", "its peer"]


def test_operations_that_move_pixels_are_compared_with_both_interpolations():
    comparisons = all_comparisons((1, 2, 3))
    moves = [f"{each.title}, {kind}" for kind in ("bilinear", "bicubic") for each in OPERATIONS if each.moves]
    others = [each.title for each in OPERATIONS if not each.moves]
    jitter = ["hue of colour jitter, turns", "gaussian_blur_prob, pixels"]
    assert [each.name for each in comparisons] == [*others, *moves, *jitter]
    numbers = [[each.number for each in OPERATIONS if each.moves is moving] for moving in (False, True)]
    assert [each.number for each in comparisons] == [*numbers[0], *numbers[1], *numbers[1], None, None]


def test_the_sheet_of_operations_names_those_of_the_policy(digits):
    keys = [("data.path", str(digits)), ("data.mean", "[0.1, 0.5, 0.9]"), ("data.std", "[1, 1, 1]")]
    recipe = load_recipe("recipes/digits/rp_mixer.yaml", [*keys, ("augment.auto_augment", "rand-m9-n2")])
    (_, before), *parts = augment.operation_parts(recipe)
    fill = (26, 128, 230)  # the colour of the data, of 255
    table = compile_policy(parse_policy("rand-m9-n2"), recipe.data.mean, recipe.data.interpolation).table
    section = recipe.data.model_copy(update={"eval_split": "train", "crop_pct": 1.0})
    with EvalLoader(section, 1, Topology(0, 1, 0, 1, torch.device("cpu"))).batches() as batches:
        first = denormalise(next(batches).inputs, section)
    assert np.array_equal(before, grid([first[0]], [""], 1))
    for comparison, (name, shown) in zip(all_comparisons(fill), parts, strict=True):
        note = "  (used by rand-m9-n2)" if comparison.number in set(table[:, 0]) else ""
        assert name == comparison.name + note
        assert np.array_equal(shown, grid(*comparison_tiles(comparison, first[0]), max(3, len(comparison.arguments))))
    assert 5 < sum(name.endswith("(used by rand-m9-n2)") for name, _ in parts) < len(parts)


def test_every_operation_of_the_sheet_is_its_peers():
    image = np.random.RandomState(0).randint(0, 256, (8, 8, 3)).astype(np.uint8)
    comparisons, before = all_comparisons((124, 116, 104)), image.copy()
    for comparison in comparisons:
        comparison.ours(image, comparison.arguments[-1])
        assert np.array_equal(image, before), comparison.name
    assert sum(comparison.peer == "Pillow" for comparison in comparisons) > 15
    for comparison in comparisons:
        _, captions = comparison_tiles(comparison, image)
        verdicts = set(captions[2 * len(comparison.arguments) :])
        allowed = {"Pillow refuses"} if comparison.name.startswith("Posterize") else set()
        if comparison.peer == "Pillow":
            assert verdicts - allowed == {"identical"}, comparison.name


def test_the_command_writes_both_sheets(digits, tmp_path, widemix):
    words = ("--data.path", digits, "--to", tmp_path, "--images", 9, "--seed", 4)
    code, said = widemix("analyse", "augment", "digits/mixer", *words)
    assert (code, str(tmp_path / "training.png") in said) == (0, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["operations.png", "training.png"]
    with Image.open(tmp_path / "training.png") as sheet:
        assert np.asarray(sheet).shape[1] == 8 * (112 + GUTTER) + GUTTER


def test_an_interrupted_image_leaves_what_was_there(tmp_path, system):
    path = tmp_path / "sheet.png"
    write_png(Image.new("RGB", (2, 2), (1, 2, 3)), path)
    before = path.read_bytes()

    def interrupted(image, file, **options):
        file.write(b"half")
        raise KeyboardInterrupt

    system({"PIL.Image.Image.save": interrupted})
    with pytest.raises(KeyboardInterrupt):
        write_png(Image.new("RGB", (2, 2)), path)
    assert [item.name for item in tmp_path.iterdir()] == ["sheet.png"]
    assert path.read_bytes() == before

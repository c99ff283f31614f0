"""Blending by tables, where the processor is able to: only where they are exact, else by arithmetic."""

import numpy as np
import pytest
from PIL import Image
from timm.data import auto_augment

from tests.data.augment.conftest import images_of
from widemix.data.augment import blend, filters, registry, tables
from widemix.data.augment.blend import blend_tables
from widemix.data.augment.operations import apply
from widemix.data.augment.scratch import scratch_for

NAMED = {
    registry.COLOR: auto_augment.color,
    registry.CONTRAST: auto_augment.contrast,
    registry.BRIGHTNESS: auto_augment.brightness,
    registry.SHARPNESS: auto_augment.sharpness,
}


def below(whole: int, distance: int) -> float:
    """A factor of which `distance` times is just below `whole`."""
    return float(np.nextafter(np.float32(whole) / np.float32(distance), np.float32(0)))


HARD = [below(17, 100), below(3, 7), below(2, 3), below(100, 3), below(1, 255), below(508, 255), 0.0, 1.0, 1e-7, 1e30]


def sampled(count: int) -> list[float]:
    return np.random.RandomState(0).uniform(0.0, 2.0, count).tolist()


@pytest.mark.parametrize("factors", [sampled(200), HARD], ids=["sampled", "hard"])
def test_tables_of_every_base_and_value_are_pillows_arithmetic(factors):
    certain = 0
    made = np.empty((3, 256), np.uint8)
    base, value = np.mgrid[0:256, 0:256]
    up, down = np.maximum(value - base, 0), np.maximum(base - value, 0)
    for factor in np.float32(factors):
        if blend_tables(factor, made):
            certain += 1
            exact = base.astype(np.float32) + factor * (value - base).astype(np.float32)
            found = base + made[0, up].astype(int) - made[1, down]
            assert np.array_equal(found.clip(0, 255), exact.clip(0, 255).astype(int)), factor
    assert certain >= (2 if factors is HARD else 0.9 * len(factors))  # 0 and 1 are certain


def test_what_rounding_decides_is_not_left_to_tables():
    made = np.empty((3, 256), np.uint8)
    uncertain = [factor for factor in HARD if not blend_tables(np.float32(factor), made)]
    assert {below(3, 7), below(2, 3), below(1, 255), 1e-7} <= set(uncertain)
    assert not {0.0, 1.0} & set(uncertain)
    assert not blend_tables(np.float32(-0.5), made)


@pytest.mark.parametrize("operation", NAMED, ids=lambda n: NAMED[n].__name__)
@pytest.mark.parametrize("size", [(3, 3), (5, 22), (32, 33)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_certain_or_not_it_is_pillows(size, operation):
    for image in images_of(*size):
        for factor in HARD + sampled(10):
            if factor > 100:  # Pillow's C code leaves it undefined
                continue
            ours = image.copy()
            apply(ours, operation, factor, False, 0, scratch_for(*size))
            assert np.array_equal(ours, NAMED[operation](Image.fromarray(image), factor)), factor


def test_other_processors_and_no_compiler_give_the_same(monkeypatch):
    """The code for processors without the C library's fast paths, run as Python."""
    for module, name in [
        (blend, "_sum_luma"),
        (blend, "_blend_with_luma"),
        (blend, "look_up_one"),
        (filters, "_sharpen_image"),
        (tables, "_count_values"),
        (tables, "_look_up"),
    ]:
        monkeypatch.setattr(module, name, lambda *_: False)
    monkeypatch.setattr(blend, "_blend_with_gray", blend._blend_with_gray.py_func)
    for function in ("_add_three", "_sharpen"):
        monkeypatch.setattr(filters, function, getattr(filters, function).py_func)
    scratch = scratch_for(13, 14)
    for image in images_of(13, 14)[:3]:
        for factor in (0.3, 1.7):
            ways = {
                registry.COLOR: lambda p, f: blend.color.py_func(p.reshape(-1), f, scratch.tables),
                registry.CONTRAST: lambda p, f: blend.contrast.py_func(p.reshape(-1), f, scratch.table),
                registry.BRIGHTNESS: lambda p, f: blend.brightness.py_func(p.reshape(-1), f, scratch.table),
                registry.SHARPNESS: lambda p, f: filters.sharpness.py_func(
                    p.reshape(13, -1), f, scratch.rows, scratch.columns, scratch.tables
                ),
            }
            for operation, way in ways.items():
                ours = image.copy()
                way(ours, factor)
                assert np.array_equal(ours, NAMED[operation](Image.fromarray(image), factor)), (operation, factor)
        counts = np.empty((3, 256), np.int32)
        tables.count_values.py_func(image.reshape(-1), counts)
        for channel in range(3):
            assert np.array_equal(counts[channel], np.bincount(image[:, :, channel].reshape(-1), minlength=256))
        three = np.random.RandomState(1).randint(0, 256, (3, 256)).astype(np.uint8)
        ours = image.copy()
        tables.look_up.py_func(ours.reshape(-1), three)
        assert np.array_equal(ours, three[np.arange(3), image])

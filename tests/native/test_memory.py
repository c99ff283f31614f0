"""The compiled code frees what it allocates, of damaged images too: an epoch calls it millions of times."""

import ctypes
import gc
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from tests.data.test_decode import KINDS, by_pillow, progressive, scene, written
from tests.models.blocks import make_networks
from widemix.data.augment.batch import scratch_for
from widemix.data.augment.operations import apply
from widemix.data.augment.registry import ROTATE
from widemix.data.decode import random_boxes
from widemix.data_prep.jpeg import FAILED, TOO_LARGE, library, pack, run_codec, unpack
from widemix.models.batch_last import by_c
from widemix.models.permutation import reorder_columns

CALLS = 30
LEAST = 24  # bytes that malloc takes for the smallest of what it gives


@pytest.fixture(scope="module", autouse=True)
def _only_new_objects():
    """Leave what other tests have made out of the searches for garbage, of which there are hundreds here."""
    gc.collect()
    gc.freeze()


class _Counts(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [("numbers", ctypes.c_size_t * 10)]


def in_use() -> int:
    """The bytes that malloc has given to this process and not got back."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("this C library does not count what is in use: glibc 2.33 and later do")
    libc.mallinfo2.restype = _Counts
    numbers = libc.mallinfo2().numbers
    return numbers[4] + numbers[7]  # hblkhd and uordblks


def assert_frees(action: Callable[[], object], least: int = LEAST, used: Callable[[], int] = in_use) -> None:
    """Of some rounds of calls one leaves less than `least` bytes a call in use: others may fill caches of Python."""
    grown = []
    for _ in range(6):
        gc.collect()
        before = used()
        for _ in range(CALLS):
            action()
        gc.collect()
        grown.append(used() - before)
        if grown[-1] < CALLS * least:
            return
    pytest.fail(f"{CALLS} calls leave {grown} bytes")


@pytest.fixture
def compiled():
    """The compiled library."""
    return library() or pytest.skip("there is no compiled code")


JPEGS = {kind: make(scene(0, 150, 100)) for kind, make in KINDS.items() if kind not in ("4:4:0", "4:1:1")}
ODD = {"damaged": JPEGS["4:2:0"][:900], "without scans": progressive(0, 2, (150, 100))}


@pytest.mark.parametrize("kind", [*JPEGS, *ODD])
def test_jpegs_that_are_written_anew_are_freed(compiled, kind):
    data = (JPEGS | ODD)[kind]
    room = 2 * len(data) + 4096
    assert_frees(lambda: run_codec(compiled.restart_jpeg, data, room, 4))
    assert_frees(lambda: run_codec(compiled.shrink_jpeg, data, room, 60, 40, 90, 4))
    assert_frees(lambda: unpack(pack(data)[0]) if pack(data)[0] else None)
    assert_frees(lambda: compiled.check_jpeg(data, ctypes.c_int64(len(data)), ctypes.create_string_buffer(200)))


@pytest.mark.parametrize(("codec", "settings"), [("restart_jpeg", (4,)), ("shrink_jpeg", (60, 40, 90, 4))])
@pytest.mark.parametrize(
    ("data", "outcome"), [(JPEGS["4:2:0"], TOO_LARGE), (b"no JPEG", FAILED)], ids=["large", "none"]
)
def test_jpegs_that_do_not_fit_are_freed(compiled, codec, settings, data, outcome):
    work = lambda: run_codec(getattr(compiled, codec), data, 8, *settings)  # noqa: E731
    assert work()[0] == outcome
    assert_frees(work)


def on_a_thread(work: Callable[[], object]) -> None:
    """What a thread kept for its next image goes with it."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("what", ["packed", "moved"])
def test_what_a_thread_keeps_for_its_next_image_is_freed(compiled, what):
    moved = np.zeros((60, 90, 3), np.uint8), ROTATE, 20.0, True, np.uint32(0), scratch_for(60, 90)
    work = partial(pack, JPEGS["4:2:0"]) if what == "packed" else partial(apply, *moved)
    assert_frees(lambda: on_a_thread(work), least=1000)  # Python's threads take some for a while


@pytest.mark.parametrize("how", ["bytes", "segments", "coefficients"])
@pytest.mark.parametrize("threaded", [False, True])
def test_decoded_images_are_freed(tmp_path, how, threaded):
    kinds = ("4:2:0", "4:4:4", "grey") if how == "coefficients" else JPEGS
    more = [] if how == "coefficients" else [by_pillow(scene(1, 333, 250))]
    decoder = written(tmp_path / "a.beton", [*(JPEGS[kind] for kind in kinds), *more], how)
    samples, beton = np.arange(len(decoder.beton)), decoder.beton
    boxes = random_boxes(samples, beton.height, beton.width, 3, 0, (0.01, 1.0), (0.5, 2.0), 0.5)
    images = np.empty((len(samples), 24, 24, 3), np.uint8)
    np.memmap(beton.path, np.uint8, "r+")[int(beton.offset[0]) + 300 :][:200] ^= 0x55
    read = lambda: decoder.try_read(samples, boxes, samples % 2 == 0, images, threads=1)  # noqa: E731
    assert_frees((lambda: on_a_thread(read)) if threaded else read)


@pytest.mark.parametrize("shape", ["mixer", "rp s_mixer"])
def test_a_block_of_a_mixer_is_freed(shape):
    _, network = make_networks(shape, torch.float32)
    images = torch.randn(16, 16, 6, requires_grad=True)
    block = network.blocks[0]
    if not by_c.takes(block, images):
        pytest.skip("this machine computes blocks by torch alone")
    assert_frees(lambda: by_c.forward(block, images).sum().backward(), least=1000)  # torch keeps some 50 at times


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_columns_that_are_moved_are_freed(dtype):
    features, index = torch.randn(11, 40).to(dtype), torch.randperm(40).int()
    assert_frees(lambda: reorder_columns(features, index, back=True))

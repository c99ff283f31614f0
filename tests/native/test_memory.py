"""The compiled code frees what it allocates, of damaged images too: an epoch calls it millions of times."""

import ctypes
import gc
import itertools
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from tests.data.test_decode import KINDS, by_pillow, progressive, scene, written, written_as_coefficients
from tests.models.blocks import make_networks
from widemix.data.augment.operations import apply
from widemix.data.augment.registry import ROTATE
from widemix.data.augment.scratch import scratch_for
from widemix.data.decode import random_boxes
from widemix.data_prep.coefficients import pack, unpack
from widemix.data_prep.restart import FAILED, TOO_LARGE, library, run_codec
from widemix.models.batch_last import by_c
from widemix.models.reorder import reorder_columns

CALLS = 30
LEAST = 24  # bytes that malloc takes for the smallest of what it gives


@pytest.fixture(scope="module", autouse=True)
def _only_new_objects():
    """Leave what other tests have made out of the searches for garbage, of which there are hundreds here."""
    gc.collect()
    gc.freeze()


class _Counts(ctypes.Structure):
    """glibc's `struct mallinfo2`, where these two are called hblkhd and uordblks."""

    _fields_ = [(f"others{number}", ctypes.c_size_t) for number in range(4)]
    _fields_ += [("mapped", ctypes.c_size_t), ("others4", ctypes.c_size_t), ("others5", ctypes.c_size_t)]
    _fields_ += [("in_use", ctypes.c_size_t), ("others6", ctypes.c_size_t), ("others7", ctypes.c_size_t)]


def in_use() -> int:
    """The bytes that malloc has given to this process and not got back."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("this C library does not count what is in use: glibc 2.33 and later do")
    libc.mallinfo2.restype = _Counts
    counts = libc.mallinfo2()
    return counts.in_use + counts.mapped


def assert_frees(action: Callable[[], object], least: int = LEAST) -> None:
    """Of some rounds of calls one leaves less than `least` bytes a call in use: others may fill caches of Python."""
    grown = []
    for _ in range(6):
        gc.collect()
        before = in_use()
        for _ in range(CALLS):
            action()
        gc.collect()
        grown.append(in_use() - before)
        if grown[-1] < CALLS * least:
            return
    pytest.fail(f"{CALLS} calls leave {grown} bytes")


@pytest.mark.parametrize(("kept", "too_many"), [(LEAST, True), (LEAST - 1, False)])
def test_what_malloc_gives_at_least_may_not_be_left_by_each_call(monkeypatch, kept, too_many):
    used = itertools.count(step=CALLS * kept)  # before and after each round
    monkeypatch.setattr(sys.modules[__name__], "in_use", lambda: next(used))
    with pytest.raises(pytest.fail.Exception, match="30 calls leave") if too_many else nullcontext():
        assert_frees(lambda: None)


def test_what_is_kept_is_counted():
    kept = []
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    with pytest.raises(pytest.fail.Exception, match="30 calls leave"):
        assert_frees(lambda: kept.extend(libc.malloc(ctypes.c_size_t(LEAST)) for _ in range(20)))  # others free some


@pytest.fixture
def compiled():
    """The compiled library."""
    return library() or pytest.skip("there is no compiled code")


JPEGS = {kind: make(scene(0, 150, 100)) for kind, make in KINDS.items() if kind not in ("4:4:0", "4:1:1")}
DAMAGED = JPEGS["4:2:0"][:900]


@pytest.mark.parametrize("kind", [*JPEGS, "damaged", "without scans"])
def test_of_jpegs_that_are_written_anew(compiled, kind):
    data = {"damaged": DAMAGED, "without scans": progressive(0, 2, (150, 100))}.get(kind) or JPEGS[kind]
    room = 2 * len(data) + 4096
    assert_frees(lambda: run_codec(compiled.restart_jpeg, data, room, 4))
    assert_frees(lambda: run_codec(compiled.shrink_jpeg, data, room, 60, 40, 90, 4))
    assert_frees(lambda: unpack(pack(data)[0]) if pack(data)[0] else None)
    assert_frees(lambda: compiled.check_jpeg(data, ctypes.c_int64(len(data)), ctypes.create_string_buffer(200)))


def test_of_jpegs_that_do_not_fit_or_are_none(compiled):
    codecs = ((compiled.restart_jpeg, (4,)), (compiled.shrink_jpeg, (60, 40, 90, 4)))
    for codec, settings in codecs:
        for data, outcome in ((JPEGS["4:2:0"], TOO_LARGE), (b"no JPEG", FAILED)):
            assert run_codec(codec, data, 8, *settings)[0] == outcome
            assert_frees(lambda codec=codec, data=data, settings=settings: run_codec(codec, data, 8, *settings))


@pytest.mark.parametrize("what", ["packed", "moved"])
def test_of_what_a_thread_keeps_for_its_next_image(compiled, what):
    image, packed = np.zeros((60, 90, 3), np.uint8), JPEGS["4:2:0"]
    actions = {
        "packed": lambda: pack(packed),
        "moved": lambda: apply(image, ROTATE, 20.0, True, np.uint32(0), scratch_for(60, 90)),
    }

    def on_a_thread() -> None:
        thread = threading.Thread(target=actions[what])
        thread.start()
        thread.join()

    assert_frees(on_a_thread, least=1000)  # Python's threads take some for a while


@pytest.fixture(params=["as they are", "segments", "coefficients"])
def decoder(request, tmp_path):
    """Of small and large images, and of damaged ones but for coefficients."""
    jpegs = [*JPEGS.values(), by_pillow(scene(1, 333, 250))]
    if request.param == "coefficients":
        return written_as_coefficients(tmp_path / "a.beton", [JPEGS["4:2:0"], JPEGS["4:4:4"], JPEGS["grey"]])
    return written(tmp_path / "a.beton", jpegs, segments=request.param == "segments")


@pytest.mark.parametrize("on_a_thread", [False, True])
def test_of_what_is_decoded(decoder, on_a_thread):
    """In a thread of its own too, which ends: what it kept for its next image goes with it."""
    samples, beton = np.arange(len(decoder.beton)), decoder.beton
    boxes = random_boxes(samples, beton.height, beton.width, 3, 0, (0.01, 1.0), (0.5, 2.0), 0.5)
    images = np.empty((len(samples), 24, 24, 3), np.uint8)
    damaged = np.memmap(beton.path, np.uint8, "r+")
    damaged[int(beton.offset[0]) + 300 :][:200] ^= 0x55

    def read() -> None:
        decoder.try_read(samples, boxes, samples % 2 == 0, images, threads=1)

    def read_on_a_thread() -> None:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()

    assert_frees(read_on_a_thread if on_a_thread else read)


@pytest.mark.parametrize("shape", ["mixer", "rp s_mixer"])
def test_of_a_block_of_a_mixer(shape):
    _, network = make_networks(shape, torch.float32)
    images = torch.randn(16, 16, 6, requires_grad=True)
    block = network.blocks[0]
    if not by_c.takes(block, images):
        pytest.skip("this machine computes blocks by torch alone")

    def step() -> None:
        by_c.forward(block, images).sum().backward()

    assert_frees(step, least=1000)  # torch keeps some 50 at times


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_of_columns_that_are_moved(dtype):
    features, index = torch.randn(11, 40).to(dtype), torch.randperm(40).int()
    assert_frees(lambda: reorder_columns(features, index, back=True))

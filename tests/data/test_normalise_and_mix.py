"""Normalising, erasing and mixup in one kernel: the numbers of doing them one after the other, bit for bit."""

import copy
import pickle
import sys

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu_kernels import COMPILED, DEVICE, RUNS, check_accesses, compile_instead, run_interpreted
from widemix.data import normalise_and_mix as module
from widemix.data.augment.erase import Erasing, sample_erasing
from widemix.data.mixup import Mixture, sample_mixture
from widemix.data.normalise_and_mix import NormaliseAndMix, normalise_and_mix
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import IMAGENET_MEAN, IMAGENET_STD, DataSection

pytest.importorskip("triton", reason="Triton is missing")
from widemix.data import normalise_and_mix_triton

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MODES = [None, "const", "rand", "pixel"]
MIXES: dict[str, dict] = {
    "nothing": {},
    "groups": {"mixup": 0.8, "cutmix": 1.0, "mixup_prob": 0.8},
    "pairs": {"mixup": 0.8, "cutmix": 1.0, "mix_mode": "pair"},
    "each": {"mixup": 0.8, "cutmix": 1.0, "mix_mode": "elem", "mixup_prob": 0.8},
}
ROUNDS = {FP32: 0.0, FP16: 0.0, BF16: 2**-7}  # the interpreter rounds down to bf16


@pytest.mark.long
@COMPILED
def test_by_the_interpreter(pytestconfig):
    run_interpreted(__file__, pytestconfig)


@pytest.fixture(autouse=True)
def accesses_stay_inside(monkeypatch):
    check_accesses(normalise_and_mix_triton, monkeypatch)


def sampled(count: int, side: int, mode: str | None, mix: str) -> tuple[torch.Tensor, Erasing | None, Mixture | None]:
    """Images, and what is done with them; of up to three boxes some overlap."""
    images = torch.from_numpy(np.random.RandomState(0).randint(0, 256, (count, side, side, 3), np.uint8))
    section = AugmentSection(re_prob=0.7, re_count=3, re_mode=mode or "const", mix_group=4, **MIXES[mix])
    erasing = sample_erasing(np.arange(count), side, section, 1, 2) if mode else None
    mixture = sample_mixture(count, side, section, 1, 5, 3) if section.mixes_images else None
    return images, erasing, mixture


def both_ways(images: torch.Tensor, erasing: Erasing | None, mixture: Mixture | None, dtype: torch.dtype):
    mean, std = (255 * torch.tensor(of, device=DEVICE)[:, None, None] for of in (IMAGENET_MEAN, IMAGENET_STD))
    arguments = images, mean, std, dtype, erasing, mixture
    return normalise_and_mix_triton.normalise_and_mix_at_once(*arguments), normalise_and_mix(*arguments)


@pytest.mark.one_in(5)
@RUNS
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("count", "side"), [(8, 32), (4, 27), (4, 1)])  # of images in two groups, in one
def test_the_kernel_gives_the_numbers_of_the_steps(count, side, mode, mix):
    found, expected = both_ways(*sampled(count, side, mode, mix), FP32)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


@RUNS
@pytest.mark.parametrize("dtype", ROUNDS)
def test_they_are_rounded_at_the_end(dtype):
    found, expected = both_ways(*sampled(8, 32, "pixel", "groups"), dtype)
    assert found.dtype == dtype
    assert ((found.float() - expected.float()).abs() <= ROUNDS[dtype] * expected.float().abs()).all()


@RUNS
def test_images_of_several_programs_and_no_box():
    images, _, mixture = sampled(4, 64, None, "groups")
    nothing = Erasing(np.zeros((0, 5), np.int64), np.zeros(0, np.uint64), "pixel")
    found, expected = both_ways(images, nothing, mixture, FP32)
    assert torch.equal(found, expected)


SECTION = DataSection(path="none", num_classes=10, image_size=27, mean=(0.0, 0.2, 0.4))


@RUNS
def test_it_writes_where_it_is_told_to(capsys):
    section = DataSection(path="none", num_classes=10, image_size=27)
    finisher, arguments = (
        NormaliseAndMix(section, torch.device(DEVICE), normalise_and_mix_triton.normalise_and_mix_at_once),
        sampled(8, 27, "rand", "nothing"),
    )
    for _ in range(2):  # the first call is by the steps
        to = torch.full((8, 27, 27, 3), torch.nan, device=DEVICE)
        images = finisher(arguments[0], FP32, *arguments[1:], to)
        assert images.data_ptr() == to.data_ptr()
        assert torch.equal(images, both_ways(*arguments, FP32)[1])
    assert finisher(arguments[0][:0]).shape == (0, 3, 27, 27)  # no kernel has an empty grid
    assert capsys.readouterr().err == ""


@COMPILED
def test_mean_and_deviation_are_there_when_it_is_made():
    """The thread that finishes batches has a stream of its own, which waits for no product in another."""
    on_gpu = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), options=None):
            result = operator(*arguments, **(options or {}))
            if isinstance(result, torch.Tensor) and result.is_cuda:
                on_gpu.append(operator.overloadpacket)
            return result

    with FakeTensorMode(), Recorder():
        NormaliseAndMix(DataSection(path="none", num_classes=10, image_size=27), torch.device("cuda"))
    assert on_gpu == [torch.ops.aten._to_copy] * 2


@COMPILED
@pytest.mark.parametrize("kind", [ModuleNotFoundError, ImportError])
def test_without_a_sound_triton_there_is_no_kernel(kind, monkeypatch, system):
    class Missing:
        def find_spec(name, *_):
            if name == normalise_and_mix_triton.__name__:
                raise kind("libcuda.so: no such file")

    assert module.by_triton.__wrapped__() is normalise_and_mix_triton.normalise_and_mix_at_once
    monkeypatch.delitem(sys.modules, normalise_and_mix_triton.__name__)
    system({"sys.meta_path": [Missing, *sys.meta_path]})
    assert module.by_triton.__wrapped__() is None


class Kernel:
    """Gives numbers that are off in the last bit of one, from its `wrong_from`-th call on."""

    calls, wrong_from = 0, 0

    def __new__(cls, *arguments) -> torch.Tensor:
        cls.calls += 1
        images = normalise_and_mix(*arguments)
        if cls.calls > cls.wrong_from:
            images[0, 0, 0, 0] = torch.nextafter(images[0, 0, 0, 0], images.new_tensor(9.0))
        return images


class WrongLater(Kernel):
    wrong_from = 1


def broken(*arguments) -> torch.Tensor:
    raise RuntimeError("PTX was compiled\nwith an unsupported toolchain")


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (Kernel, "its numbers are not PyTorch's"),
        (broken, "RuntimeError: PTX was compiled with an unsupported toolchain"),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_kernel_that_fails_or_is_wrong_is_not_used(kernel, reason, dtype, capsys):
    Kernel.calls, arguments = 0, sampled(8, 27, "pixel", "groups")
    finisher = NormaliseAndMix(SECTION, torch.device("cpu"), kernel)
    expected = NormaliseAndMix(SECTION, torch.device("cpu"))(arguments[0], dtype, *arguments[1:])
    for _ in range(3):
        assert torch.equal(finisher(arguments[0], dtype, *arguments[1:]), expected)
    [line] = capsys.readouterr().err.splitlines()
    assert reason in line
    assert Kernel.calls <= 1


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda one: pickle.loads(pickle.dumps(one))}


@pytest.mark.parametrize("way", COPIES)
def test_a_sound_kernel_is_checked_once_by_each_copy(way, capsys):
    WrongLater.calls, pixels = 0, sampled(8, 27, None, "nothing")[0]
    plain = NormaliseAndMix(SECTION, torch.device("cpu"))
    finisher = NormaliseAndMix(SECTION, torch.device("cpu"), WrongLater)
    assert [torch.equal(finisher(pixels), plain(pixels)) for _ in range(3)] == [True, False, False]
    assert not capsys.readouterr().err
    WrongLater.calls = 0
    other = COPIES[way](finisher)
    assert [torch.equal(other(pixels), plain(pixels)) for _ in range(2)] == [True, False]
    meta = COPIES[way](NormaliseAndMix(SECTION, torch.device("meta")))
    assert meta(pixels.to("meta")).device.type == "meta"


@pytest.mark.one_in(3)
@COMPILED
@pytest.mark.parametrize(
    ("gpu", "dtype", "mode", "mix"),
    [
        (70, FP16, "pixel", "groups"),
        (80, BF16, "pixel", "groups"),
        (90, BF16, "pixel", "groups"),
        (90, BF16, "rand", "groups"),
        (90, FP32, "const", "nothing"),
        (90, BF16, None, "nothing"),
        (100, BF16, "pixel", "groups"),
    ],
)
def test_it_compiles_for_gpus_and_rounds_each_operation(gpu, dtype, mode, mix, tmp_path, monkeypatch):
    seen = []

    def check(kernel, arguments, compiled):
        assert "fma" not in compiled.asm["ptx"]
        assert "div.rn.f32" in compiled.asm["ptx"]
        seen.append(kernel)

    compile_instead(monkeypatch, gpu, tmp_path, check)
    images, erasing, mixture = sampled(8, 224, mode, mix)
    mean, std = (255 * torch.tensor(of)[:, None, None] for of in (IMAGENET_MEAN, IMAGENET_STD))
    normalise_and_mix_triton.normalise_and_mix_at_once(images, mean, std, dtype, erasing, mixture)
    assert len(seen) == 1

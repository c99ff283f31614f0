"""The operations by Triton: on a GPU, by its interpreter on the CPU, and compiled for GPUs that are not there."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.clone import CLONE
from tests.gpu_kernels import COMPILED, DEVICE, RUNS, check_accesses, compile_instead, run_interpreted
from tests.models.blocks import assert_near, distance, make_networks, step
from widemix.models import permutation
from widemix.models.batch_last import by_torch, operations

pytest.importorskip("triton", reason="Triton is missing")
from widemix.models.batch_last import by_triton

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# Tokens, channels and images: single ones, parts of blocks, several blocks of images, columns, rows and channels.
SIZES = [(1, 1, 1), (3, 6, 1), (7, 12, 5), (3, 6, 130), (2, 48, 100), (2, 1030, 9)]
# Of the features, and of what is computed from them.
TYPES = [(FP32, FP32), (BF16, BF16), (FP16, FP16), (FP32, BF16), (BF16, FP32)]
EVERYTHING = SimpleNamespace(**{**vars(by_triton), "takes": lambda *_: True})  # also what the interpreter runs
TOLERANCE = {FP32: 5e-6, FP16: 2e-3, BF16: 1.6e-2}  # the interpreter rounds down


@pytest.mark.long
@COMPILED
def test_by_the_interpreter(pytestconfig):
    run_interpreted(__file__, pytestconfig)


@pytest.fixture(autouse=True)
def accesses_stay_inside(monkeypatch):
    check_accesses(by_triton, monkeypatch)


def compare(name: str, *arguments) -> list[Tensor]:
    """What an operation gives, which is what it gives by PyTorch."""
    found, expected = (getattr(module, name)(*arguments) for module in (by_triton, by_torch))
    found, expected = ((each,) if isinstance(each, Tensor) else each for each in (found, expected))
    terms = 0.0
    if name == "norm_backward":  # terms of the gradient by x cancel, of a single channel all
        g, _, weight, _, _, scale, _ = arguments
        terms = math.prod(float(each.float().abs().max()) for each in (g, weight, scale))
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None
            continue
        assert (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
        tolerance = TOLERANCE[one.dtype]
        torch.testing.assert_close(
            one, other, rtol=tolerance, atol=tolerance * max(terms, float(other.float().abs().max()))
        )
    return found


def call_all(call, size: tuple[int, int, int], types: tuple[torch.dtype, torch.dtype], placed: bool, device: str):
    """Call each operation, for features of the first type and what is computed from them of the second."""
    torch.manual_seed(0)
    tokens, channels, batch = size
    index = permutation.random(tokens * channels, 0).to(device) if placed else None
    x, g = (torch.randn(tokens * channels, batch).to(device, each) for each in types)
    weight, bias = torch.randn(2, channels).to(device)
    _, mean, scale = call("norm", x, weight, bias, 1e-6, index, types[1])
    for more in (x, None):
        call("norm_backward", g, x, weight, index, mean, scale, more)
    bias = torch.randn(tokens).to(device)
    call("activate", x.view(tokens, -1), bias)
    call("activate_backward", g.view(tokens, -1), x.view(tokens, -1), bias.to(types[0]))
    for skip in (x, None):
        call("add", skip, g, bias, index)
        call("add", skip, g, None, index)
    call("add_backward", x, index, tokens, types[1])
    call("add_backward", x, index, 0, types[1])


@pytest.mark.one_in(5)
@RUNS
@pytest.mark.parametrize(("types", "placed"), [(types, True) for types in TYPES] + [(TYPES[1], False)])
@pytest.mark.parametrize("size", SIZES)
def test_operations_are_those_of_pytorch(size, types, placed):
    call_all(compare, size, types, placed, DEVICE)


@pytest.mark.one_in(2)
@RUNS
@pytest.mark.parametrize("shape", ["each layer and skip", "rp s_mixer", "no norm"])
def test_a_step_is_that_of_the_plain_blocks(shape, monkeypatch):
    monkeypatch.setitem(operations.BACKENDS, DEVICE, lambda: EVERYTHING)
    plain, other = make_networks(shape)
    x = torch.randn(5, 3, 8, 8).to(DEVICE)
    assert_near(step(other.to(DEVICE, FP32), x), step(plain.to(DEVICE), x.double()), 2e-5)


@RUNS
def test_a_step_under_autocast_is_as_near_as_pytorchs(monkeypatch):
    plain, other = (each.to(DEVICE) for each in make_networks("each layer and skip"))
    x = torch.randn(16, 3, 8, 8).to(DEVICE)
    exact, other, apart = step(plain, x.double()), other.float(), []
    for backend in (None, EVERYTHING):
        monkeypatch.setitem(operations.BACKENDS, DEVICE, lambda backend=backend: backend)
        with torch.autocast(DEVICE, BF16):
            apart.append(distance(step(other, x), exact))
    assert apart[1] < 1.2 * apart[0]


@RUNS
def test_gelu_and_its_slope_are_exact_everywhere():
    x = torch.linspace(-12, 12, 4001, device=DEVICE)[None]
    exact = x.double().requires_grad_()
    value = nn.functional.gelu(exact)
    value.sum().backward()
    none = torch.zeros(1, device=DEVICE)
    assert (by_triton.activate(x, none) - value).abs().max() < 2e-6
    assert (by_triton.activate_backward(torch.ones_like(x), x, none)[0] - exact.grad).abs().max() < 5e-7


@RUNS
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_number_that_is_not_one_stays_in_its_image(dtype):
    x = torch.tensor([[1.0, torch.nan], [2.0, 3.0]], dtype=dtype, device=DEVICE)
    one = torch.ones(2, device=DEVICE)
    normed, mean, scale = by_triton.norm(x, one, one, 1e-6, None, dtype)
    dx, *_ = by_triton.norm_backward(x, x, one, None, mean, scale, None)
    for found in (normed, dx, by_triton.activate(x, one), by_triton.add(x, x, one, None)):
        assert found.isnan()[:, 1].any()
        assert not found.isnan()[:, 0].any()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gpu_that_is_not_the_current_one():
    x, bias = torch.randn(6, 5, device="cuda:1"), torch.randn(6, device="cuda:1")
    compare("activate", x, bias)


@COMPILED
def test_what_computes_with_tensors_on_gpus(system):
    system({"torch.cuda.get_device_capability": lambda _: (9, 0)})
    with FakeTensorMode():
        single, double = (torch.empty(2, 2, dtype=dtype, device="cuda") for dtype in (FP32, FP64))
    assert operations.backend_of(single) is operations.backend_of(single, BF16) is by_triton
    assert operations.backend_of(double) is operations.backend_of(single, FP64) is by_torch
    assert operations.backend_of(single[:0]) is by_torch
    system({"torch.cuda.get_device_capability": lambda _: (6, 1)})
    assert operations.backend_of(single) is by_torch


@pytest.mark.long
@COMPILED
def test_pytorch_computes_where_triton_is_missing():
    script = """if True:
        import sys
        sys.modules["triton"] = None
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
        from widemix.models.batch_last import by_torch, operations
        assert operations.norm(torch.ones(2, 3), torch.ones(2), torch.ones(2), 1e-6)[0].shape == (2, 3)
        assert "widemix.models.batch_last.by_triton" not in sys.modules
        with FakeTensorMode():
            assert operations.backend_of(torch.empty(2, 2, device="cuda")) is by_torch
    """
    subprocess.run([sys.executable, "-c", script], cwd=CLONE, check=True)


@pytest.mark.long
@COMPILED
@pytest.mark.parametrize(
    ("gpu", "types", "size"),
    [
        (70, (FP16, FP16), (2, 768, 128)),  # the widths of Mixer-B/16
        (80, (FP32, BF16), (2, 768, 128)),
        (90, (FP32, BF16), (2, 768, 128)),
        (90, (BF16, BF16), (2, 768, 32)),
        (90, (FP32, BF16), (2, 256, 128)),
        (90, (BF16, BF16), (2, 256, 128)),
        (90, (BF16, FP32), (2, 768, 128)),
        (90, (FP32, FP32), (1, 1, 1)),  # arguments that are constants then
        (100, (BF16, BF16), (2, 768, 128)),
    ],
)
def test_kernels_compile_without_spills_and_second_reads(gpu, types, size, tmp_path, monkeypatch):
    kernels = set()

    def check(kernel, arguments, compiled):
        accesses = [compiled.asm["ttir"].count(f"tt.{name}") for name in ("load", "store")]
        if size[1] <= 256 or "norm" not in kernel.__name__:  # each is read or written once
            assert sum(accesses) == sum(isinstance(each, Tensor) for each in arguments)
        kernels.add(kernel)

    compile_instead(monkeypatch, gpu, tmp_path, check)
    call_all(lambda name, *arguments: getattr(by_triton, name)(*arguments), size, types, True, "cpu")
    assert len(kernels) == 6

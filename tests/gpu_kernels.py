"""Runs kernels in Triton on a GPU, by its interpreter on the CPU, and compiles them for GPUs that are not there."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read by Triton when kernels are defined
DEVICE = "cpu" if INTERPRETED else "cuda"
RUNS = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU; the interpreter runs it without"
)
COMPILED = pytest.mark.skipif(INTERPRETED, reason="of the compiler, not the interpreter")
_KINDS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint64: "*u64",
    torch.uint8: "*u8",
}


def run_interpreted(file: str, config: pytest.Config) -> None:
    """Run the tests of a file that run kernels, by the interpreter, in a process of their own."""
    words = "-m pytest -q --noconftest -p tests.selection -p no:cacheprovider"
    command = [sys.executable, *words.split(), file]
    command += ["--all"] if config.getoption("--all") else []
    # Without plugins of this machine, some of which refuse to run inside another run's process.
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def check_accesses(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every access of an interpreted kernel be to numbers of one of the tensors that `module._launch` got."""
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import interpreter_builder

    _patch_once_a_launch(monkeypatch)
    launch = module._launch
    load, store = interpreter_builder.create_masked_load, interpreter_builder.create_masked_store
    tensors: list[Tensor] = []

    def launched(*arguments, **constants):
        tensors[:] = [each for each in arguments if isinstance(each, Tensor)]
        launch(*arguments, **constants)

    def check(pointers, mask):
        reached = pointers.data[mask.data]
        spans = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors]
        assert not reached.size or any(start <= reached.min() and reached.max() < end for start, end in spans)

    def loaded(pointers, mask, *rest):
        check(pointers, mask)
        return load(pointers, mask, *rest)

    def stored(pointers, values, mask, *rest):
        check(pointers, mask)
        return store(pointers, values, mask, *rest)

    monkeypatch.setattr(module, "_launch", launched)
    monkeypatch.setattr(interpreter_builder, "create_masked_load", loaded)
    monkeypatch.setattr(interpreter_builder, "create_masked_store", stored)


def _patch_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter put its functions in the place of Triton's once for each launch and module.

    It does so at every call of a function in a kernel too, which finds them replaced: that takes half of its time.
    """
    from triton.runtime import interpreter

    execute, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    scopes: dict[int, Any] = {}  # of this launch, at whose end the first is undone

    def launched(self, *arguments, **constants):
        scopes.clear()
        return execute(self, *arguments, **constants)

    def patched(function):
        module = id(function.__globals__)
        if module not in scopes:
            scopes[module] = patch(function)
        return scopes[module]

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    monkeypatch.setattr(interpreter, "_patch_lang", patched)


def compile_instead(monkeypatch: pytest.MonkeyPatch, gpu: int, folder: Path, check: Callable[..., object]) -> None:
    """Let launched kernels be compiled for a compute capability, without registers spilled, and not be run.

    `check` gets kernel, arguments and what was compiled.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    def run(kernel, *arguments, grid, warmup, **options):
        source, others = _source(kernel, arguments, options)
        compiled = triton.compile(source, target=GPUTarget("cuda", gpu, 32), options=others)
        assert _spilled(compiled.asm["cubin"], folder / "kernel") == 0
        check(kernel, arguments, compiled)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setattr(triton.JITFunction, "run", run)


def _source(kernel: Any, arguments: tuple, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The source that Triton compiles of a kernel for such arguments, and its options: as `JITFunction.run` does."""
    from triton.compiler import ASTSource

    constants = {name: value for name, value in options.items() if name in kernel.arg_names}
    named = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
    kinds = {name: "constexpr" if name in constants else _kind(value) for name, value in named.items()}
    values = {name: value.data_ptr() if isinstance(value, Tensor) else value for name, value in named.items()}
    fixed, aligned = {}, {}
    for n, (name, value) in enumerate(values.items()):
        if kinds[name] == "constexpr":
            fixed[n,] = value
        elif isinstance(value, int) and value % 16 == 0:
            aligned[n,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, kinds, fixed, aligned), {key: options[key] for key in options.keys() - constants}


def _kind(value: object) -> str:
    """What Triton calls an argument's type: None and 1 are constants."""
    if isinstance(value, Tensor):
        return _KINDS[value.dtype]
    return "constexpr" if value in (None, 1) else "i32" if isinstance(value, int) else "fp32"


def _spilled(cubin: bytes, path: Path) -> int:
    """Bytes of memory that a thread uses for what its registers have no room for."""
    import triton

    path.write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", path]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"STACK:(\d+)", shown)
    assert found, shown
    return int(found[1])

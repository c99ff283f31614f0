"""A trace of some steps by PyTorch's profiler, for Perfetto (ui.perfetto.dev), chrome://tracing or TensorBoard."""

import os
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function


def torch_profiler(**options) -> profile:
    """Return PyTorch's profiler of this machine's devices."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    else:  # libkineto would print "ERROR: gpuGetDeviceCount failed"
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")
    # Torch 2.11 warns that a cycle's events are lost at the next, of which there is none. With acc_events=True it
    # does not, but makes an object of each event at the end, of which a trace has no need.
    warnings.filterwarnings("ignore", "Warning: Profiler clears events")
    return profile(activities=activities, **options)


class Profiler:
    """Traces the steps from `first` up to, but not including, `stop`, to RUN/profile/. Use it in a `with` block.

    A run that starts within the range traces the rest of it. Each step is a slice ProfilerStep#<step>, the name that
    TensorBoard's plugin knows steps by. Tracing makes these steps slower.
    """

    def __init__(self, run_dir: Path, first: int, stop: int):
        self._folder, self._first, self._stop = run_dir / "profile", first, stop
        self._trace: profile | None = None
        self._slice: record_function | None = None  # of the step that is being traced
        self._began = 0
        self._step = 0

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        if self._trace:
            with suppress(OSError) if kind else nullcontext():
                self._finish(self._step + 1)

    def before(self, step: int) -> None:
        """Start or end the trace, before the step after `step` steps."""
        self._step = step
        if self._trace and step >= self._stop:
            self._finish(step)
        elif not self._trace and self._first <= step < self._stop:
            self._trace, self._began = torch_profiler(record_shapes=True), step
            self._trace.start()
        if self._trace:
            self._end_slice()
            self._slice = record_function(f"ProfilerStep#{step}")
            self._slice.__enter__()

    def _finish(self, step: int) -> None:
        assert self._trace
        self._end_slice()
        self._trace.stop()
        self._folder.mkdir(exist_ok=True)
        self._trace.export_chrome_trace(str(self._folder / f"steps-{self._began}-{step}.pt.trace.json.gz"))
        self._trace = None

    def _end_slice(self) -> None:
        if self._slice:
            self._slice.__exit__(None, None, None)
            self._slice = None

"""The JSON files of a run folder, and what those fields hold that are read by name: some come from strangers.

All other fields may hold anything. Only pydantic is imported: listing runs and judging a job's end need no torch.
"""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NotRequired, Required

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from widemix.errors import InputError, shown
from widemix.files import open_to_write, parse_json, read_regular
from widemix.metrics import METRICS, show_metric
from widemix.recipe.sections import TrainSection

LARGEST = 1e300  # of a number that can be plotted: the difference of two is finite too
Record = dict[str, Any]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Amount = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Time = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]  # s since 1970, of which there is a date


def is_number(value: Any) -> bool:
    """Whether a value of a line can be plotted."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


def _measured(content: Record) -> Record:
    for name in METRICS:
        for value in (content.get(name), content.get(f"ema_{name}")):
            if not (value is None or isinstance(value, float) or is_number(value)):
                raise ValueError(f"{name} is no number")
    return content


def _square(counts: list[list[int]]) -> list[list[int]]:
    if any(len(row) != len(counts) for row in counts):
        raise ValueError("its matrix is not square")
    return counts


class _Record(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]


class _Line(_Record, total=False):
    step: Required[Count]
    split: str
    epoch: Amount
    time: Time
    images_per_s: Amount
    event: str


class _Start(_Record, total=False):
    step: Required[Count]
    ranks: Count
    seconds: dict[str, Amount]
    time: Time
    logs: str
    memory_layout: str


class _EndedEarly(_Record):
    last_epoch: Count


class _Best(_Record):
    step: Count
    metric: str
    value: Annotated[float, Field(allow_inf_nan=False)]


class _Done(_Record):
    step: Count
    seconds: Amount
    best: NotRequired[_Best]
    ended_early: NotRequired[_EndedEarly]


class _Evaluation(_Record):
    step: Count
    data: str
    split: str
    ema: bool


class _Confusion(_Record):
    step: Count
    classes: list[str]
    counts: Annotated[list[list[Count]], AfterValidator(_square)]


ANY: TypeAdapter[Any] = TypeAdapter(_Record)
LINE: TypeAdapter[Any] = TypeAdapter(Annotated[_Line, AfterValidator(_measured)])
START: TypeAdapter[Any] = TypeAdapter(_Start)
DONE: TypeAdapter[Any] = TypeAdapter(Annotated[_Done, AfterValidator(_measured)])
EVALUATION: TypeAdapter[Any] = TypeAdapter(Annotated[_Evaluation, AfterValidator(_measured)])
CONFUSION: TypeAdapter[Any] = TypeAdapter(_Confusion)


def read_lines(path: Path, kind: TypeAdapter[Any] = ANY) -> list[Record]:
    """The whole lines of a file of JSON lines; none if there is no such file, `InputError` if one is damaged."""
    *whole, _ = read_regular(path).split(b"\n") if path.exists() else [b""]
    return [_parse(line, f"{path}, line {number}", kind) for number, line in enumerate(whole, start=1)]


def read_json(path: Path, kind: TypeAdapter[Any] = ANY) -> Record | None:
    """The content of a file of a run folder, None if there is none; `InputError` if it is damaged."""
    return _parse(read_regular(path), str(path), kind) if path.is_file() else None


def parse_record(text: bytes, kind: TypeAdapter[Any]) -> Record:
    """Return a record of this kind as JSON has it; raises `ValueError`, of which the message is one line."""
    try:
        content: Record = parse_json(text)
        kind.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}" if where else "no JSON object") from None
    except ValueError as error:  # also of bytes that are no text
        raise ValueError(f"not JSON ({error})") from None
    return content


def _parse(text: bytes, place: str, kind: TypeAdapter[Any]) -> Record:
    try:
        return parse_record(text, kind)
    except ValueError as error:
        raise InputError(f"{place}: is damaged, {error}; restore or remove it") from None


class Gains(BaseModel):
    """The best value of a metric so far, and the epochs (ended ones) of that and of the last evaluation."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    metric: str  # with the prefix ema_ that of the averaged weights
    best: float | None = None
    best_step: int = 0
    best_epoch: int = 0
    last_epoch: int = 0

    @classmethod
    def of(cls, train: TrainSection, known: "Gains | None") -> "Gains | None":
        """Return the gains of a run that goes on from a checkpoint with `known`; None without patience."""
        if train.patience_epochs is None or train.keep_best is None:
            return None
        return known if known and known.metric == train.keep_best else cls(metric=train.keep_best)

    def after(self, metrics: Mapping[str, float | None], step: int, epoch: int, least: float) -> "Gains":
        """With another evaluation, of which a gain below `least` does not count."""
        value = metrics.get(self.metric)
        sign = 1 if METRICS[self.metric.removeprefix("ema_")].higher else -1
        gain = -math.inf if value is None else math.inf if self.best is None else sign * (value - self.best)
        if gain > 0 and gain >= least:
            return Gains(metric=self.metric, best=value, best_step=step, best_epoch=epoch, last_epoch=epoch)
        return self.model_copy(update={"last_epoch": epoch})

    def end_run(self, train: TrainSection) -> bool:
        """Whether a run of this section ends after the last evaluation."""
        patience, waited = train.patience_epochs, self.last_epoch - self.best_epoch
        return patience is not None and waited >= patience and self.metric == train.keep_best

    def sentence(self) -> str:
        """Return when and why a run has ended early."""
        if self.best is None:
            return f"ended early, after epoch {self.last_epoch}: its {self.metric} was never finite"
        best, at = show_metric(self.metric, self.best), f"epoch {self.best_epoch}, step {self.best_step}"
        return f"ended early, after epoch {self.last_epoch}: best {best} ({at})"


def describe_event(event: dict[str, Any]) -> str:
    """Return an event as a sentence; `InputError` if it is none of those that a run has."""
    match event:
        case {"event": "step_skipped", "step": step, "loss": loss, "grad_norm": norm}:
            return f"step {step} was skipped: its loss is {loss}, its gradient norm {norm}"
        case {"event": "loss_spike", "step": step, "loss": loss, "expected": mean}:
            return f"the loss of step {step} is {loss}, far above the mean of {mean} before it"
        case {"event": "save_failed", "step": step, "reason": reason}:
            return f"no checkpoint was saved at step {step}: {reason}"
        case {"event": "evaluation_failed", "step": step, **metrics}:
            bad = ", ".join(f"{name} {value}" for name, value in metrics.items() if name != "split")
            return f"the evaluation at step {step} failed: {bad}"
        case {
            "event": "rollback",
            "step": step,
            "from": last,
            "skipped_ranges": [int(first), int(end)],
            "reason": why,
        }:
            return f"rolled back from step {last} to step {step}, skipping data steps {first} to {end - 1}: {why}"
        case {"event": "ended_early", **fields}:
            with suppress(ValueError):
                gains = {name: value for name, value in fields.items() if name in Gains.model_fields}
                return f"the run {Gains.model_validate(gains).sentence()}"
        case {"event": "stopped", "step": step}:
            return f"the run was asked to stop, and ended after step {step}"
        case {"event": "diverged", "step": step, "reason": reason}:
            return f"the run diverged at step {step}: {reason}"
    raise InputError(f"no such event: {shown(event)}")


EVALUATIONS = (
    "evaluations.jsonl"  # what `widemix eval` measured of a run: only the process that trains writes metrics.jsonl
)


def record_evaluation(checkpoint: Path, line: Mapping[str, Any]) -> str | None:
    """Append a line to the file of the checkpoint's run; return why, if it cannot be written.

    Nothing is written for a checkpoint that has been copied out of its run.
    """
    run = checkpoint.resolve().parent.parent
    if checkpoint.parent.is_symlink():
        return f"{checkpoint.parent}: is a link, to a folder of which {EVALUATIONS} is left alone"
    if not (run / "recipe.yaml").is_file():
        return None
    finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in line.items()}
    try:
        with open_to_write(run / EVALUATIONS, "a") as file:
            file.write(json.dumps(finite) + "\n")
    except OSError as error:
        return f"{run / EVALUATIONS}: cannot be written to ({error.strerror})"
    return None

"""The JSON files of a run folder, and what those fields hold that are read by name: some come from strangers.

All other fields may hold anything. Only pydantic is imported: listing runs and judging a job's end need no torch.
"""

from pathlib import Path
from typing import Annotated, Any, NotRequired, Required

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from widemix.errors import InputError
from widemix.files import parse_json, read_regular
from widemix.metrics import METRICS

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

"""Which nodes are sick or slow, from what all ranks said of themselves: a pure function.

A node is held against the others: what most have is right, and the median (of two, the better) is what to expect.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

SLOW = 0.6  # of what the others reach in computing: less is a throttled or shared node
NARROW = 0.4  # the same of links and disks, which vary more
SKEW = 1.0  # seconds between clocks
GIB = 1 << 30


class Complaint(NamedTuple):
    """`sick`: leave the node out; `note`: training can run."""

    host: str
    what: str
    found: str
    state: Literal["sick", "note"] = "sick"


def judge(surveys: Sequence[dict[str, Any]]) -> list[Complaint]:
    """All complaints, sick nodes first. `surveys` are the ranks' in order; ranks that are missing are not here."""
    complaints = [*_odd(surveys), *_ill(surveys), *_small(surveys)]
    complaints += _slow(surveys, "computing", "flops", SLOW, lambda v: f"{v / 1e9:,.0f} GFLOP/s")
    complaints += _slow(surveys, "CPU", "cpu", SLOW, lambda v: f"{v:.0%} of one for a busy thread", "note")
    for survey in surveys:
        if survey.get("disk") == 0:
            complaints.append(Complaint(survey["host"], "disk", "the folder of --data has no .beton here"))
    complaints += _slow(
        [s for s in surveys if s.get("disk")], "disk", "disk", NARROW, lambda v: f"{v / 1e6:,.0f} MB/s"
    )
    best = [survey | {"link": max(survey["pairs"])} for survey in surveys if survey.get("pairs")]
    complaints += _slow(best, "network", "link", NARROW, lambda v: f"{8 * v / 1e9:,.2f} Gbit/s with its best partner")
    return sorted(dict.fromkeys(complaints), key=lambda c: (c.state != "sick", c.host))


def _odd(surveys: Sequence[dict[str, Any]]) -> list[Complaint]:
    """What differs from most others': a version, a GPU's kind, the number of ranks of a node."""
    ranks = Counter(survey["host"] for survey in surveys)
    found = []
    for name in surveys[0]["versions"]:
        found += _minority(name, {s["host"]: s["versions"].get(name, "absent") for s in surveys})
    found += _minority("GPU", {s["host"]: (s["gpu"] or {}).get("name", "none") for s in surveys})
    return found + _minority("ranks", {host: str(count) for host, count in ranks.items()})


def _minority(what: str, values: dict[str, str]) -> list[Complaint]:
    """Of a value by node; a tie goes to the first node."""
    usual = Counter(values.values()).most_common(1)[0][0]
    return [Complaint(host, what, f"{has}, elsewhere {usual}") for host, has in values.items() if has != usual]


def _ill(surveys: Sequence[dict[str, Any]]) -> list[Complaint]:
    found = []
    for survey in surveys:
        gpu = survey["gpu"] or {}
        name = f"GPU {survey['local_rank']}"
        if "ill" in gpu:
            found.append(Complaint(survey["host"], name, gpu["ill"]))
        if gpu.get("celsius", 0) >= 90:
            found.append(Complaint(survey["host"], name, f"{gpu['celsius']} C", "note"))
        if gpu.get("used_mib", 0) > 4096:
            found.append(Complaint(survey["host"], name, f"{gpu['used_mib']} MiB in use already", "note"))
    return found


def _small(surveys: Sequence[dict[str, Any]]) -> list[Complaint]:
    """Limits of a node, and a clock that is off: it confuses logs and tickets, not training."""
    found = []
    usual = statistics.median([survey["clock"] for survey in surveys if "clock" in survey] or [0.0])
    for survey in surveys:
        host = survey["host"]
        if abs(off := survey.get("clock", usual) - usual) > SKEW:
            found.append(Complaint(host, "clock", f"{off:+.1f} s from the others'", "note"))
        if 0 <= survey["open_files"] < 1024:
            found.append(Complaint(host, "open files", f"{survey['open_files']} at a time: ulimit -n 4096", "note"))
        if survey["shared_memory"] < GIB:
            free = f"{survey['shared_memory'] / GIB:.2f} GiB free in /dev/shm: small for NCCL"
            found.append(Complaint(host, "shared memory", free, "note"))
        if survey["gpu"] and 0 <= survey["locked_memory"] < GIB:
            found.append(Complaint(host, "locked memory", "limited: InfiniBand wants ulimit -l unlimited", "note"))
    return found


def _slow(
    surveys: Sequence[dict[str, Any]],
    what: str,
    name: str,
    share: float,
    text: Callable[[float], str],
    state: Literal["sick", "note"] = "sick",
) -> list[Complaint]:
    """Nodes whose worst rank is under a share of what nodes usually reach."""
    worst: dict[str, float] = {}
    for survey in surveys:
        if name in survey:
            worst[survey["host"]] = min(survey[name], worst.get(survey["host"], survey[name]))
    if len(worst) < 2:
        return []
    usual = statistics.median(worst.values()) if len(worst) > 2 else max(worst.values())
    return [
        Complaint(host, what, f"{text(value)}, elsewhere {text(usual)}", state)
        for host, value in worst.items()
        if value < share * usual
    ]

"""Compare what all ranks of a job measured, and name the nodes that are faulty or slow.

A version or a count is wrong if it differs from that of most nodes. A speed is too low if it is below a fraction of
the median over nodes (of two nodes, of the faster one).
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

GIB = 1 << 30
SKEW_S = 1.0  # greatest difference of a clock from the others
HOT_CELSIUS = 90
BUSY_MIB = 4096  # GPU memory in use before the job starts
OPEN_FILES = 1024

Survey = dict[str, Any]
"""A rank's `survey.survey`, with "disk" on the rank that reads it, and `survey.measure_links`."""


class Problem(NamedTuple):
    """Something wrong with a node. `faulty`: exclude the node; `note`: training can run."""

    host: str
    what: str
    text: str
    state: Literal["faulty", "note"] = "faulty"


class Speed(NamedTuple):
    """A speed that every node should reach."""

    key: str  # of the survey; "link" is the fastest of "pairs"
    what: str  # as the table names it
    fraction: float  # of the median, below which a node is too slow
    unit: str
    scale: float  # from the survey's number to the unit
    digits: int = 0
    state: Literal["faulty", "note"] = "faulty"

    def of(self, survey: Survey) -> float | None:
        """Return what a rank measured; None if it did not, or found no file to read."""
        if self.key == "link":
            return max(survey.get("pairs") or [], default=None)
        value = survey.get(self.key)
        return None if self.key == "disk" and value == 0 else value

    def show(self, value: float) -> str:
        """Return the value with its unit."""
        return f"{self.scale * value:,.{self.digits}f}{self.unit}"


# A throttled or shared node computes slowly. Disks and links vary more than processors, so less is asked of them.
SPEEDS = (
    Speed("flops", "computing", 0.6, " GFLOP/s", 1e-9),
    Speed("cpu", "CPU", 0.6, "% of one CPU for a busy thread", 100, state="note"),
    Speed("disk", "disk", 0.4, " MB/s", 1e-6),
    Speed("link", "network", 0.4, " Gbit/s with its fastest partner", 8e-9, digits=2),
)


def compare_nodes(surveys: Sequence[Survey]) -> list[Problem]:
    """Return all problems, those of faulty nodes first. `surveys` are in order of ranks, without silent ranks."""
    problems = [*outliers(surveys), *gpu_faults(surveys), *low_limits(surveys)]
    for survey in surveys:
        if survey.get("disk") == 0:
            problems.append(Problem(survey["host"], "disk", "the folder of --data has no .beton here"))
    for speed in SPEEDS:
        problems += slow_nodes(surveys, speed)
    return sorted(dict.fromkeys(problems), key=lambda problem: (problem.state != "faulty", problem.host))


def outliers(surveys: Sequence[Survey]) -> list[Problem]:
    """Return nodes with another package version, kind of GPU or number of ranks than most nodes."""
    ranks = Counter(survey["host"] for survey in surveys)
    problems = []
    for name in dict.fromkeys(name for survey in surveys for name in survey["versions"]):
        problems += _minority(name, {s["host"]: s["versions"].get(name, "absent") for s in surveys})
    problems += _minority("GPU", {s["host"]: (s["gpu"] or {}).get("name", "none") for s in surveys})
    return problems + _minority("ranks", {host: str(count) for host, count in ranks.items()})


def _minority(what: str, values: dict[str, str]) -> list[Problem]:
    """Compare a value by node with the most frequent one, which in a tie is that of the first node."""
    usual = Counter(values.values()).most_common(1)[0][0]
    return [Problem(host, what, f"{value}, elsewhere {usual}") for host, value in values.items() if value != usual]


def gpu_faults(surveys: Sequence[Survey]) -> list[Problem]:
    """Return GPUs that nvidia-smi reports as faulty, hot or in use."""
    problems = []
    for survey in surveys:
        gpu = survey["gpu"] or {}
        name = f"GPU {survey['local_rank']}"
        if "fault" in gpu:
            problems.append(Problem(survey["host"], name, gpu["fault"]))
        if gpu.get("celsius", 0) >= HOT_CELSIUS:
            problems.append(Problem(survey["host"], name, f"{gpu['celsius']} C", "note"))
        if gpu.get("used_mib", 0) > BUSY_MIB:
            problems.append(Problem(survey["host"], name, f"{gpu['used_mib']} MiB already in use", "note"))
    return problems


def low_limits(surveys: Sequence[Survey]) -> list[Problem]:
    """Return limits that are low, and clocks that are off, which confuses logs and tickets but not training."""
    problems = []
    usual = statistics.median([survey["clock"] for survey in surveys if "clock" in survey] or [0.0])
    for survey in surveys:
        host = survey["host"]
        if abs(skew := survey.get("clock", usual) - usual) > SKEW_S:
            problems.append(Problem(host, "clock", f"{skew:+.1f} s from the others'", "note"))
        if 0 <= survey["open_files"] < OPEN_FILES:
            text = f"at most {survey['open_files']}: ulimit -n 4096"
            problems.append(Problem(host, "open files", text, "note"))
        if survey["shared_memory"] < GIB:
            text = f"{survey['shared_memory'] / GIB:.2f} GiB free in /dev/shm: too little for NCCL"
            problems.append(Problem(host, "shared memory", text, "note"))
        if survey["gpu"] and 0 <= survey["locked_memory"] < GIB:
            text = "limited: InfiniBand needs ulimit -l unlimited"
            problems.append(Problem(host, "locked memory", text, "note"))
    return problems


def slow_nodes(surveys: Sequence[Survey], speed: Speed) -> list[Problem]:
    """Return nodes whose slowest rank is below `speed.fraction` of the median over nodes."""
    slowest: dict[str, float] = {}
    for survey in surveys:
        if (value := speed.of(survey)) is not None:
            slowest[survey["host"]] = min(value, slowest.get(survey["host"], value))
    if len(slowest) < 2:
        return []
    usual = statistics.median(slowest.values()) if len(slowest) > 2 else max(slowest.values())
    return [
        Problem(host, speed.what, f"{speed.show(value)}, elsewhere {speed.show(usual)}", speed.state)
        for host, value in slowest.items()
        if value < speed.fraction * usual
    ]

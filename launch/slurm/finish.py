"""What happened to a job, in a few lines and in summary.json; the exit code says whether it should start again."""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pipeline.cli.commands import Exit, Parser, run_command
from pipeline.distributed.rank_status import RankStatus, read_rank_statuses

SICK = "sick"  # in the logs' folder, the nodes that the preflight named
LEFT_OUT = "left-out"  # there too, those without which the job starts again


@dataclass(frozen=True)
class Verdict:
    """How the job ended and, in a line each, why."""

    code: Exit
    lines: list[str]


def judge(words: list[RankStatus], ranks: int, asked: bool, progress: int) -> Verdict:
    """From the ranks' last words; `asked`: a signal told the job to stop; `progress`: steps saved by this start.

    A crash after which something was saved is worth another start; one that saved nothing would only come again.
    """
    if wrong := [word for word in words if word.code == Exit.WRONG_INPUT]:
        return Verdict(Exit.WRONG_INPUT, [f"the input is wrong (rank {wrong[0].rank}): {wrong[0].message}"])
    main = words[0].code if words and words[0].rank == 0 else None
    if main == Exit.DONE:
        return Verdict(Exit.DONE, ["done"])
    if main == Exit.REQUEUE:
        how = "with a checkpoint" if progress > 0 else "and nothing was saved by this start"
        return Verdict(Exit.REQUEUE, [f"stopped on purpose {how}"])
    if asked:
        return Verdict(Exit.REQUEUE, ["told to stop, and gone before a last checkpoint"])
    lines = _blame(words, ranks)
    if progress > 0:
        return Verdict(
            Exit.REQUEUE, [*lines, f"{progress} steps were saved by this start, so another is worth while"]
        )
    return Verdict(Exit.FAILED, [*lines, "nothing was saved by this start, so another would only fail again"])


def _blame(words: list[RankStatus], ranks: int) -> list[str]:
    """The ranks that were killed and the first that failed: what the others say follows from that."""
    if not words:
        return ["no rank ever started: the log above and node-*/ say why"]
    lines = []
    if len(words) < ranks:
        lines.append(f"{ranks - len(words)} of {ranks} ranks never started")
    killed = [word for word in words if word.code is None]
    for word in killed[:4]:
        lines.append(f"rank {word.rank} on {word.host} was killed (memory?), or its node is gone")
    failed = sorted((word for word in words if word.code), key=lambda word: word.time)
    if failed:
        lines.append(f"rank {failed[0].rank} on {failed[0].host} failed first: {failed[0].message.split('. ')[0]}")
    return lines


def saved_step(folder: Path) -> int:
    """The newest complete checkpoint's, 0 without one."""
    names = (mark.parent.name for mark in folder.glob("checkpoints/*/COMPLETE"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _finish(arguments: argparse.Namespace) -> Exit:
    folder, logs = arguments.folder, arguments.logs
    step = saved_step(folder)
    earlier = [json.loads(path.read_text())["step"] for path in folder.glob("slurm/*/summary.json")]
    words = read_rank_statuses(logs)
    refused = [path.read_text().strip() for path in sorted(logs.glob("node-*.error"))]
    sick = (logs / SICK).read_text().split() if (logs / SICK).exists() else []
    if sick and not words:
        (logs / LEFT_OUT).write_text("".join(f"{host}\n" for host in sick))
        verdict = Verdict(Exit.REQUEUE, [f"left out: {', '.join(sick)}, for what the preflight found"])
    elif refused and not words:
        others = len(refused) - 1
        more = [f"on {others} other node{'s' * (others > 1)} the same or the like"] if others else []
        verdict = Verdict(Exit.WRONG_INPUT, [refused[0], *more])
    else:
        verdict = judge(words, arguments.ranks, arguments.asked, step - max(earlier, default=0))
    done = folder / "done.json"
    result = json.loads(done.read_text()) if verdict.code == Exit.DONE and done.exists() else {}
    hosts = sorted({word.host for word in words})
    now = time.time()
    minutes = (now - _began(logs, now)) / 60
    summary = {"code": verdict.code, "why": verdict.lines, "step": step, "hosts": hosts, "minutes": round(minutes, 2)}
    (logs / "summary.json").write_text(json.dumps(summary | result, indent=1) + "\n")
    print(f"{logs.name}: {'; '.join(verdict.lines)}")
    print(f"{logs.name}: step {step}, {minutes:.1f} min on {', '.join(hosts) or 'no node'}", end="")
    print(f", top-1 {result['top1']:.2f} %" if result else "", flush=True)
    return verdict.code


def _began(logs: Path, now: float) -> float:
    """When the first node started torchrun."""
    return min((path.stat().st_mtime for path in logs.glob("node-*.json")), default=now)


def main() -> None:
    parser = Parser(prog="python -m launch.slurm.finish", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("logs", type=Path)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--asked", action="store_true")
    sys.exit(run_command(parser, _finish))


if __name__ == "__main__":
    main()

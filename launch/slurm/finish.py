"""Judge how a job ended: in a few lines, in summary.json, and by an exit code that tells whether to requeue it."""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from widemix.cli.arguments import Parser
from widemix.cli.commands import run_command
from widemix.distributed.rank_status import RankStatus, read_rank_statuses
from widemix.errors import Exit
from widemix.files import atomic_write
from widemix.metrics import main_metric
from widemix.run.start_log import read_starts
from widemix.terminal import print

# In the folder of logs, one name a line:
FAULTY_NODES = "faulty-nodes"  # nodes that the preflight named
EXCLUDED_NODES = "excluded-nodes"  # nodes without which the job is requeued
STARTED = "node-{}.started"  # written by each node at once
NOTICE_MIN = 5  # between the signal at the time limit and the end: train.sbatch's --signal


@dataclass(frozen=True)
class Verdict:
    """How the job ended, and why, one reason a line."""

    code: Exit
    lines: list[str]
    stopped: bool = False  # by a signal


def judge(
    statuses: Sequence[RankStatus],
    ranks: int,
    stop_requested: bool,
    new_steps: int,
    crashed: bool,
    lost: Sequence[str] = (),
) -> Verdict:
    """Judge a job by the status files of its ranks.

    statuses: by rank; ranks that never started have none.
    ranks: number of ranks that the job should have.
    stop_requested: whether a signal asked the job to stop, as Slurm's does that ends what a failed node has left.
    new_steps: steps that this start has added to the newest checkpoint.
    crashed: whether the ranks failed as often as torchrun may restart them, which no node's failure does.
    lost: nodes that have failed.

    A crash is requeued only if `new_steps` is above 0: otherwise the next start would crash at the same place.
    """
    if wrong := [status for status in statuses if status.code == Exit.WRONG_INPUT]:
        return Verdict(Exit.WRONG_INPUT, [f"the input is wrong (rank {wrong[0].rank}): {wrong[0].message}"])
    main = statuses[0].code if statuses and statuses[0].rank == 0 else None
    if main == Exit.DONE:
        return Verdict(Exit.DONE, ["done"])
    if main == Exit.REQUEUE:
        saved = "with a checkpoint" if new_steps > 0 else "without a new checkpoint"
        return Verdict(Exit.REQUEUE, [f"stopped by a signal, {saved}"], stopped=True)
    if stop_requested and not lost:
        when = "but ended before the last checkpoint was complete" if statuses else "before any rank started"
        return Verdict(Exit.REQUEUE, [f"stopped by a signal, {when}"], stopped=True)
    lines = [f"Slurm has lost {', '.join(lost)}"] if lost else _causes(statuses, ranks)
    if new_steps > 0:
        return Verdict(Exit.REQUEUE, [*lines, f"this start saved {new_steps} steps, so the job is requeued"])
    if crashed and not lost:
        return Verdict(Exit.FAILED, [*lines, "this start saved nothing and another would fail too: not requeued"])
    return Verdict(Exit.REQUEUE, [*lines, "this start saved nothing: requeued once, since a node may have failed"])


def _causes(statuses: Sequence[RankStatus], ranks: int) -> list[str]:
    """Name the ranks that were killed and the first that failed: the others failed because of these."""
    if not statuses:
        return ["no rank started: see the log above and node-*/"]
    lines = []
    if len(statuses) < ranks:
        lines.append(f"{ranks - len(statuses)} of {ranks} ranks never started")
    killed = [status for status in statuses if status.code is None]
    for status in killed[:4]:
        lines.append(f"rank {status.rank} on {status.host} was killed (out of memory?), or its node failed")
    failed = sorted((status for status in statuses if status.code), key=lambda status: status.time)
    if failed:
        lines.append(f"rank {failed[0].rank} on {failed[0].host} failed first: {failed[0].message.split('. ')[0]}")
    return lines


def saved_step(folder: Path) -> int:
    """Return the step of the newest complete checkpoint; 0 without one."""
    names = (marker.parent.name for marker in folder.glob("checkpoints/*/COMPLETE"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def limited(
    verdict: Verdict, earlier: Sequence[dict], new_steps: int | None, minutes: float, requeues: int
) -> Verdict:
    """Return the verdict, or `FAILED` if another requeue would be in vain or one too many.

    earlier: summaries of the job's earlier starts, the oldest first. new_steps: None of a start that was preempted
    before it saved. minutes: that this start took. requeues: most requeues of a job.
    """
    if verdict.code != Exit.REQUEUE:
        return verdict
    if new_steps is not None and new_steps <= 0 and earlier and _saved_nothing(earlier[-1]):
        if not verdict.stopped:
            why = "this start and the one before saved nothing: not requeued"
            return Verdict(Exit.FAILED, [*verdict.lines[:-1], why])
        enough = math.ceil(2 * minutes) + NOTICE_MIN
        why = (
            f"the start before saved nothing either: {minutes:.1f} minutes until the signal do not suffice to "
            f"stage, start and take a step; not requeued: submit it again with --time {enough} (minutes) or more"
        )
        return Verdict(Exit.FAILED, [*verdict.lines, why])
    if len(earlier) >= requeues:
        why = f"requeued {len(earlier)} times, the most that --requeues allows: to continue, submit it again"
        return Verdict(Exit.FAILED, [*verdict.lines, why])
    return verdict


def _saved_nothing(summary: dict) -> bool:
    """Whether a start that ranks took part in was requeued without a new checkpoint."""
    return summary["code"] == Exit.REQUEUE and summary.get("new_steps") == 0


def _summaries(folder: Path) -> dict[str, dict]:
    """Return the summaries of the earlier starts in a run folder, the oldest first, by the names of their logs.

    Those that a full disk or a crash has torn are left out.
    """
    found = {}
    for path in sorted(folder.glob("slurm/*/summary.json"), key=lambda path: path.stat().st_mtime):
        try:
            summary = json.loads(path.read_text())
            found[path.parent.name] = {**summary, "step": int(summary["step"]), "code": int(summary["code"])}
        except (ValueError, KeyError, TypeError):
            print(f"{path}: is damaged, and ignored", flush=True)
    return found


def _finish(arguments: argparse.Namespace) -> Exit:
    folder, logs = arguments.folder, arguments.logs
    earlier = _summaries(folder)
    job = logs.name.partition(".")[0]
    step = saved_step(folder)
    own_starts = [line for line in read_starts(folder) if line.get("logs") == logs.name]  # torchrun's restarts too
    new_steps = step - (own_starts[0]["step"] - 1) if own_starts else 0  # one without a first step has saved nothing
    now = time.time()
    minutes = (now - _start_time(logs, now)) / 60
    statuses = read_rank_statuses(logs)
    verdict = None if statuses else _judge_before_training(logs)
    saved = None if verdict else max(0, new_steps)  # None where it says nothing of another start
    if verdict is None:
        own = [summary for name, summary in earlier.items() if name.partition(".")[0] == job]
        crashed = _attempts(logs) > arguments.restarts
        lost = arguments.lost
        verdict = judge(statuses, arguments.ranks, arguments.stop_requested, new_steps, crashed, lost)
        verdict.lines[1:1] = [] if statuses or verdict.stopped or lost else _unseen(logs, arguments.nodes)
        if verdict.stopped and arguments.preempted:
            saved = saved or None
        if not lost:  # then Slurm itself requeues the job
            verdict = limited(verdict, own, saved, minutes, arguments.requeues)
    done = folder / "done.json"
    result = json.loads(done.read_text()) if verdict.code == Exit.DONE and done.exists() else {}
    first_step = own_starts[0]["seconds"] if own_starts else None
    hosts = sorted({status.host for status in statuses})
    summary = {"code": verdict.code, "why": verdict.lines, "step": step, "hosts": hosts}
    summary |= {"new_steps": saved, "minutes": round(minutes, 2), **result}
    summary |= {"first_step": first_step} if first_step else {}
    try:
        atomic_write(logs / "summary.json", json.dumps(summary, indent=1) + "\n")
    except OSError as error:  # the verdict counts all the same
        print(f"{logs / 'summary.json'}: not written ({error.strerror})", flush=True)
    print(f"{logs.name}: {'; '.join(verdict.lines)}")
    print(f"{logs.name}: step {step}, {minutes:.1f} min on {', '.join(hosts) or 'no node'}", end="")
    print(f", {main_metric(result)}" if result else "", flush=True)
    if first_step:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in first_step.items())
        print(f"{logs.name}: first step after {sum(first_step.values()):.1f} s: {parts}", flush=True)
    return verdict.code


def _judge_before_training(logs: Path) -> Verdict | None:
    """Judge a job whose nodes ended before any rank trained; None if they gave no reason."""
    faulty = (logs / FAULTY_NODES).read_text().split() if (logs / FAULTY_NODES).exists() else []
    before = [path.read_text().split() for path in logs.parent.glob(f"{logs.stem}.*/{EXCLUDED_NODES}")]
    if faulty and not set(faulty) - set(chain.from_iterable(before)):
        again = f"the job has faulty nodes that were excluded before: {', '.join(faulty)}; not requeued"
        return Verdict(Exit.FAILED, [again])
    if faulty:
        (logs / EXCLUDED_NODES).write_text("".join(f"{host}\n" for host in faulty))
        return Verdict(Exit.REQUEUE, [f"the preflight found faulty nodes, which are excluded: {', '.join(faulty)}"])
    errors = [path.read_text().strip() for path in sorted(logs.glob("node-*.error"))]
    if errors:
        others = len(errors) - 1
        more = [f"{others} other node{'s' * (others > 1)} failed too"] if others else []
        return Verdict(Exit.WRONG_INPUT, [errors[0], *more])
    return None


def _unseen(logs: Path, nodes: Sequence[str]) -> list[str]:
    """Name the nodes that left no trace in the logs; in the order of SLURM_NODEID."""
    unseen = [name for number, name in enumerate(nodes) if not (logs / STARTED.format(number)).exists()]
    why = "failed before it ran Python, has none, or does not share the run folder"
    return [f"{', '.join(unseen)}: {why}"] if unseen else []


def _attempts(logs: Path) -> int:
    """How often torchrun has started ranks to train, on the node where that was most often."""
    return max((len([*node.glob("train-*/attempt_*")]) for node in logs.glob("node-*")), default=0)


def _start_time(logs: Path, now: float) -> float:
    """When the job started, s since 1970: train.sbatch writes `started`, and each node a file before torchrun."""
    paths = [path for path in (logs / "started", *logs.glob("node-*.json")) if path.exists()]
    return min((path.stat().st_mtime for path in paths), default=now)


def main() -> None:
    """Run as the last command of train.sbatch."""
    parser = Parser(prog="python -m widemix.launch.slurm.finish", description=__doc__)
    parser.add_argument("folder", type=Path, help="run folder")
    parser.add_argument("logs", type=Path, help="folder of this start's logs")
    parser.add_argument("ranks", type=int, help="number of ranks that the job should have")
    parser.add_argument("--requeues", type=int, default=100, help="most requeues of a job (default: 100)")
    names = "of the nodes, in the order of SLURM_NODEID"
    parser.add_argument("--nodes", type=str.split, default=[], metavar="'NAME NAME'", help=names)
    parser.add_argument("--lost", type=str.split, default=[], metavar="'NAME NAME'", help="nodes that have failed")
    parser.add_argument("--restarts", type=int, default=2, help="torchrun's restarts of the ranks (default: 2)")
    parser.add_argument("--stop-requested", action="store_true", help="a signal asked the job to stop")
    preempted = "that was another than the one at the time limit"
    parser.add_argument("--preempted", action="store_true", help=preempted)
    sys.exit(run_command(parser, _finish))


if __name__ == "__main__":
    main()

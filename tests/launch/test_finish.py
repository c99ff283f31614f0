"""How a job is judged by what its ranks and nodes have left, and whether it is requeued."""

import json
import os
import re
import shlex
import subprocess
from dataclasses import asdict
from pathlib import Path

from tests.transcripts import check_transcript, transcript
from widemix.distributed.rank_status import RankStatus
from widemix.launch.slurm import finish
from widemix.launch.slurm.finish import NOTICE_MIN, saved_step
from widemix.launch.slurm.options import SCRIPT
from widemix.launch.torchrun import SHUTDOWN_TIMEOUT_S

NOW = 1_000_000_000.0


def begin(folder: Path, name: str, words: list[str]) -> None:
    """Leave what a start of a job does, in the logs of this name, 88 s ago.

    words: RANK:CODE[:TIME[:MESSAGE]] for each rank, of host nRANK, without a code if it was killed; `unstarted` if
    there is none (default: 0:75); `unmarked`: the batch script has noted no time; saved=STEP and resumed=STEP;
    crashes=N, how often torchrun has started ranks.
    """
    logs, given = folder / "slurm" / name, dict(word.split("=") for word in words if "=" in word)
    logs.mkdir(parents=True, exist_ok=True)
    if "unmarked" not in words:
        (logs / "started").touch()
        os.utime(logs / "started", 2 * (NOW - 88,))
    ranks = [word for word in words if ":" in word] or ["0:75"] * ("unstarted" not in words)
    for rank, code, *more in (word.split(":") for word in ranks):
        time, message = (more + ["0", ""][len(more) :])[:2]
        status = RankStatus(int(rank), f"n{rank}", int(code) if code else None, message, float(time))
        (logs / f"rank-{rank}.json").write_text(json.dumps(asdict(status)))
    for node, number in enumerate((0, int(given.get("crashes", 0)))):  # where torchrun has noticed less, and most
        for attempt in range(number):
            for use in (f"train-{name}/attempt", f"preflight-{name}/attempt", f"train-{name}/log"):
                (logs / f"node-{node}/{use}_{attempt}").mkdir(parents=True)
    if "saved" in given:
        first = 1 + int(given.get("resumed", saved_step(folder)))
        line = {"time": 1.0, "step": first, "ranks": 1, "logs": name, "seconds": {"import": 2.0}}
        with (folder / "starts.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        mark = folder / f"checkpoints/{int(given['saved']):08d}/COMPLETE"
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


@transcript(Path(__file__).with_name("finish.txt"))
def test_how_starts_of_a_job_are_judged(case, tmp_path, run_main, system, capsys, request):
    """`$ JOB.START WORDS` judges one that has left what `begin` does, with options of finish.py; others are sh's."""
    system({"time.time": lambda: NOW})
    judged: list[Path] = []

    def answer(command: str) -> str:
        name, *words = shlex.split(command)
        if not re.fullmatch(r"\d+\.\d+", name):
            done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
            return done.stdout
        options = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
        begin(tmp_path, name, words[:options])
        logs, size = tmp_path / "slurm" / name, max(1, sum(":" in word for word in words[:options]))
        code = run_main(finish, tmp_path, logs, size + words[:options].count("absent"), *words[options:])
        judged.append(logs / "summary.json")
        os.utime(judged[-1], 2 * (NOW + len(judged),))
        return f"{capsys.readouterr().out}exit code {code}".replace(str(tmp_path), "{run}")

    check_transcript(case, answer, request.config)


def test_ranks_may_save_until_slurm_or_torchrun_ends_them():
    """The script asks for a task a node, a requeue and a signal in time; the log of a start before stays."""
    lines = SCRIPT.read_text().splitlines()
    asked = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    signal = f"--signal=B:USR1@{60 * NOTICE_MIN}"
    assert asked == {"--ntasks-per-node=1", "--requeue", signal, "--open-mode=append"}
    assert 200 < SHUTDOWN_TIMEOUT_S < 60 * NOTICE_MIN


def test_options_that_the_batch_script_leaves_out(run_main, tmp_path, capsys):
    """A hundred requeues, and two restarts."""
    begin(tmp_path, "7.100", ["saved=1"])
    for start in range(100):
        begin(tmp_path, f"7.{start}", [])
        (tmp_path / f"slurm/7.{start}/summary.json").write_text('{"step": 5, "code": 75, "new_steps": 5}')
    assert run_main(finish, tmp_path, tmp_path / "slurm/7.100", 1) == 1
    assert "requeued 100 times, the most" in capsys.readouterr().out
    for crashes, code in ((2, 75), (3, 1)):
        begin(tmp_path, f"{crashes}.0", ["0:1", f"crashes={crashes}"])
        assert run_main(finish, tmp_path, tmp_path / f"slurm/{crashes}.0", 1) == code


def test_a_verdict_counts_where_its_summary_cannot_be_written(run_main, tmp_path, system, capsys):
    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    begin(tmp_path, "8.0", ["saved=60"])
    system({"os.replace": full})
    assert run_main(finish, tmp_path, tmp_path / "slurm/8.0", 1) == 75
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{tmp_path}/slurm/8.0/summary.json: not written (No space left on device)"
    assert said[1].startswith("8.0: stopped by a signal")

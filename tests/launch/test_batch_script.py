"""The script that Slurm runs on a job's first node, with commands that note their words in place of Slurm's."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.transcripts import check_transcript, transcript
from widemix.launch.slurm.options import SCRIPT

# Of a job of two nodes, in the script's order.
WORDS = {"folder": "{tmp}/a run", "ranks": "1", "restarts": "2", "requeues": "100", "preflight": "no", "stage": ""}
WORDS |= {"sizes": "", "environment": "", "setup": "", "python": "python", "--": "--", "train": "digits/mixer"}
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1", "SLURM_CPUS_ON_NODE": "4"}
# What the commands answer. UNANSWERED: how often Slurm's controller does not answer each question that begins with
# QUESTION. EXCLUDED: the nodes without which the job is to be requeued; CODE: what finish.py ends with. FIRST and
# SECOND: signals that the script gets while it trains, and when that has ended.
ANSWERS = {"QUESTION": "none", "UNANSWERED": "0", "EXCLUDED": "", "CODE": "75", "FIRST": "", "SECOND": "", "LOST": ""}
ANSWERS |= {"STATE": "RUNNING", "RESTARTS": "0", "WITHOUT": "(null)", "TZ": "UTC", "APPTAINER_BIND": "", "PYXIS": ""}
COMMANDS = {
    "srun": """case "$*" in
            --help) echo "$PYXIS"; exit ;;
            *launch.local*) echo 1,2,3; exit ;;
            *slurm.finish*) exit $CODE ;;
        esac
        echo $PPID >$NOTED/script; [ -z $FIRST ] || kill -$FIRST $PPID
        for name in SRUN_CPUS_PER_TASK WIDEMIX_{RANK_STATUS_DIR,STAGE_TOKEN,START_TIMES} PYTHONSAFEPATH LOADED \\
            APPTAINER_BIND ENROOT_FORCE_OVERRIDE; do echo "+ with $name=${!name}"; done >>$NOTED/words
        ls "$WIDEMIX_RANK_STATUS_DIR" | sed "s/^/+ with /" >>$NOTED/words""",
    "sleep": "",
    "python": """case $2 in
            *.local) echo 1,2,3 ;;
            *.finish) printf "${EXCLUDED:+%s\\n}" "$EXCLUDED" >"$4/excluded-nodes"; exit $CODE ;;
        esac""",
    "scontrol": """asked=$(grep -cFx -- "$words" $NOTED/words)
        [[ $* != $QUESTION* || $asked -gt $UNANSWERED ]] || exit 1
        case "$1 $2" in
            "show hostnames") printf 'n1\\nn2\\n' ;;
            "show node") [ -z $SECOND ] || { read script <$NOTED/script && kill -$SECOND $script; }
                echo "NodeName=$4 NodeAddr=10.0.0.${4#n} State=ALLOCATED"
                [[ -z $LOST || $4 != "$SLURM_JOB_NODELIST" ]] || echo "NodeName=$LOST X=1 State=DOWN*+CLOUD" ;;
            "show job") job="JobId=7 JobState=$STATE Restarts=$RESTARTS"
                echo "$job SubmitTime=2026-11-27 ExcNodeList=$WITHOUT" ;;
        esac""",
}


@pytest.fixture
def answer(tmp_path, programs):
    """Run the script: `NAME=VALUE` for its words, what the commands answer and the environment -> all that it does.

    python=... has the words that start Python, train=... all after `--`; show=WORD: commands with this word alone.
    """
    note = 'words="+ $(printf "%q " "${0##*/}" "$@")"; echo "$words" >>$NOTED/words\n'
    programs(**{name: note + text for name, text in COMMANDS.items()})

    def run(command: str) -> str:
        noted = tmp_path / "noted"
        noted.mkdir(exist_ok=True)
        (noted / "words").write_text("")
        given = dict(word.split("=", 1) for word in shlex.split(command.replace("{tmp}", str(tmp_path))))
        words = [word.replace("{tmp}", str(tmp_path)) for name, word in WORDS.items() if name != "train"]
        words = [given.pop(name, word) for name, word in zip(WORDS, words, strict=False)]
        words[9:10] = shlex.split(words[9])
        words += shlex.split(given.pop("train", WORDS["train"]))
        show = given.pop("show", "")
        environ = os.environ | JOB | ANSWERS | {"NOTED": str(noted)} | given
        done = subprocess.run(
            ["env", "--default-signal=HUP,INT", "bash", str(SCRIPT), *words],
            env=environ,
            capture_output=True,
            text=True,
        )
        called = [line.rstrip() for line in (noted / "words").read_text().splitlines() if show in line]
        text = "\n".join([*called, done.stdout + f"exit code {done.returncode}"]).replace(str(tmp_path), "{tmp}")
        text = re.sub(r"TOKEN=[0-9a-f]{32}\b", "TOKEN=...", text)
        return re.sub(r"queue=\d+\.\d{9}\b", "queue=...", text)

    return run


@transcript(Path(__file__).with_name("batch_script.txt"))
def test_what_the_script_does(case, answer, tmp_path, request):
    (tmp_path / "study").mkdir()
    (tmp_path / "study/runs.tsv").write_text("a\tr a.yaml\t--x.y=1\nb\tr b.yaml\t--x.y=2\t--z=p q\nc\tr c.yaml\n")
    check_transcript(case, answer, request.config)

"""What is submitted to Slurm, with commands that note their words in its place. A real Slurm is in test_slurm.py."""

import getpass
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.transcripts import check_transcript, transcript
from widemix.errors import InputError
from widemix.launch.slurm import submit as slurm
from widemix.launch.slurm.options import container_image, elastic_sizes, limit_minutes
from widemix.launch.slurm.submit import merge
from widemix.recipe import load_recipe
from widemix.studies.study_run import cross

RECIPE = ROOT / "recipes/digits/mixer.yaml"
NOTE = 'echo "${0##*/}" "$@" >>{folder}/calls\n'
# A file `refused` is sbatch's refusal; `queue`, `reason` and `config` are what squeue and scontrol answer.
SLURM = {
    "sbatch": """[[ ! -e {folder}/refused || "$*" != *--test-only* ]] || { cat {folder}/refused >&2; exit 1; }
        echo '12;cluster'""",
    "squeue": """cd {folder}; exec 2>/dev/null
        case "$*" in *%r) cat reason || echo Priority ;; *) cat queue || : ;; esac""",
    "scontrol": "cat {folder}/config",
    "scancel": "",
    "srun": "cat {folder}/pyxis",
}
STUDY = """title: t
source: s
claim: c
seeds: [0, 1]
set: {{data.path: {digits}}}
figure: {{x: width}}
runs:
- {{label: a, recipes: {{Digits: {recipe}}}, axes: {{model.channels: [8, 16]}}}}
"""


@pytest.fixture
def submit(digits, tmp_path, widemix):
    """`widemix submit` of a recipe on the digits, in {tmp}/run unless that is given -> exit code and output."""

    def run(*words: str, recipe: str = "digits/mixer") -> tuple[int, str]:
        return widemix("submit", recipe, f"--data.path={digits}", "--run-dir", tmp_path / "run", *words)

    return run


@transcript(Path(__file__).with_name("submit.txt"))
def test_what_is_submitted(case, submit, digits, tmp_path, programs, system, monkeypatch, request):
    """`submit WORDS`; `plan WORDS`, without the script that a dry run ends with, and `command WORDS`, its first line.

    `finish N` ends a run of the table; `torch VERSION` is what is installed; others are bash's. A recipe comes first.
    """
    programs(**{name: (NOTE + text).replace("{folder}", str(tmp_path)) for name, text in SLURM.items()})
    (tmp_path / "study.yaml").write_text(STUDY.format(digits=digits, recipe=RECIPE))
    now = [0.0]
    system({"time.monotonic": lambda: now[0], "time.sleep": lambda seconds: now.__setitem__(0, now[0] + seconds)})
    names = {sys.executable: "{python}", str(tmp_path): "{tmp}", str(digits): "{digits}", str(ROOT): "{root}"}
    names |= {f"--user {getpass.getuser()}": "--user {user}"}

    def answer(command: str) -> str:
        name, *words = shlex.split(command.replace("{tmp}", str(tmp_path)))
        if name in ("submit", "plan", "command"):
            recipe = {"recipe": words.pop(0)} if words and words[0][0] != "-" else {}
            code, output = submit(*words, *["--dry-run"] * (name != "submit"), **recipe)
            output = re.sub(r"\n# \S+\.sbatch\n.*", "\n", output, flags=re.DOTALL)
            output = output.partition("\n")[0] if name == "command" else output + f"exit code {code}" * bool(code)
        elif name == "finish":
            run, kept, *_ = (tmp_path / "run/runs.tsv").read_text().splitlines()[int(words[0]) - 1].split("\t")
            (tmp_path / "run" / run).mkdir()
            (tmp_path / "run" / run / "recipe.yaml").write_text(Path(kept).read_text())
            (tmp_path / "run" / run / "done.json").write_text('{"top1": 50.0}')
            output = ""
        elif name == "torch":
            (tmp_path / words[0] / "torch-0.dist-info").mkdir(parents=True)
            (tmp_path / words[0] / "torch-0.dist-info/METADATA").write_text(f"Name: torch\nVersion: {words[0]}\n")
            monkeypatch.syspath_prepend(tmp_path / words[0])
            output = ""
        else:
            given = {"cwd": tmp_path, "capture_output": True, "text": True, "check": True}
            output = subprocess.run(["bash", "-c", command], **given).stdout
        for text, placeholder in names.items():
            output = output.replace(text, placeholder)
        output = re.sub(r"(--bind |--container-\w+=)\S+", r"\1...", output)
        return re.sub(r"([_-])[0-9a-f]{8,}\b", r"\1HASH", output)

    check_transcript(case, answer, request.config)


def test_a_dry_run_ends_with_the_script_and_writes_nothing(submit, tmp_path):
    script = ROOT / "launch/slurm/train.sbatch"
    code, output = submit("--dry-run", "--train.init_from", "timm:resnet18.a; rm x")
    assert code == 0
    assert output.endswith(f"\n# {script}\n{script.read_text()}")
    assert not (tmp_path / "run").exists()
    assert shlex.split(output.partition("\n")[0])[-1] == "--train.init_from=timm:resnet18.a; rm x"


@pytest.mark.parametrize(
    ("option", "started"),
    [
        ("--container=image.sif", "apptainer exec --nv --bind {binds} {tmp}/image.sif python3"),
        (
            "--container-image=a.io#b/c:25.01",
            "--container-mounts={mounts} --container-image=a.io#b/c:25.01 --container-workdir={tmp} "
            "--no-container-mount-home python3",
        ),
    ],
    ids=["Apptainer", "Pyxis"],
)
def test_a_container_mounts_folders_of_recipe_data_and_run(submit, digits, tmp_path, monkeypatch, option, started):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "image.sif").touch()
    own = tmp_path / "my recipes/mine.yaml"
    own.parent.mkdir()
    own.write_text(RECIPE.read_text().replace("../base", str(ROOT / "recipes/base")))
    (tmp_path / "study.yaml").write_text(STUDY.format(digits=digits, recipe=RECIPE))
    shipped = ROOT / "recipes/digits"
    for recipe, folder in ((str(own), own.parent), ("digits/mixer", shipped), ("study.yaml", tmp_path)):
        code, output = submit("--dry-run", option, recipe=recipe)
        assert code == 0, output
        folders = sorted({str(folder), str(digits.resolve()), str(tmp_path)})
        mounts = {"binds": ",".join(folders), "mounts": ",".join(f"{each}:{each}" for each in folders)}
        words = shlex.split(output.partition("\n")[0])
        words = words[words.index("--", words.index("no")) - len(started.split()) :]
        expected = [word.format(tmp=tmp_path, **mounts) for word in started.split()]
        assert words[: len(expected)] == expected


def test_a_machine_without_srun_does_not_know_of_pyxis(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    slurm.check_pyxis()


def test_a_recipe_edited_later_changes_no_job_that_waits(submit, tmp_path, digits, programs):
    """The job read it at each start: edited while the job ran, it ended the job at its next requeue."""
    programs(sbatch="echo 12", squeue="echo Priority")
    recipe = tmp_path / "mine.yaml"
    overrides = [("data.path", str(digits)), ("model.depth", "3")]
    for folder, options in (("run", ["--model.depth", "3"]), ("runs", ["--vary", "train.seed=4,5"])):
        recipe.write_text(RECIPE.read_text().replace("../base", str(ROOT / "recipes/base")))
        code, output = submit("--run-dir", str(tmp_path / folder), *options, recipe=str(recipe))
        assert code == 0, output
        recipe.write_text("model: {}\n")
        if folder == "run":
            kept, *given = shlex.split(output.splitlines()[0].partition(" -- ")[2])
            assert given == [f"--{name}={value}" for name, value in overrides]
            assert load_recipe(kept) == load_recipe(kept, overrides) == load_recipe(RECIPE, overrides)
    for line, seed in zip((tmp_path / "runs/runs.tsv").read_text().splitlines(), (4, 5), strict=True):
        assert load_recipe(line.split("\t")[1]) == load_recipe(RECIPE, [overrides[0], ("train.seed", str(seed))])


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("6", 6), ("90", 90), ("5:01", 5 + 1 / 60), ("90:30", 90.5), ("1:30:00", 90), ("48:00:06", 2880.1),
        ("1-0", 1440), ("2-3", 51 * 60), ("1-2:03", 26 * 60 + 3), ("1-2:03:30", 26 * 60 + 3.5),
        ("30-23:59:59", 30 * 1440 + 23 * 60 + 59 + 59 / 60),
        *dict.fromkeys(("5:60", "1:60:00", "1:00:60", "1-24", "0-24", "0:60:00", "1-2:60", "1:2:3:4", "1-", "-1"))
        .items(), ("1.5", None), ("UNLIMITED", None),
    ],
)  # fmt: skip
def test_a_time_limit_is_read_as_sbatch_reads_it(time, expected):
    if expected:
        assert limit_minutes(time) == pytest.approx(expected)
    else:
        with pytest.raises(InputError, match=f"^--time {time}: "):
            limit_minutes(time)


@pytest.mark.parametrize(
    ("batches", "nodes", "least", "ranks", "expected"),
    [
        (["48"], 8, 2, 1, "8,6,4,3,2"),
        (["48", "64"], 8, 2, 1, "8,4,2"),
        (["64", "48"], 8, 2, 1, "8,4,2"),
        (["48", "64"], 8, 2, 2, "4,2"),
        (["48", "64"], 8, 3, 1, "8,4"),
        (["48", "64"], 8, None, 1, ""),
    ],
)
def test_elastic_sizes_divide_all_batches(batches, nodes, least, ranks, expected):
    recipes = [load_recipe(RECIPE, [("train.global_batch", size), ("augment.mix_group", "2")]) for size in batches]
    assert elastic_sizes(Namespace(nodes=nodes, elastic=least), recipes, ranks) == expected


@pytest.mark.parametrize(
    ("image", "is_file"),
    [("ubuntu", False), ("a.io#b/c:25.01", False), ("/x/y", True), ("./y", True), ("../y", True), ("y.sqsh", True)],
)
def test_an_image_is_a_file_or_in_a_registry(image, is_file, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    place = {"/x/y": "/x/y", "../y": tmp_path / "y"}.get(image, tmp_path / "here" / Path(image).name)
    assert container_image(image) == (Path(place) if is_file else image)


# Slurm's commands.


@pytest.mark.parametrize(
    ("reasons", "waits"),
    [
        *(([reason], True) for reason in (
            "Priority", "Resources", "PartitionDown", "Dependency", "ReqNodeNotAvail,", "QOSMaxJobsPerUserLimit",
            "AssocGrpCpuLimit", "JobHeldUser", "")),
        (["PartitionConfig", "PartitionConfig", "Resources"], True),
        *(([reason], False) for reason in (
            "PartitionConfig", "PartitionTimeLimit", "PartitionNodeLimit", "BadConstraints", "InvalidAccount",
            "InvalidQOS", "AccountNotAllowed", "QOSNotAllowed", "QOSMaxCpuPerJobLimit", "AssocMaxNodePerJobLimit")),
    ],
)  # fmt: skip
def test_reasons_that_do_not_pass_cancel_a_job(reasons, waits, programs, system, tmp_path):
    """Once the scheduler has looked: PartitionConfig is Slurm's first word for any of them."""
    now = [0.0]
    system({"time.monotonic": lambda: now[0], "time.sleep": lambda seconds: now.__setitem__(0, now[0] + seconds)})
    (tmp_path / "reasons").write_text("".join(f"{reason}\n" for reason in reasons))
    more = f"[ $(wc -l <{tmp_path}/reasons) = 1 ] || sed -i 1d {tmp_path}/reasons"
    programs(squeue=f"head -n 1 {tmp_path}/reasons; {more}", scancel=f'echo "$@" >{tmp_path}/cancelled')
    if waits:
        assert slurm.waits_for("12") == reasons[-1]
    else:
        with pytest.raises(InputError, match=rf"job 12 could never start \({reasons[0]}\) and is cancelled"):
            slurm.waits_for("12")
        assert (tmp_path / "cancelled").read_text() == "12\n"
    assert (now[0] > 4) == (reasons == ["PartitionConfig"])
    assert (tmp_path / "cancelled").exists() is not waits


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'sbatch: error: Invalid partition name specified' >&2; exit 1", "Invalid partition name specified"),
        ("printf 'sbatch: warning: x\nsbatch: error: Invalid\n' >&2; exit 1", "Invalid"),
        ("printf 'sbatch: no controller' >&2; exit 1", "no controller"),
        ("exit 3", "exit code 3"),
    ],
)
def test_an_error_of_slurm_is_one_line(script, said, programs):
    programs(sbatch=script)
    with pytest.raises(InputError, match=rf"^sbatch failed: {said}$"):
        slurm.run(["sbatch"])
    with pytest.raises(InputError, match=r"^no-sbatch: not found"):
        slurm.run(["no-sbatch"])


def test_a_job_submitted_within_another_inherits_nothing_of_it(monkeypatch):
    """sbatch hands its environment on: a run that an array's task had submitted was taken for a run of a study."""
    of_job = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_MEM_PER_NODE": "100", "SRUN_CPUS_PER_TASK": "2"}
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "g1"}
    for name, value in {**of_job, **kept}.items():
        monkeypatch.setenv(name, value)
    told = dict(line.partition("=")[::2] for line in slurm.run(["env"]).splitlines())
    assert kept.items() <= told.items()
    assert not of_job.keys() & told.keys()


# The runs of a study.


@pytest.mark.parametrize(
    ("vary", "key", "values"),
    [
        ("data.path=O #2, a: b,1e3,~", "data.path", ["O #2", "a: b", "1e3", "~"]),  # not YAML
        ("data.path='a,b',\"c\\td\"", "data.path", ["a,b", "c\td"]),
        ("data.path=a", "data.path", ["a"]),
        ("data.path=2020-01-01,'2020-13-01',b", "data.path", ["2020-01-01", "2020-13-01", "b"]),  # no dates
        ("train.profile=20:30,1:40", "train.profile", ["20:30", "1:40"]),  # no numbers to the base of 60
        ("augment.scale=[0.1, 1],[0.5, 1]", "augment.scale", [(0.1, 1), (0.5, 1)]),
        ("optim.lr=1e-3", "optim.lr", [0.001]),
    ],
)
def test_values_to_vary_are_split_at_commas(vary, key, values):
    section, name = key.split(".")
    found = [getattr(getattr(run.recipe, section), name) for run in cross(RECIPE, ["train.seed=0", vary])]
    assert [tuple(value) if isinstance(value, list) else value for value in found] == values


@pytest.mark.parametrize("cut", ['"a\tb"', "a\nb", "a\u2028b"])
def test_a_value_cut_in_the_table_is_refused(tmp_path, cut):
    with pytest.raises(InputError, match="a job's values have no tab and no line break"):
        merge(tmp_path, cross(RECIPE, ["train.seed=0,1"], [("data.path", cut)]))

"""The manifests against Kubernetes' and Kubeflow's published schemas, and their commands against ours."""

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.conftest import ROOT
from widemix.cli.commands import split_overrides
from widemix.cli.parser import make_parser
from widemix.distributed.rank_status import STATUS_DIR_VARIABLE, RankStatus
from widemix.errors import Exit
from widemix.launch import pod as launched
from widemix.recipe import check_world, load_recipe

FOLDER = ROOT / "launch" / "kubernetes"


def manifests() -> dict[str, dict]:
    documents = (part for path in sorted(FOLDER.glob("*.yaml")) for part in yaml.safe_load_all(path.read_text()))
    return {document["kind"]: document for document in documents}


def pods() -> dict[str, dict]:
    """Return the pod specifications by the job or role that they are part of."""
    found = manifests()
    (job,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    replicas = found["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    specs = {name: replica["template"]["spec"] for name, replica in replicas.items()}
    (own,) = found["JobSet"]["spec"]["replicatedJobs"]
    alone = own["template"]["spec"]["template"]["spec"]
    return specs | {"TrainJob": job["template"]["spec"]["template"]["spec"], "JobSet": alone}


def containers() -> list[tuple[dict, int]]:
    """What is started in each kind of job, and on how many ranks."""
    found = manifests()
    job, trainer = found["PyTorchJob"]["spec"], found["TrainJob"]["spec"]["trainer"]
    nodes = sum(replica["replicas"] for replica in job["pytorchReplicaSpecs"].values())
    masters, alone = pods()["Master"]["containers"][0], pods()["JobSet"]["containers"][0]
    given = {variable["name"]: variable.get("value") for variable in alone["env"]}
    return [
        (masters, nodes * int(job["nprocPerNode"])),
        (trainer, trainer["numNodes"] * trainer["numProcPerNode"]),
        (alone, int(given["PET_NNODES"]) * int(given["PET_NPROC_PER_NODE"])),
    ]


def test_their_commands_train_a_recipe_that_divides_by_their_ranks():
    for container, ranks in containers():
        assert container["command"] == ["python3", "-P", "-m", "widemix.launch.pod", "--stage-to", "/cache", "--"]
        words, overrides = split_overrides(container["args"])
        arguments = make_parser().parse_args(["train", *words])
        assert ranks == 128
        recipe = load_recipe(ROOT / arguments.recipe, overrides)
        check_world(recipe, ranks)
        assert Path(recipe.data.path).is_relative_to("/shared/datasets")  # in the volume, not in the image
        assert arguments.run_dir.is_relative_to("/shared/runs")


def test_all_nodes_of_the_jobset_have_their_number():
    spec = manifests()["JobSet"]["spec"]
    (job,) = spec["replicatedJobs"]
    (container,) = pods()["JobSet"]["containers"]
    given = {variable["name"]: variable.get("value") for variable in container["env"]}
    indexed = job["template"]["spec"]
    assert int(given["PET_NNODES"]) == indexed["completions"] == indexed["parallelism"]
    name = manifests()["JobSet"]["metadata"]["name"]
    assert given["PET_MASTER_ADDR"] == f"{name}-{job['name']}-0-0.{name}"


@pytest.fixture
def pod(system, run_main, digits, monkeypatch):
    """A pod's command: pod(words...) -> exit code; what torchrun is given and finds is in pod.seen.

    pod.codes: what the ranks end with.
    """
    seen: list[tuple[list[str], Path, tuple]] = []

    def torchrun(command: list[str]) -> None:
        folder = Path(os.environ[STATUS_DIR_VARIABLE])
        found = tuple(os.environ[f"PET_{name}"] for name in ("RDZV_CONF", "SHUTDOWN_TIMEOUT"))
        seen.append((command, folder, found))
        for rank, code in enumerate(run.codes):
            status = RankStatus(rank, "n0", code, "", 0.0)
            (folder / f"rank-{rank}.json").write_text(json.dumps(asdict(status)))
        if run.codes != [0, 0]:
            raise ChildFailedError("train", {0: ProcessFailure(0, 1, 1, "none")})

    def run(*words: str) -> int:
        return run_main(launched, *words)

    run.seen, run.codes = seen, [0, 0]
    system({"torch.distributed.run.main": torchrun, "os.environ": dict(os.environ)})
    monkeypatch.setenv("RANK", "3")  # which the training operator sets for the pod
    return run


@pytest.mark.parametrize(
    ("codes", "code"),
    [([0, 0], 0), ([2, 2], 2), ([1, 2], 2), *((own, 143) for own in ([0, 75], [75, 75], [1, None], [0, None], []))],
)
@pytest.mark.parametrize("override", ["--data.path={}", "--data.path {}"])
def test_a_pod_ends_as_its_ranks_did(digits, pod, codes, code, override):
    """torchrun's own exit code is 1 or 0 for all of them: a wrong recipe was started 20 times."""
    pod.codes = codes
    words = ["recipes/digits/mixer.yaml", "--run-dir", "r", *override.format(digits).split()]
    assert pod("--", *words) == code
    [(command, folder, _)] = pod.seen
    assert command == ["-m", "widemix", "train", *words, f"--data.path={digits}"]
    assert STATUS_DIR_VARIABLE not in os.environ
    assert not folder.exists()


FIRST = "give the recipe first"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--", "recipes/nowhere.yaml"], "no such recipe"),
        *(
            (["--", *words], FIRST)
            for words in (["--data.path", "d"], ["--run-dir", "r", "digits/mixer"], ["-q", "a"])
        ),
        *((words, "give the recipe, and") for words in (["--"], [])),
    ],
)
def test_wrong_words_of_a_pod_end_its_job(pod, words, said, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")  # which tells it
    assert (pod(*words), said in capsys.readouterr().err) == (2, True)
    assert not pod.seen


def test_pods_wait_for_each_other_while_they_stage(pod, digits, tmp_path):
    """And for their ranks to save, by variables of torchrun; one that the user has set stays."""
    words = ["digits/mixer", f"--data.path={digits}"]
    assert pod("--stage-to", str(tmp_path / "disk"), "--", *words) == 0
    day = 24 * 3600
    own = (f"timeout={day},join_timeout={day}", str(launched.SHUTDOWN_TIMEOUT_S))
    os.environ |= {"PET_RDZV_CONF": "timeout=3", "PET_SHUTDOWN_TIMEOUT": "7"}
    assert pod("--", *words, "--stage-to") == 0
    (copy,) = (tmp_path / "disk").glob("[!.]*")
    program = ["-m", "widemix", "train", *words]
    assert [command for command, *_ in pod.seen] == [
        [*program, f"--data.path={copy}"],
        [*program, "--stage-to", f"--data.path={digits}"],
    ]
    assert [found for *_, found in pod.seen] == [own, ("timeout=3", "7")]


def test_a_wrong_recipe_alone_ends_the_job():
    """By the pod's exit code."""
    found = manifests()
    jobs = [found["JobSet"]["spec"], found["TrainingRuntime"]["spec"]["template"]["spec"]]
    for name, spec in zip(("JobSet", "TrainJob"), jobs, strict=True):
        (job,) = spec["replicatedJobs"]
        ends = job["template"]["spec"]
        (rule,) = ends["podFailurePolicy"]["rules"]
        codes = {"containerName": job["name"], "operator": "In", "values": [Exit.WRONG_INPUT]}
        assert rule == {"action": "FailJob", "onExitCodes": codes}
        assert pods()[name]["containers"][0]["name"] == job["name"]
        assert (ends["backoffLimit"], pods()[name]["restartPolicy"]) == (0, "Never")
        policy = spec["failurePolicy"]
        (rule,) = policy["rules"]
        assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
        assert policy["maxRestarts"] > 1
    older = found["PyTorchJob"]["spec"]
    replicas = older["pytorchReplicaSpecs"]
    assert {name: replica["restartPolicy"] for name, replica in replicas.items()} == {
        "Master": "ExitCode",
        "Worker": "ExitCode",
    }
    assert replicas["Master"]["replicas"] == 1
    assert older["runPolicy"]["backoffLimit"] > 1
    assert {pods()[name]["containers"][0]["name"] for name in replicas} == {"pytorch"}


def test_every_mount_has_its_volume_and_the_claim_exists():
    claim = manifests()["PersistentVolumeClaim"]["metadata"]["name"]
    for name, pod in pods().items():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes), name
        assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == claim
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/shared", "/cache", "/dev/shm"}
        assert volumes["memory"]["emptyDir"]["medium"] == "Memory"
        assert {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}["memory"] == "/dev/shm"
        assert pod["terminationGracePeriodSeconds"] > launched.SHUTDOWN_TIMEOUT_S
        assert not any("hostPath" in volume for volume in volumes.values())  # which most clusters' policies forbid


@pytest.mark.cluster
def test_kubernetes_schemas_accept_the_pods_and_the_claim():
    """`pip install kubernetes-validate`: unknown keys and wrong types."""
    validator = pytest.importorskip("kubernetes_validate")
    claim = manifests()["PersistentVolumeClaim"]
    whole = {
        name: {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": p} for name, p in pods().items()
    }
    for document in (claim, *whole.values()):
        validator.validate(document, validator.latest_version(), strict=True)
    whole["Master"]["spec"]["contaners"] = []
    with pytest.raises(validator.ValidationError):
        validator.validate(whole["Master"], validator.latest_version(), strict=True)


@pytest.mark.cluster
def test_kubeflows_models_accept_the_job_and_its_runtime():
    """`pip install kubeflow-trainer-api`: a key that the models do not have is lost on the way through them."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for kind, model in (
        ("TrainJob", models.TrainerV1alpha1TrainJob),
        ("TrainingRuntime", models.TrainerV1alpha1TrainingRuntime),
    ):
        document = manifests()[kind]
        assert model.from_dict(document).to_dict() == document
    jobset = manifests()["JobSet"]["spec"]
    assert models.JobsetV1alpha2JobSetSpec.from_dict(jobset).to_dict() == jobset


@pytest.mark.cluster
def test_the_training_operators_models_accept_the_older_job():
    """`pip install kubeflow-training`: every key of the PyTorchJob, down to its pods, which are checked above."""
    models = pytest.importorskip("kubeflow.training.models")
    job = manifests()["PyTorchJob"]
    assert unknown(job, "KubeflowOrgV1PyTorchJob", models) == []
    job["spec"]["runPolicy"]["backofLimit"] = 3
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["replica"] = 3
    assert sorted(unknown(job, "KubeflowOrgV1PyTorchJob", models)) == ["backofLimit", "replica"]


def unknown(document: dict, name: str, models: ModuleType) -> list[str]:
    """Keys that a model of Kubeflow's, or one within it, does not have."""
    model = getattr(models, name)
    kinds = {theirs: model.openapi_types[ours] for ours, theirs in model.attribute_map.items()}
    found = [key for key in document if key not in kinds]
    for key, kind in kinds.items():
        inner = re.search(r"Kubeflow\w+", kind)
        if inner and key in document:
            parts = document[key].values() if kind.startswith("dict") else [document[key]]
            found += [each for part in parts for each in unknown(part, inner[0], models)]
    return found

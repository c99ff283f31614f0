"""The manifests against Kubernetes' and Kubeflow's published schemas, and their commands against ours."""

import re
import shlex
from types import ModuleType

import pytest
import yaml

from pipeline.cli.commands import Parser
from pipeline.recipe import check_world, load_recipe
from pipeline.train import add_arguments
from tests.conftest import ROOT

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
    return specs | {"TrainJob": job["template"]["spec"]["template"]["spec"]}


def containers() -> list[tuple[dict, int]]:
    """What is started in each kind of job, and on how many ranks."""
    found = manifests()
    job, trainer = found["PyTorchJob"]["spec"], found["TrainJob"]["spec"]["trainer"]
    nodes = sum(replica["replicas"] for replica in job["pytorchReplicaSpecs"].values())
    masters = pods()["Master"]["containers"][0]
    return [(masters, nodes * int(job["nprocPerNode"])), (trainer, trainer["numNodes"] * trainer["numProcPerNode"])]


def test_their_commands_train_a_recipe_that_divides_by_their_ranks():
    parser = Parser()
    add_arguments(parser)
    for container, ranks in containers():
        assert container["command"] == ["sh", "-euc"]
        (script,) = container["args"]
        stage, train = script.split(";")
        assert stage.startswith("copy=$(widemix stage ")
        words = shlex.split(train)
        assert words[:4] == ["exec", "torchrun", "-m", "pipeline.train"]
        at = words.index("--data.path")
        assert words[at + 1] == "$copy"
        arguments = parser.parse_args(words[4:at] + words[at + 2 :])
        assert ranks == 128
        check_world(load_recipe(ROOT / arguments.recipe), ranks)


def test_every_mount_has_its_volume_and_the_claim_exists():
    claim = manifests()["PersistentVolumeClaim"]["metadata"]["name"]
    for name, pod in pods().items():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes), name
        assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == claim
        (seconds,) = (variable["value"] for variable in container["env"])
        assert int(seconds) < pod["terminationGracePeriodSeconds"]


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

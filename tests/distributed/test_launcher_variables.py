"""The variables of each launcher that does not set torchrun's, and those that say of more processes than train."""

import pytest

from tests.distributed.test_launchers import SRUN
from widemix.distributed.launchers import (
    LAUNCHERS,
    export_torchrun_env,
    how_to_train_alone,
    read_place,
    torchrun_env,
    unused_tasks,
    without_launcher,
)
from widemix.distributed.topology import read_topology
from widemix.errors import LauncherError


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


# For rank 1 of 2 on one machine: as MPICH 5.0.2, Intel MPI, OpenMPI 5.0.11 and MPICH's gforker set them; then from
# their documentation: Cray PALS, LSF's jsrun, flux (which also speaks PMI), MVAPICH, Horovod, and srun --mpi=pmi2.
HYDRA = variables("MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_FD=11 PMI_RANK=1 PMI_SIZE=2")
INTEL = HYDRA | variables("I_MPI_HYDRA_UUID=48260000-2ab1-5d85-1961-06007782714d HYDRA_BSTRAP_LOCALHOST=vm")
OPENMPI_5 = variables(
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
    "PMIX_NAMESPACE=prterun-vm-9831@1 PMIX_RANK=1"
)
OPENMPI_4 = OPENMPI_5 | {"PMIX_NAMESPACE": "2094661633"}
GFORKER = variables("PMI_RANK=1 PMI_SIZE=2 PMI_FD=12 MPI_UNIVERSE_SIZE=-1")
PALS = variables("PMI_RANK=1 PMI_SIZE=2 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2 PALS_APID=3ce0")
JSRUN = variables(
    "JSM_NAMESPACE_RANK=1 JSM_NAMESPACE_SIZE=2 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=2 PMIX_RANK=1 "
    "LSB_JOBID=12"
)
FLUX = variables(
    "FLUX_TASK_RANK=1 FLUX_JOB_SIZE=2 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_NNODES=1 FLUX_JOB_ID=f2oHxv7k PMI_RANK=1 "
    "PMI_SIZE=2"
)
MVAPICH, HOROVOD = (
    variables(f"{name}_RANK=1 {name}_SIZE=2 {name}_LOCAL_RANK=1 {name}_LOCAL_SIZE=2")
    for name in ("MV2_COMM_WORLD", "HOROVOD")
)
PMI2 = SRUN | variables(
    "SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 PMI_RANK=1 "
    "PMI_SIZE=2 PMI_JOBID=77.0"
)
EACH = {"MPICH": HYDRA, "Intel MPI": INTEL, "OpenMPI": OPENMPI_5, "PALS": PALS, "jsrun": JSRUN, "flux": FLUX}
EACH |= {"MVAPICH": MVAPICH, "Horovod": HOROVOD, "srun --mpi=pmi2": PMI2}


@pytest.mark.parametrize(("processes", "nodes", "most"), [(5, 2, 3), (4, 2, 2), (3, 4, 1), (2, 0, 2)])
def test_flux_says_no_nodes_processes_but_how_many_there_are(processes, nodes, most):
    """The fuller node's number, which no place on a node reaches."""
    said = FLUX | dict.fromkeys(("FLUX_JOB_SIZE", "PMI_SIZE"), str(processes)) | {"FLUX_JOB_NNODES": str(nodes)}
    said |= {"FLUX_TASK_LOCAL_ID": "0", "MASTER_ADDR": "n0", "MASTER_PORT": "1"}
    assert torchrun_env(said)["LOCAL_WORLD_SIZE"] == str(most)


@pytest.mark.parametrize("said", EACH.values(), ids=EACH)
def test_every_launcher_is_read_like_torchrun(said):
    environ = dict(said)
    assert export_torchrun_env(environ)
    rank = read_topology(environ)
    assert (rank.rank, rank.world, rank.local_rank, rank.local_world) == (1, 2, 1, 2)
    assert environ["MASTER_ADDR"] == "127.0.0.1"
    assert export_torchrun_env(environ, ranks=2)  # once more changes nothing
    alone = without_launcher(environ)
    assert alone.keys().isdisjoint({"MASTER_ADDR", "MASTER_PORT"})
    assert not export_torchrun_env(alone)
    assert read_topology(alone).world == 1


@pytest.mark.parametrize("said", EACH.values(), ids=EACH)
def test_the_local_rank_is_not_taken_for_the_rank(said):
    """Rank 5 of 8 is the second of the four on the second of two nodes."""
    values = {name: ("4" if name.endswith(("SIZE", "LOCALNRANKS")) else "1") for name in said if "LOCAL" in name}
    values |= {"SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4,4", "FLUX_JOB_NNODES": "2"}
    values |= dict.fromkeys(("PMI_RANK", "PMIX_RANK", "SLURM_PROCID", "FLUX_TASK_RANK"), "5")
    values |= {name: "5" for name in said if name.endswith("_RANK") and "LOCAL" not in name}
    values |= {name: "8" for name in said if name.endswith(("_SIZE", "NUM_TASKS")) and "LOCAL" not in name}
    environ = {name: values.get(name, value) for name, value in said.items()}
    environ |= {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    place = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=head MASTER_PORT=1234"
    assert torchrun_env(environ) == variables(place)
    assert without_launcher(environ | {"PATH": "/bin"}).keys() <= {*said, "PATH"}
    assert without_launcher(environ | {"PATH": "/bin"})["PATH"] == "/bin"


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"])
@pytest.mark.parametrize("said", [HYDRA, OPENMPI_5, MVAPICH, HOROVOD])
def test_a_batch_system_tells_a_launchers_jobs_apart(said, name):
    unnamed = {key: value for key, value in said.items() if key != "PMIX_NAMESPACE"}
    ports = [torchrun_env(unnamed | job)["MASTER_PORT"] for job in ({}, {name: "77"}, {name: "78.head"})]
    assert len(set(ports)) == 3


def test_what_to_unset_to_train_alone():
    assert how_to_train_alone(HYDRA | {"WORLD_SIZE": "2"}).endswith("unset PMI_SIZE")
    assert how_to_train_alone(HYDRA | {"WORLD_SIZE": "3"}).endswith("unset RANK and WORLD_SIZE")


def test_a_place_is_by_torchruns_variables_and_within_its_bounds():
    def place(*values: int, size: str = "LOCAL_WORLD_SIZE"):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", size)
        return read_place({name: str(value) for name, value in zip(names, values, strict=True)})

    assert place(3, 4, 1, 2) == place(3, 4, 1, 2, size="LOCAL_SIZE") == (3, 4, 1, 2)
    assert place(3, 4, 3, 4) == (3, 4, 3, 4)
    assert read_place({}) == (0, 1, 0, 1)
    assert read_place(dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "")) == (0, 1, 0, 1)
    for wrong in ((4, 4, 0, 1), (-1, 4, 0, 1), (0, 4, 2, 2), (0, 4, -1, 2), (0, 4, 0, 5)):
        with pytest.raises(LauncherError, match="do not fit"):
            place(*wrong)


def test_what_tells_jobs_apart_gives_their_ports():
    ports = {torchrun_env(said)["MASTER_PORT"] for said in (INTEL, OPENMPI_5, PALS, JSRUN, FLUX, PMI2)}
    assert len(ports) == 6
    assert torchrun_env(SRUN)["MASTER_PORT"] != torchrun_env(SRUN | {"SLURM_JOB_ID": "78"})["MASTER_PORT"]
    assert torchrun_env(OPENMPI_5)["MASTER_PORT"] != torchrun_env(OPENMPI_4)["MASTER_PORT"]
    other = INTEL | {"I_MPI_HYDRA_UUID": "48260000-2ab1-5d85-1961-06007782714e", "PMI_RANK": "0"}
    assert torchrun_env(other)["MASTER_PORT"] != torchrun_env(INTEL)["MASTER_PORT"]
    assert torchrun_env(INTEL | {"PMI_RANK": "0"})["MASTER_PORT"] == torchrun_env(INTEL)["MASTER_PORT"]
    for said, name in ((INTEL, "I_MPI_HYDRA_UUID"), (PALS, "PALS_APID"), (JSRUN, "PMIX_NAMESPACE")):
        within = said | {"SLURM_JOB_ID": "77", "LSB_JOBID": "12"}  # two of one batch script
        assert len({torchrun_env(within | {name: each})["MASTER_PORT"] for each in ("first", "second")}) == 2


@pytest.mark.parametrize(
    ("said", "more", "place", "address"),
    [
        (SRUN, "", (2, 4, 0, 2), "n2"),
        (OPENMPI_4, "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 MASTER_ADDR=head", (3, 4, 1, 2), "head"),
        # MPI within a job of Slurm is the innermost, and rank 0 is on the first node.
        (SRUN | INTEL, "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_PROCID=1 PMI_RANK=3 PMI_SIZE=4 "
         "SLURM_JOB_NODELIST=n[2-3]", (3, 4, 1, 2), "n2"),
        # A place that the launcher does not say may be set.
        (GFORKER, "LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=n2", (1, 2, 1, 2), "n2"),
        (GFORKER, "LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=n2", (1, 2, 0, 1), "n2"),
        # Of which one says but a part, it is read from another.
        (PMI2, "MPI_LOCALRANKID=0", (1, 2, 1, 2), "127.0.0.1"),
        # What it says counts more than what is set, and an empty rank is none; all are on this node of the job's two.
        (HYDRA, "LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 RANK= SLURM_JOB_NODELIST=n[2-3]", (1, 2, 1, 2), "127.0.0.1"),
    ],
)  # fmt: skip
def test_the_launcher_that_says_most_is_read(said, more, place, address):
    rank = read_topology(environ := torchrun_env(said | variables(more)))
    assert (rank.rank, rank.world, rank.local_rank, rank.local_world) == place
    assert environ["MASTER_ADDR"] == address


STANDALONE = variables("TORCHELASTIC_RUN_ID=9b0f8ab4-5b7a-4f5e-9d57-0c7c3a2e6f11 RANK=0 WORLD_SIZE=1")


@pytest.mark.parametrize("name", [name for launcher in LAUNCHERS for name in (launcher.rank, *launcher.local_rank)])
def test_one_variable_of_a_launcher_is_too_few(name):
    """tests/messages/launchers.yaml has other mistakes."""
    message = f"^{name}=1: .* started this process, and no variable says how many there are; set"
    with pytest.raises(LauncherError, match=message):
        export_torchrun_env({name: "1"})


ARBITRARY = SRUN | {"SLURM_DISTRIBUTION": "arbitrary", "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n3\nn2\nn3\n", "n3"),
        ("# of today\n\n  n3*2 \nn2\n", "n3"),
        ("n[5,3]\nn2\n", "n5"),
        ("n4#", "n4"),
        ("# none\n\n", None),
        (None, None),
    ],
)
def test_rank_0_is_on_the_users_first_node(hosts, first, tmp_path):
    """As Slurm 22.05 reads the lists; SLURM_STEP_NODELIST is sorted."""
    environ = ARBITRARY | {"SLURM_HOSTFILE": str(tmp_path / "hosts")}
    if hosts is not None:
        (tmp_path / "hosts").write_text(hosts)
    if first:
        assert torchrun_env(environ)["MASTER_ADDR"] == first
    else:
        with pytest.raises(LauncherError, match=r"^SLURM_DISTRIBUTION=arbitrary: .*; set SLURM_HOSTFILE to a file"):
            torchrun_env(environ)
    assert torchrun_env(environ | {"MASTER_ADDR": "n9"})["MASTER_ADDR"] == "n9"
    one_node = environ | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "n2"}
    assert torchrun_env(one_node)["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMIX_RANK": "0"},  # srun --pty bash
        # A batch script.
        {name: value for name, value in SRUN.items() if "STEP" not in name}
        | {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    ],
)
def test_one_process_is_alone(said):
    assert not export_torchrun_env(environ := dict(said))
    assert environ == said


def test_unused_tasks_of_a_job_are_a_warning():
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
    line = unused_tasks(job, ranks=1)
    assert line is not None
    assert line.startswith("warning: SLURM_NTASKS=4: the job has 4 tasks, and this command trains in 1; ")
    assert unused_tasks(job, ranks=2) is not None
    for environ, ranks in ((job, 4), (job | {"SLURM_STEP_ID": "0"}, 1), ({"SLURM_NTASKS": ""}, 1), ({}, 1)):
        assert unused_tasks(environ, ranks) is None
    assert "SLURM_NTASKS" not in without_launcher(job)


def test_torchrun_on_several_nodes_may_have_lost_some():
    lost = {"TORCHELASTIC_RUN_ID": "train-77-0", "GROUP_WORLD_SIZE": "1", "RANK": "0", "WORLD_SIZE": "1"}
    assert export_torchrun_env(SRUN | lost)
    assert export_torchrun_env(SRUN | lost | {"TORCHELASTIC_RUN_ID": "none-of-mine"})

"""The variables of each launcher that does not set torchrun's."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """The variables in which a launcher tells each process its place; of several names the first that is set."""

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]  # for srun and flux what it is computed from
    job: tuple[str, ...]  # what all ranks of a job share, and no other job has
    pass_on: str  # how it passes MASTER_ADDR on to the ranks


_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
SRUN, FLUX = "srun", "flux run"
# Those that others may have started come first: mpirun within a job of Slurm.
LAUNCHERS = (
    Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", *_JOBS),
        "mpirun needs `-x MASTER_ADDR=$(hostname)`",
    ),
    *(
        Launcher(
            "mpirun_rsh",
            f"{prefix}_COMM_WORLD_RANK",
            f"{prefix}_COMM_WORLD_SIZE",
            (f"{prefix}_COMM_WORLD_LOCAL_RANK",),
            (f"{prefix}_COMM_WORLD_LOCAL_SIZE",),
            _JOBS,
            "mpirun_rsh needs `MASTER_ADDR=HOST`, with the host of rank 0, before the program",
        )
        for prefix in ("MV2", "MVP")
    ),
    Launcher(
        "jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        ("JSM_NAMESPACE_LOCAL_RANK",),
        ("JSM_NAMESPACE_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", *_JOBS),
        "jsrun needs `-E MASTER_ADDR=HOST`, with the host of rank 0",
    ),
    Launcher(  # MPICH's Hydra, Intel MPI, Cray PALS, ParaStation
        "mpiexec",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
        ("I_MPI_HYDRA_UUID", "PALS_APID", *_JOBS),
        "mpiexec needs `-genv MASTER_ADDR HOST` (PALS: `--env MASTER_ADDR=HOST`), with the host of rank 0",
    ),
    Launcher(
        "horovodrun",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        ("HOROVOD_LOCAL_RANK",),
        ("HOROVOD_LOCAL_SIZE",),
        _JOBS,
        "horovodrun passes on what its shell exports",
    ),
    Launcher(
        FLUX,
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        ("FLUX_TASK_LOCAL_ID",),
        ("FLUX_JOB_NNODES",),
        ("FLUX_JOB_ID",),
        "flux run needs `--env=MASTER_ADDR=HOST`, with the host of rank 0",
    ),
    Launcher(
        SRUN,
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE",),
        ("SLURM_JOB_ID",),
        "srun passes on what the job's script exports",
    ),
)

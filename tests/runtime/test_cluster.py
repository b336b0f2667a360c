"""`detect` finds the process count and index in environment variables."""

import pytest

from axcore import AxcoreError
from axcore.runtime import Cluster, detect

SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-4]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
LAUNCHED = {"AXCORE_COORDINATOR": "127.0.0.1:4000", "AXCORE_PROCESSES": "2", "AXCORE_PROCESS_ID": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
JOBSET = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "1",
    "AXCORE_COORDINATOR": "run-workers-0-0.run:1234",
    "AXCORE_PROCESSES": "4",
}
TPU = {"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_WORKER_ID": "3"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (LAUNCHED, Cluster("axcore", 2, 1, "127.0.0.1:4000")),
        (JOBSET, Cluster("axcore", 4, 1, "run-workers-0-0.run:1234")),
        (SLURM, Cluster("slurm", 8, 3, port=61440 + 5000 % 4096)),
        (OPEN_MPI, Cluster("ompi", 4, 2)),
        (TPU, Cluster("tpu", 4, 3)),
        (TPU | {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}, Cluster("tpu", 8, 7)),
        (SLURM | LAUNCHED, Cluster("axcore", 2, 1, "127.0.0.1:4000")),  # `axcore launch` inside srun
        (SLURM | {"AXCORE_PROCESSES": "1"}, None),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({name: SLURM[name] for name in SLURM if name != "SLURM_STEP_NODELIST"}, None),  # in the batch script
        (
            {"JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
            None,
        ),  # separate jobs
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
    ],
)
def test_detect_reads_the_environment(environ, expected):
    assert detect(environ) == expected


def test_steps_of_one_slurm_job_have_different_ports():
    assert len({detect(SLURM | {"SLURM_STEP_ID": str(step)}).port for step in range(8)}) == 8


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {"AXCORE_PROCESSES": "2"},
            "has AXCORE_PROCESSES but not AXCORE_COORDINATOR, AXCORE_PROCESS_ID. Set all",
        ),
        ({"AXCORE_COORDINATOR": "a:1"}, "but not AXCORE_PROCESSES, AXCORE_PROCESS_ID"),
        (LAUNCHED | {"AXCORE_PROCESS_ID": "2"}, "AXCORE_PROCESS_ID='2' must be from 0 to 1, since AXCORE_PROCESSES=2"),
        (LAUNCHED | {"AXCORE_PROCESS_ID": "-1"}, "AXCORE_PROCESS_ID='-1' must be from 0 to 1"),
        (LAUNCHED | {"AXCORE_PROCESSES": "two"}, "AXCORE_PROCESSES='two' must be a number of processes"),
        (LAUNCHED | {"AXCORE_PROCESSES": "0"}, "AXCORE_PROCESSES='0' must be a number of processes, 1 or more"),
        (LAUNCHED | {"AXCORE_COORDINATOR": "host"}, "AXCORE_COORDINATOR='host' must be host:port"),
        (LAUNCHED | {"AXCORE_COORDINATOR": "host:99999"}, "AXCORE_COORDINATOR='host:99999' must be host:port"),
        (SLURM | {"SLURM_PROCID": "8"}, "SLURM_PROCID='8' must be from 0 to 7, since SLURM_NTASKS=8"),
    ],
)
def test_invalid_environments_raise(environ, expected):
    with pytest.raises(AxcoreError, match=expected.replace("'", ".")):
        detect(environ)

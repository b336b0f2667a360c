"""Detects the number of processes of a run and the index of this process from the environment. Does not import jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from axcore.config import AxcoreError

COORDINATOR, PROCESSES, PROCESS_ID = "AXCORE_COORDINATOR", "AXCORE_PROCESSES", "AXCORE_PROCESS_ID"
"""Environment variables: host:port of process 0, the number of processes, and the index of this process."""
TIMEOUT = "AXCORE_TIMEOUT"
"""Environment variable: seconds that a process waits for the others by default."""
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
FIRST_PORT, PORTS = 61440, 4096


@dataclasses.dataclass(frozen=True)
class Cluster:
    """One process among several.

    Attributes:
        kind: the environment that was detected: axcore, slurm, ompi or tpu.
        count: the number of processes; at least 2.
        index: the index of this process.
        coordinator: host:port of process 0; None if jax detects it.
        port: the port of process 0, if jax detects only the host.
    """

    kind: str
    count: int
    index: int
    coordinator: str | None = None
    port: int | None = None


def detect(environ: Mapping[str, str]) -> Cluster | None:
    """The cluster that this process belongs to, or None for a run of one process.

    `AXCORE_*` variables take precedence (`axcore launch` sets them), then SLURM, Open MPI and Cloud TPU. On Kubernetes,
    including JobSet, the manifest sets `AXCORE_COORDINATOR` and `AXCORE_PROCESSES`, and `JOB_COMPLETION_INDEX` is the
    index of the process. `AXCORE_PROCESSES=1` forces a run of one process.

    Raises:
        AxcoreError: the variables contradict each other, or some are missing.
    """
    found = _explicit(environ) or _slurm(environ) or _open_mpi(environ) or _cloud_tpu(environ)
    return None if found is None or found.count == 1 else found


def _explicit(environ: Mapping[str, str]) -> Cluster | None:
    if environ.get(PROCESSES) == "1" and environ.get(PROCESS_ID, "0") == "0":
        return Cluster("axcore", 1, 0)
    names = (COORDINATOR, PROCESSES, PROCESS_ID)
    if not any(environ.get(name) for name in names):
        return None
    id_name = PROCESS_ID if environ.get(PROCESS_ID) else "JOB_COMPLETION_INDEX"
    missing = [name for name in (COORDINATOR, PROCESSES) if not environ.get(name)]
    missing += [] if environ.get(id_name) else [PROCESS_ID]
    if missing:
        raise AxcoreError(
            f"the environment has {', '.join(name for name in names if environ.get(name))} but not "
            f"{', '.join(missing)}. Set all three, or none for a run of one process."
        )
    host, _, port = environ[COORDINATOR].rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise AxcoreError(f"{COORDINATOR}={environ[COORDINATOR]!r} must be host:port of process 0")
    return _checked("axcore", environ, PROCESSES, id_name, coordinator=environ[COORDINATOR])


def _slurm(environ: Mapping[str, str]) -> Cluster | None:
    if not all(name in environ for name in SLURM):
        return None
    job, step = (int(environ[n]) if environ.get(n, "").isdecimal() else 0 for n in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    # jax derives the port from the job id alone, so two steps of one job would share a port.
    return _checked("slurm", environ, "SLURM_NTASKS", "SLURM_PROCID", port=FIRST_PORT + (job + 509 * step) % PORTS)


def _open_mpi(environ: Mapping[str, str]) -> Cluster | None:
    if not all(name in environ for name in OPEN_MPI):
        return None
    return _checked("ompi", environ, *OPEN_MPI[:2])


def _cloud_tpu(environ: Mapping[str, str]) -> Cluster | None:
    hosts = [name for name in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
    slices = environ.get("MEGASCALE_NUM_SLICES", "1")
    if len(hosts) * int(slices if slices.isdecimal() else 1) < 2:
        return None
    numbers = {"hosts": str(len(hosts)), "TPU_WORKER_ID": environ.get("TPU_WORKER_ID", "0")}
    one = _checked("tpu", numbers, "hosts", "TPU_WORKER_ID")
    slice_id = environ.get("MEGASCALE_SLICE_ID", "0")
    return Cluster("tpu", one.count * int(slices), one.count * int(slice_id) + one.index)


def _checked(
    kind: str,
    environ: Mapping[str, str],
    count_name: str,
    index_name: str,
    coordinator: str | None = None,
    port: int | None = None,
) -> Cluster:
    count, index = environ[count_name], environ[index_name]
    if not count.isdecimal() or int(count) < 1:
        raise AxcoreError(f"{count_name}={count!r} must be a number of processes, 1 or more")
    if not index.isdecimal() or int(index) >= int(count):
        raise AxcoreError(f"{index_name}={index!r} must be from 0 to {int(count) - 1}, since {count_name}={count}")
    return Cluster(kind, int(count), int(index), coordinator, port)

"""Lets several ranks of an NCCL job share one GPU, by environment variables.

NCCL refuses a job in which two ranks have the same host and GPU. It identifies a host by a text, which the
variable NCCL_HOSTID can set. If each rank sets a different text, each counts as a machine of its own, and
ranks send rows through sockets. This is slow, so it is good for tests of results, not for timing.
"""

from __future__ import annotations

OFFICIAL_SINCE = (2, 30)
"""The first version of NCCL that allows several ranks on one GPU, by a variable of its own."""

REFUSALS = ("Duplicate GPU detected", "Multiple Ranks are using the same GPU")
"""Texts in NCCL's errors for several ranks on one GPU: one up to version 2.29, one from 2.30 on."""


def shared_gpu_environment(rank: int, version: tuple[int, ...]) -> dict[str, str]:
    """Returns the variables that let a rank share its GPU with other ranks of an NCCL job on one machine.

    They must be set before the process uses CUDA or NCCL.

    rank: the global rank; each process must have a NCCL_HOSTID of its own.
    version: the version of NCCL, as torch.cuda.nccl.version() returns it.

    Example: rank 1 with NCCL 2.29.7 -> {"NCCL_HOSTID": "pmoe-1", "NCCL_NET": "Socket", ...}
    """
    variables = {
        "NCCL_HOSTID": f"pmoe-{rank}",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_CUMEM_HOST_ENABLE": "0",
        "NCCL_RAS_ENABLE": "0",
        # Kernels of all ranks share the multiprocessors, and wait there for each other.
        "NCCL_MAX_CTAS": "2",
        # A kernel that is loaded late waits for the device, on which a collective may wait for this rank.
        "CUDA_MODULE_LOADING": "EAGER",
    }
    if version >= OFFICIAL_SINCE:
        variables["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    return variables


def shared_gpu_hint(error: BaseException) -> str:
    """Returns advice for the error with which NCCL refuses several ranks on one GPU; "" for other errors.

    error: the error of a collective.
    """
    if not any(refusal in str(error) for refusal in REFUSALS):
        return ""
    variables = shared_gpu_environment(0, OFFICIAL_SINCE)
    own, official = variables.pop("NCCL_HOSTID"), variables.pop("NCCL_MULTI_RANK_GPU_ENABLE")
    common = " ".join(f"{name}={value}" for name, value in variables.items())
    return (
        "two ranks of this job use one GPU. Give each rank a GPU of its own: "
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), and as many ranks as GPUs. Or, to try several '
        f"ranks on one GPU, set NCCL_HOSTID to another text in each process ({own}, ...), and {common}; "
        f"from NCCL 2.30 on NCCL_MULTI_RANK_GPU_ENABLE={official}, too (docs/gpu.md). NCCL said: "
    )

"""Several ranks on one GPU over NCCL: the variables that allow it, and the error of a job without them."""

from __future__ import annotations

import pytest

from pmoe.comm.shared_gpu import shared_gpu_environment, shared_gpu_hint

OLD = "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000"
NEW = "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this"


def test_each_rank_counts_as_a_machine_of_its_own_and_sends_through_sockets() -> None:
    first, second = (shared_gpu_environment(rank, (2, 29, 7)) for rank in (0, 1))
    assert (first["NCCL_HOSTID"], second["NCCL_HOSTID"]) == ("pmoe-0", "pmoe-1")
    assert {name for name in first if first[name] != second[name]} == {"NCCL_HOSTID"}
    assert first | {"NCCL_HOSTID": ""} == {
        "NCCL_HOSTID": "", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0",
        "NCCL_CUMEM_HOST_ENABLE": "0", "NCCL_RAS_ENABLE": "0", "NCCL_MAX_CTAS": "2",
        "CUDA_MODULE_LOADING": "EAGER",
    }  # fmt: skip


@pytest.mark.parametrize(
    "version, official", [((2, 29, 7), None), ((2, 30), "1"), ((2, 30, 7), "1"), ((3, 0), "1")]
)
def test_from_2_30_on_nccl_has_a_variable_for_it(version: tuple[int, ...], official: str | None) -> None:
    assert shared_gpu_environment(0, version).get("NCCL_MULTI_RANK_GPU_ENABLE") == official


@pytest.mark.parametrize("refusal", [OLD, NEW])
def test_a_refused_job_is_told_every_variable_that_it_lacks(refusal: str) -> None:
    hint = shared_gpu_hint(RuntimeError(refusal))
    for name in shared_gpu_environment(0, (2, 30)):
        assert name in hint
    assert "torch.cuda.set_device" in hint and "docs/gpu.md" in hint
    assert shared_gpu_hint(RuntimeError("Connection closed by peer")) == ""

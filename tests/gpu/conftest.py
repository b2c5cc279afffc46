"""Sets up one rank over NCCL, exact float32 products, and random numbers that can be drawn again."""

from __future__ import annotations

import datetime
import os
import secrets
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A default group of one rank: with bypass_local=False its own rows travel through a real collective."""
    rendezvous = tmp_path_factory.mktemp("nccl") / "rendezvous"
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{rendezvous}",
        rank=0,
        world_size=1,
        timeout=datetime.timedelta(seconds=60),
        device_id=torch.device("cuda", 0),
    )
    yield
    torch.cuda.synchronize()
    dist.destroy_process_group()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What layers measure in tests, under a sanitizer maybe, is nothing to keep for the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PMOE_CACHE", str(tmp_path_factory.mktemp("cache")))
        # Left out, a kernel waits as long as a collective.
        patch.setenv("PMOE_WAIT_SECONDS", os.environ.get("PMOE_WAIT_SECONDS", "30"))
        yield


@pytest.fixture(autouse=True)
def device_lives() -> Iterator[None]:
    """Ends this process where a test has lost its device: every later one would fail for it."""
    yield
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            pytest.exit(f"the device is lost: {error}", returncode=1)
        time.sleep(0.5)  # until the test's report is sent; a new worker goes on with the next test
        os._exit(1)


@pytest.fixture(autouse=True)
def float32_is_float32() -> Iterator[None]:
    """TF32 keeps 10 bits of a product's operands: far outside what is asked of float32 here."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def random() -> torch.Generator:
    """Other numbers each time; PMOE_TEST_SEED draws those of a failure again."""
    seed = int(os.environ.get("PMOE_TEST_SEED") or secrets.randbits(32))
    print(f"PMOE_TEST_SEED={seed}")  # pytest shows it where the test fails
    return torch.Generator().manual_seed(seed)

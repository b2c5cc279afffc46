"""What a device would run, by its compute capability: the code that fits, and the rival of pmoe's kernels."""

from __future__ import annotations

import pytest

from pmoe.kernels.expected import expected_kernels

OLD = ("sm_80", "sm_90a", "ptx80")
NEW = ("sm_80", "sm_90a", "sm_100", "sm_120", "ptx80")
BY_DRIVER = "PTX of compute_80, compiled by the driver"


@pytest.mark.parametrize(
    ("capability", "archs", "runs", "is_hopper", "rival"),
    [
        ((8, 0), NEW, "sm_80", False, "loop"),
        ((8, 9), NEW, "sm_80", False, "loop"),
        ((9, 0), NEW, "sm_90a", True, "grouped_mm"),
        ((10, 0), NEW, "sm_100", False, "grouped_mm"),
        ((10, 3), NEW, "sm_100", False, "grouped_mm"),
        ((11, 0), NEW, BY_DRIVER, False, "loop"),
        ((12, 0), NEW, "sm_120", False, "loop"),
        ((12, 1), NEW, "sm_120", False, "loop"),
        ((10, 0), OLD, BY_DRIVER, False, "grouped_mm"),
        ((12, 0), OLD, BY_DRIVER, False, "loop"),
        ((9, 0), ("sm_80", "ptx80"), BY_DRIVER, False, "grouped_mm"),
        ((8, 0), ("sm_86",), None, False, "loop"),
        ((7, 5), NEW, None, False, "loop"),
        ((10, 0), (), None, False, "grouped_mm"),
        # PTX of one capability ("a") or of one major number ("f") fits no other.
        ((12, 0), ("ptx100a",), None, False, "loop"),
        ((12, 0), ("ptx100f",), None, False, "loop"),
        ((10, 3), ("ptx100a",), None, False, "grouped_mm"),
        ((10, 3), ("ptx100f",), "PTX of compute_100, compiled by the driver", False, "grouped_mm"),
        # The driver also compiles PTX of the device's own capability: it is no binary.
        ((8, 0), ("ptx80",), BY_DRIVER, False, "loop"),
    ],
)
def test_the_code_that_fits_best_runs(
    capability: tuple[int, int], archs: tuple[str, ...], runs: str | None, is_hopper: bool, rival: str
) -> None:
    found = expected_kernels(capability, archs)
    assert (found.runs, found.rival) == (runs, rival)
    assert (found.runs is not None and found.hopper is None) == is_hopper
    assert (found.why_loop is None) == (rival == "grouped_mm")


def test_no_device_waits_for_a_compiler_that_has_a_binary() -> None:
    """With cubins for Blackwell, only capabilities without any binary are left to the driver."""
    assert "takes minutes" in expected_kernels((10, 0), OLD).why
    assert expected_kernels((10, 0), NEW).why == "its binary fits"


def test_the_lines_say_why() -> None:
    assert expected_kernels((7, 5), NEW).lines[1:3] == [
        "  code: none, kernels need 8.0",
        "  products: PyTorch's, because no kernel runs",
    ]
    assert "  code: none, the extension is not built" in expected_kernels((9, 0), ()).lines
    text = "\n".join(expected_kernels((12, 0), NEW).lines)
    assert "refused, binary version 120 of PTX version 120 was loaded, not 90 of 90" in text
    assert "loop, compute capability 12.0: grouped_mm takes it, but loops over the experts there" in text


def test_what_the_driver_loaded_goes_before_the_rules() -> None:
    found = expected_kernels((9, 0), NEW, (90, 80))  # CUDA_FORCE_PTX_JIT=1
    assert found.runs == BY_DRIVER
    assert found.hopper is not None and "CUDA_FORCE_PTX_JIT" in found.hopper


@pytest.mark.parametrize("name", ["hopper", "sm_9999", "sm_90", "ptx90", "ptx90a"])
def test_a_name_for_which_nothing_is_compiled_is_refused(name: str) -> None:
    """As ``setup.py`` refuses it: of compute capability 9.0 there is sm_90a only."""
    with pytest.raises(ValueError, match=rf"archs \('{name}'\) must be names such as sm_80"):
        expected_kernels((9, 0), (name,))

"""Predicts which code a CUDA device would run for grouped products, by rules that need no device.

The driver loads the compiled code that fits a device's compute capability best (CUDA C++ Programming Guide,
binary and PTX compatibility):

    sm_90a        on 9.0 only
    sm_100        on 10.0 and 10.x
    PTX of 8.0    on 8.0 and everything later; the driver compiles it

`pmoe.kernels.extension` asks the driver what it has loaded. For a device that is not present, this module
predicts which code the driver would load, and with which PyTorch function pmoe's kernels would compete.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pmoe.kernels.extension import binary_of, hopper_refusal
from pmoe.kernels.registry import grouped_mm_loops

OLDEST = (8, 0)
"""The lowest compute capability for which there are kernels."""


@dataclass(frozen=True, kw_only=True)
class ExpectedKernels:
    """The code that a device of a compute capability would run for grouped products, and the reason.

    capability: the compute capability; (9, 0) means 9.0.
    runs: the code that the driver would load, such as "sm_90a"; None if it would load none.
    why: the reason for ``runs``.
    hopper: why the kernels for Hopper would not run; None if they would.
    rival: the implementation with which pmoe's kernels would be compared for bfloat16 products without a
        bias: torch's "grouped_mm", or a "loop" over experts.
    why_loop: why the rival is the loop and not grouped_mm; None if it is grouped_mm.
    """

    capability: tuple[int, int]
    runs: str | None
    why: str
    hopper: str | None
    rival: str
    why_loop: str | None

    @property
    def lines(self) -> list[str]:
        """The expected code and the reasons, as lines of text."""
        lines = [f"compute capability {self.capability[0]}.{self.capability[1]}:"]
        lines.append(f"  code: {self.runs or 'none'}, {self.why}")
        if self.runs is None:
            lines.append("  products: PyTorch's, because no kernel runs")
        elif self.hopper is None:
            lines.append(
                "  products: pmoe's kernels for Hopper (TMA, warpgroup products), where they are faster"
            )
        else:
            lines.append("  products: pmoe's kernels for 8.0 and later, where they are faster")
            lines.append(f"  kernels for Hopper: refused, {self.hopper}")
        reason = "" if self.why_loop is None else f", {self.why_loop}"
        lines.append(f"  the rival in bfloat16 without a bias: {self.rival}{reason}")
        lines.append(
            "  which is faster is measured at a layer's first call; PMOE_LOG_KERNELS=1 logs the times"
        )
        return lines


def expected_kernels(
    capability: tuple[int, int], archs: Sequence[str], loaded: tuple[int, int] | None = None
) -> ExpectedKernels:
    """Predicts the code that a device would run, from its capability and the compiled architectures.

    capability: (major, minor).
    archs: names such as "sm_80", "sm_90a" or "ptx80"; empty without the extension.
    loaded: versions (binary, PTX) of the code that the driver has loaded, if the device is present; None
        takes the code that the driver would load by the rules of this module.

    Example: (10, 3) with sm_80, sm_90a, sm_100 and ptx80 -> runs "sm_100".
    """
    binary, text = _fitting(capability, archs)
    loaded = loaded or binary or text
    loop = grouped_mm_loops(capability)
    why = "its binary fits"
    runs = hopper = None
    if loaded is None:
        why = f"built for {', '.join(archs)}" if archs else "the extension is not built"
        if capability < OLDEST:
            why = f"kernels need {OLDEST[0]}.{OLDEST[1]}"
    else:
        runs = binary_of(*loaded)
        hopper = hopper_refusal(*loaded, capability)
        # The versions are equal if the driver compiles PTX of the device's own capability.
        if loaded[0] != loaded[1] or loaded is text:
            runs = f"PTX of compute_{loaded[1]}, compiled by the driver"
            why = "each kernel at its first launch, which takes minutes in all"
    return ExpectedKernels(
        capability=capability,
        runs=runs,
        why=why,
        hopper=hopper,
        rival="grouped_mm" if loop is None else "loop",
        why_loop=loop,
    )


UNUSED = ("sm_90", "ptx90", "ptx90a", "sm_90f", "ptx90f")
"""Names for which ``setup.py`` compiles nothing: versions 90 of 90 must mean sm_90a (`hopper_refusal`)."""

CodeVersions = tuple[int, int]
"""The versions (binary, PTX) of loaded code; 90 means 9.0."""


def _fitting(
    capability: tuple[int, int], archs: Sequence[str]
) -> tuple[CodeVersions | None, CodeVersions | None]:
    """Returns the versions of the best binary that fits, and of the best PTX that fits; None if none fits.

    A compute capability is major.minor. A binary fits devices with the binary's major number and with a minor
    number that is equal or larger. PTX fits every device with an equal or larger capability. An "a" at the
    end of the name of either means that it fits one capability only, and an "f" that it fits no other major
    number.
    """
    device = 10 * capability[0] + capability[1]
    binaries = []
    texts = []
    for name in archs:
        match = re.fullmatch(r"(sm_|ptx)(\d{2,3})([af]?)", name)
        if match is None or name in UNUSED:
            raise ValueError(
                f"archs ({name!r}) must be names such as sm_80, sm_90a or ptx80; of compute capability 9.0 "
                "only sm_90a"
            )
        version = int(match[2])
        is_same = version == device if match[3] == "a" else version // 10 == device // 10
        if match[1] == "ptx" and version <= device and (is_same or not match[3]):
            texts.append(version)
        if match[1] == "sm_" and is_same and version <= device:
            binaries.append(version)
    binary = max(binaries, default=None)
    text = max(texts, default=None)
    return None if binary is None else (binary, binary), None if text is None else (device, text)

"""A profile: measured costs of a device and a group of ranks, and a record of what was measured.

This file measures nothing and reads no file. `pmoe.measure.rates` measures the costs, and
`pmoe.measure.profile` stores them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields

from pmoe.planner.cost_model import Interference
from pmoe.planner.costs import Fit, LineCost

FORMAT = 3
"""Version of the stored fields. It grows by 1 whenever fields are added or change their meaning.

Version 2 added ``operations``, version 3 ``num_nodes`` and ``link``.
"""

GOOD_FIT = 0.9
"""A line describes its measurements well if its r_squared (coefficient of determination) is at least this."""

WIDTH = {"cpu": 512, "cuda": 4096}
"""Measured products have a weight of WIDTH x WIDTH elements. The key is the device type."""


def alphas(weights: float, device_type: str) -> float:
    """Returns the fixed time of a matrix product as a multiple, at least 1, of the measured fixed time.

    The fixed time (alpha) is the part of the seconds that does not depend on the number of rows.

        CPU     weights / WIDTH^2, because alpha is the time in which the CPU packs the weight for the
                product, once for each chunk. Example: 4 for a weight of 1024 x 1024 elements.
        GPU     1, because alpha is the launch of the kernel: a GPU reads weights while it computes.

    weights: elements of the product's weight. The measured weight has WIDTH^2 elements.
    device_type: "cpu" or "cuda".
    """
    return max(1.0, weights / WIDTH["cpu"] ** 2) if device_type == "cpu" else 1.0


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Versions of the software that a profile was measured with.

    torch: torch.__version__.
    cuda: version of CUDA that torch was built with; None without CUDA.
    file: `FORMAT` of the stored profile.
    """

    torch: str
    cuda: str | None
    file: int


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The device, ranks and software with which a profile was measured.

    A profile is used only with the same device, ranks and software.

    device: full name of the device.
    device_type: "cpu" or "cuda".
    num_ranks: number of ranks of the measured group.
    backend: backend of torch.distributed, or "none" if num_ranks is 1.
    dtype: torch's name of the rows' dtype.
    versions: versions of torch, CUDA and the stored fields.
    num_nodes: number of nodes that the ranks are on, according to the launcher.
    link: values of the environment variables that select the network.
    """

    device: str
    device_type: str
    num_ranks: int
    backend: str
    dtype: str
    versions: Versions
    num_nodes: int = 1
    link: str = ""

    def difference(self, other: Identity) -> str:
        """Returns a text that lists the differences between two identities; "" if there are none.

        Example: "num_ranks 4, here 8". Versions are compared one by one.

        other: the identity of the present device and group of ranks, which the text calls "here".
        """
        own_fields, other_fields = (
            asdict(identity) | asdict(identity.versions) for identity in (self, other)
        )
        del own_fields["versions"]
        return "; ".join(
            f"{name} {own_fields[name]!r}, here {other_fields[name]!r}"
            for name in own_fields
            if own_fields[name] != other_fields[name]
        )


@dataclass(frozen=True, kw_only=True)
class Operations:
    """Costs of FSMoE's operations (Eq. 1, Section 5.1): a line for each gives its seconds by its size.

    Each line is fitted by least squares over the sizes of the paper's Section 6.2. Ranks form groups. The
    ranks of a group share the group's experts: num_ranks = num_across * num_inside.

    num_across: number of groups. All-to-alls and all-reduces run among one rank of each group.
    num_inside: number of ranks of a group. They split the hidden columns of each expert of the group.
    gemm: a matrix product, by its number of multiply-adds. An expert has several products.
    all_to_all: a flat all-to-all with equal splits among num_across ranks, by the bytes that a rank sends to
        other ranks.
    all_gather, reduce_scatter: collectives among num_inside ranks, by the bytes that a rank sends to other
        ranks. They are num_inside - 1 times the bytes of the rank's part: of its input to the all-gather, or
        of its result of the reduce-scatter.
    all_reduce: the sum of one tensor, such as gradients, over num_across ranks, by the bytes of the tensor.
    seconds: how long the measurement took.
    exchanges: maps the name of an all-to-all that is not flat, such as a hierarchical all-to-all, to its cost
        by the same bytes as ``all_to_all``. Only all-to-alls that a layer asked for are measured; {} in older
        files.

    If only one rank takes part in a collective, nothing is sent: the line is 0, and its num_sizes is 0.

    Example: num_inside = 4, 1 MB of rows on each rank -> the all-gather and the reduce-scatter have size 3e6.
    """

    num_across: int
    num_inside: int
    gemm: Fit
    all_to_all: Fit
    all_gather: Fit
    reduce_scatter: Fit
    all_reduce: Fit
    seconds: float
    exchanges: dict[str, Fit] = field(default_factory=dict)

    @property
    def fits(self) -> list[Fit]:
        """All lines of this object that were fitted to measurements."""
        own_lines = (line for line in vars(self).values() if isinstance(line, Fit))
        return [*own_lines, *self.exchanges.values()]


@dataclass(frozen=True, kw_only=True)
class Profile(Identity):
    """Measured costs of a device and a group of ranks, and the `Identity` of device and ranks.

    compute: seconds of a matrix product, by its number of multiply-adds.
    message: seconds of an even all-to-all, by the bytes that a rank sends to other ranks; 0 if num_ranks is
        1.
    copy_out: seconds of a copy from device to host, by its bytes.
    copy_in: seconds of a copy from host to device, by its bytes.
    interference: speeds of computation, communication and copies while they run at the same time.
    seconds: how long the measurement took.
    when: time at which the measurement ended, ISO 8601, UTC.
    r_squared: the smallest coefficient of determination of the fitted lines above.
    operations: costs that FSMoE's solver needs, for one division of the ranks into groups; None until a
        solver needs them.
    """

    compute: LineCost
    message: LineCost
    copy_out: LineCost
    copy_in: LineCost
    interference: Interference
    seconds: float
    when: str
    r_squared: float = 1.0
    operations: Operations | None = None

    @property
    def slower_copy(self) -> LineCost:
        """The cost of a copy between device and host in the slower direction, to have one cost for both."""
        return max(self.copy_out, self.copy_in, key=lambda line: line.beta_seconds)

    def __str__(self) -> str:
        """Returns what was measured, in words, and the time of the measurement."""
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}"
        over = f" over {self.backend}" * (self.num_ranks > 1)
        return f"{self.device}, {ranks}{over}, {self.dtype}, measured {self.when}"

    @property
    def identity(self) -> Identity:
        """The fields that identify the measured machine, such as device and ranks, without the costs.

        A profile is used only if these fields are equal to those of the present device and group.
        """
        return Identity(**{part.name: getattr(self, part.name) for part in fields(Identity)})

    @property
    def doubt(self) -> str:
        """A warning that choices may be wrong, if a fitted line is far from its measurements; otherwise "".

        A line gives the seconds of an operation: alpha + beta * size. It is far from its measurements if its
        r_squared is below GOOD_FIT.
        """
        operations = [] if self.operations is None else self.operations.fits
        worst_fit = min([self.r_squared, *(operation.r_squared for operation in operations)])
        warning = (
            f"the profile of {self.when} describes this machine badly (r squared {worst_fit:.2f}), so choices"
        )
        return (
            "" if worst_fit >= GOOD_FIT else f"{warning} may be wrong: measure it again with `pmoe profile`"
        )

    def products(self, multiply_adds: float, weights: float) -> float:
        """Returns the seconds of a task that consists of matrix products.

        multiply_adds: number of multiply-adds of all products together.
        weights: number of elements of the weights of all products, which the task reads once.
        """
        alpha = self.compute.alpha_seconds * alphas(weights, self.device_type)
        return alpha + self.compute.beta_seconds * multiply_adds

    def sharing(self, inside: int) -> LineCost:
        """Returns the cost of an all-gather or a reduce-scatter, by the bytes that a rank sends.

        If the profile has ``operations`` that were measured for groups of ``inside`` ranks, the result is the
        measured cost of the all-gather, for both collectives. Otherwise a collective is assumed to cost as
        much per byte as an all-to-all.

        inside: number of ranks that share each expert, among which the collective runs.
        """
        operations = self.operations
        return (
            self.message
            if operations is None or operations.num_inside != inside
            else operations.all_gather.line
        )

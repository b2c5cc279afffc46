"""A profile: measured costs of a device and a group of ranks, and the identity of both.

This file measures nothing and reads no file: `pmoe.measure.rates` and `pmoe.measure.profile` do.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from pmoe.planner.cost_model import Interference
from pmoe.planner.costs import Fit, LineCost

FORMAT = 3
"""Version of the stored fields. It rises with every change of a field's meaning.

2: `operations`. 3: nodes and link.
"""

GOOD_FIT = 0.9
"""Smallest r_squared of a line that describes its measurements well."""

WIDTH = {"cpu": 512, "cuda": 4096}
"""Size of the measured weight by device type: products are measured with WIDTH x WIDTH elements."""


def alphas(weights: float, device_type: str) -> float:
    """Returns how many times alpha a product costs whose weight has ``weights`` elements; at least 1.

    CPU     weights / WIDTH^2. alpha is the time to pack the weight, once a chunk: 0.04 ms for 512 x 512
            elements of float32, 0.4 ms for 512 x 2048.
    GPU     1. alpha is the launch, because a GPU reads weights while it computes.
    """
    return max(1.0, weights / WIDTH["cpu"] ** 2) if device_type == "cpu" else 1.0


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Versions of the software that a profile was measured with.

    torch: as torch prints it.
    cuda: of the CUDA that torch was built with; None without.
    file: `FORMAT` of the stored profile.
    """

    torch: str
    cuda: str | None
    file: int


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Identity of a measurement: a profile is valid only if all of these are the same.

    device: full name.
    device_type: "cpu" or "cuda".
    num_ranks: W.
    backend: of torch.distributed, or "none" if num_ranks is 1.
    dtype: as torch names it.
    versions: of torch, CUDA and the format.
    num_nodes: number of nodes that the ranks are on, by what the launcher says.
    link: environment variables that select the link.
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
        """Returns the fields that differ, with both values. Versions are compared one by one.

        Example: "num_ranks 4, here 8".
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
    """Lines of FSMoE's performance models (Eq. 1, Section 5.1): seconds of one operation by its size.

    They are fitted by least squares over the sizes of Section 6.2, each with its r_squared.

    gemm: by multiply-adds of one product. An expert has several products.
    all_to_all: by bytes that a rank sends to others, among num_across ranks, with equal splits.
    all_gather, reduce_scatter: by bytes that a rank sends to others, among num_inside ranks. They are
        num_inside - 1 times the bytes of its own rows, or of its own sum.
    all_reduce: by bytes of the tensor that num_across ranks add up, as they do with gradients.
    seconds: how long the measurement took.

    Among one rank nothing travels: the line is 0, and its num_sizes too.

    Example: 4 ranks inside, 1 MB of rows on each -> the all-gather and the reduce-scatter have size 3e6.
    """

    num_across: int
    num_inside: int
    gemm: Fit
    all_to_all: Fit
    all_gather: Fit
    reduce_scatter: Fit
    all_reduce: Fit
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Profile(Identity):
    """Measured costs of a device and a group of ranks, with their `Identity`.

    compute: seconds of a product by multiply-adds.
    message: seconds of an even all-to-all by bytes that a rank sends to others; 0 if num_ranks is 1.
    copy_out: seconds of a copy from device to host by bytes.
    copy_in: seconds of a copy from host to device by bytes.
    interference: how much the lanes slow each other.
    seconds: how long the measurement took.
    when: its end, ISO 8601, UTC.
    r_squared: the smallest of these lines.
    operations: FSMoE's lines, for one arrangement of the ranks in nodes; None until they are asked for.
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
        """The slower of the two copy directions, for models that have one number for copies."""
        return max(self.copy_out, self.copy_in, key=lambda line: line.beta_seconds)

    def __str__(self) -> str:
        """Returns the identity in words, and the time of the measurement."""
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}"
        over = f" over {self.backend}" * (self.num_ranks > 1)
        return f"{self.device}, {ranks}{over}, {self.dtype}, measured {self.when}"

    @property
    def identity(self) -> Identity:
        """The identity without the costs."""
        return Identity(**{field.name: getattr(self, field.name) for field in fields(Identity)})

    @property
    def doubt(self) -> str:
        """A warning that choices may be wrong, if any line describes its measurements badly; otherwise ""."""
        operations = () if self.operations is None else vars(self.operations).values()
        worst_fit = min(
            [self.r_squared, *(operation.r_squared for operation in operations if isinstance(operation, Fit))]
        )
        warning = (
            f"the profile of {self.when} describes this machine badly (r squared {worst_fit:.2f}), so choices"
        )
        return (
            "" if worst_fit >= GOOD_FIT else f"{warning} may be wrong: measure it again with `pmoe profile`"
        )

    def products(self, multiply_adds: float, weights: float) -> float:
        """Returns the seconds of a task's products.

        multiply_adds: of all products.
        weights: elements of their weights, which the task reads once.
        """
        alpha = self.compute.alpha_seconds * alphas(weights, self.device_type)
        return alpha + self.compute.beta_seconds * multiply_adds

    def sharing(self, inside: int) -> LineCost:
        """Returns the line of the bytes that a rank sends to gather or sum rows among ``inside`` ranks.

        It is FSMoE's all-gather if that was measured for as many ranks; otherwise the line of messages.
        """
        operations = self.operations
        return (
            self.message
            if operations is None or operations.num_inside != inside
            else operations.all_gather.line
        )

"""A profile: the measured costs of a device and a group of ranks, and whose they are.

Nothing is measured and no file is read here: `pmoe.measure.rates` and `pmoe.measure.profile` do.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from pmoe.planner.cost_model import Interference
from pmoe.planner.costs import Fit, LineCost

FORMAT = 3
"""Of the stored fields. Rises with every change of what a field means. 2: `operations`. 3: nodes and link."""

GOOD_FIT = 0.9
"""The least r squared of a line that tells seconds by size."""

WIDTH = {"cpu": 512, "cuda": 4096}
"""By device type: products are measured with a weight of WIDTH x WIDTH."""


def alphas(weights: float, device_type: str) -> float:
    """How many alphas of a measured product it takes to read ``weights`` elements, one at least.

    What a product takes on a CPU whatever its rows is packing its weight, once a chunk: 0.04 ms for 512 x 512
    elements of float32, 0.4 ms for 512 x 2048. A GPU reads weights while it computes: alpha is the launch.
    """
    return max(1.0, weights / WIDTH["cpu"] ** 2) if device_type == "cpu" else 1.0


@dataclass(frozen=True, kw_only=True)
class Versions:
    """torch and the CUDA it was built with (None: without), and the stored profile's format."""

    torch: str
    cuda: str | None
    file: int


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What must be the same for a profile to hold. backend is "none" where num_ranks is 1.

    num_nodes: that the ranks are on, as the launcher tells. link: what the environment says of it.
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
        """The fields that differ, those of the versions among them. Example: "num_ranks 4, here 8"."""
        held, here = (asdict(each) | asdict(each.versions) for each in (self, other))
        del held["versions"]
        return "; ".join(
            f"{name} {held[name]!r}, here {here[name]!r}" for name in held if held[name] != here[name]
        )


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The lines of FSMoE's performance models (Eq. 1, Section 5.1): seconds of one operation by its size.

    Fitted by least squares over the sizes of Section 6.2, each with its r squared. The size of an operation:

    gemm: multiply-adds of one product. Those that an expert has several of, count several times.
    all_to_all: bytes that a rank sends to others, among num_across ranks, with equal splits.
    all_gather, reduce_scatter: bytes that a rank sends to others, among num_inside ranks: num_inside - 1
        times the bytes of its own rows, or of its own sum.
    all_reduce: bytes of the tensor that num_across ranks add up, as gradients are.

    Among one rank nothing travels: the line is zero, over no sizes. seconds: how long measuring took.
    Example: 4 ranks inside, 1 MB of rows on each: the all-gather and the reduce-scatter have size 3e6.
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
    """Measured costs, and whose they are.

    compute: seconds by multiply-adds.
    message: seconds by bytes that a rank sends to others, in an even all-to-all; zero where num_ranks is 1.
    copy_out, copy_in: seconds by bytes from the device to the host and back.
    interference: how much the lanes slow each other.
    seconds: how long measuring took. when: the end of it, ISO 8601, UTC.
    r_squared: the least of its lines.
    operations: None until somebody asks for them; of one way of arranging the ranks in nodes.
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
        """Of the two directions, for what is told of copies in one number."""
        return max(self.copy_out, self.copy_in, key=lambda line: line.beta_seconds)

    def __str__(self) -> str:
        """Whose it is, and when it was measured."""
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}"
        over = f" over {self.backend}" * (self.num_ranks > 1)
        return f"{self.device}, {ranks}{over}, {self.dtype}, measured {self.when}"

    @property
    def identity(self) -> Identity:
        return Identity(**{field.name: getattr(self, field.name) for field in fields(Identity)})

    @property
    def doubt(self) -> str:
        """Why choices by it may be wrong, where any of its lines fits badly; "" where none does."""
        operations = () if self.operations is None else vars(self.operations).values()
        found = min([self.r_squared, *(each.r_squared for each in operations if isinstance(each, Fit))])
        told = f"the profile of {self.when} describes this machine badly (r squared {found:.2f}), so choices"
        return "" if found >= GOOD_FIT else f"{told} may be wrong: `pmoe profile` measures it again"

    def products(self, multiply_adds: float, weights: float) -> float:
        """Seconds of a task that reads ``weights`` elements once."""
        alpha = self.compute.alpha_seconds * alphas(weights, self.device_type)
        return alpha + self.compute.beta_seconds * multiply_adds

    def sharing(self, inside: int) -> LineCost:
        """Of what a rank sends to gather or sum rows among ``inside`` ranks, where that was measured."""
        found = self.operations
        return self.message if found is None or found.num_inside != inside else found.all_gather.line

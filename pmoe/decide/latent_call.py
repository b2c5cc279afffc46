"""A call of a layer with latent experts, whose width L differs from the layer's width M.

Two projections, ``down`` and ``up``, are before and after the experts:

    x (T, M) --- gate ------------------> routing
        \\--- down ---> z (T, L) ---- rows sent, experts, weighted sum ---> (T, L) --- up ---> y (T, M)
        \\--- shared expert ----------------------------------------------------------------> + y

The gate and the shared expert get the tokens in the layer's width M. Rows are sent in the latent width L.
``up`` comes after the weighted sum of each token's results, so it projects each token once, and not each of
the token's K rows. This is correct because ``up`` is linear.

Letters: T tokens, K choices of each token, M = d_model, L = d_latent.
"""

from __future__ import annotations

from torch import Tensor

from pmoe.call.call import Call
from pmoe.call.decision import Decision
from pmoe.call.module_calls import described
from pmoe.comm.failures import publishing_failures
from pmoe.decide.experts_call import ExpertsCall, shared_output
from pmoe.decide.sources import counts_source


def latent_call(call: Call) -> tuple[Decision, Tensor]:
    """Runs a call of a layer with ``d_latent``. Returns the decision, and (T, M): the results of T tokens.

    M is d_model. The tokens are routed before they are projected. Routing checks the input: if it is wrong on
    one rank, every rank raises an error.
    """
    modules = call.modules
    latent = modules.latent
    assert latent is not None
    routed_experts = modules.without_shared_expert
    source = counts_source(call._replace(modules=routed_experts, scheduled=routed_experts))
    x_TM = source.routed.x_TM
    with publishing_failures(modules.ranks, "the down-projection of latent experts"):
        rows_TL = _checked("down", latent.down(x_TM), x_TM, modules.options.row_columns)
    source.routed = source.routed.with_rows(rows_TL)
    decision, y_TL = ExpertsCall(source)()
    with publishing_failures(modules.ranks, "the up-projection of latent experts, or the shared expert"):
        y_TM = _checked("up", latent.up(y_TL), x_TM, modules.options.d_model)
        if modules.shared_expert is not None:
            y_TM = y_TM + shared_output(modules, x_TM).to(y_TM.dtype)
    return decision, y_TM


def _checked(name: str, projected: object, x_TM: Tensor, columns: int) -> Tensor:
    """Checks the shape of a projection's result, and returns the result.

    name: the projection's name, "down" or "up".
    projected: the value that the projection returned.
    x_TM: (T, M), the T tokens with M = d_model columns.
    columns: the number of columns that the projection must return.

    Raises ValueError if the shape is not (T, columns).
    """
    shape = (x_TM.shape[0], columns)
    if not isinstance(projected, Tensor) or projected.shape != shape:
        raise ValueError(
            f"latent.{name} returned {described(projected)}; it must return {shape}: one row for each token"
        )
    return projected

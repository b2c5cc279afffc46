"""The gate of the Switch Transformer (arXiv 2101.03961, section 2.1): one expert for each token."""

from __future__ import annotations

from pmoe.gates.topk import TopKGate


class SwitchGate(TopKGate):
    """Chooses the most probable expert of each token, with its softmax probability as weight.

    It is `TopKGate` with top_k = 1 and without normalisation. Its parameter weight is (E, M), for E experts
    and M = d_model.

    Raises ValueError for another top_k, or for normalize=True.
    """

    normalizes = False

    def check_options(self, top_k: int, normalize: bool | None) -> None:
        if top_k != 1:
            raise ValueError(f"top_k ({top_k}) must be 1 with gate='switch'")
        if normalize:
            raise ValueError("normalize_gate (True) must be False or None with gate='switch'")

"""The gate of the Switch Transformer (arXiv 2101.03961, section 2.1): one expert a token."""

from __future__ import annotations

from pmoe.gates.topk import TopKGate


class SwitchGate(TopKGate):
    """Top-1 with the softmax probability itself as weight. Raises ValueError unless top_k is 1."""

    normalizes = False

    def check_options(self, top_k: int, normalize: bool | None) -> None:
        if top_k != 1:
            raise ValueError(f"top_k ({top_k}) must be 1 with gate='switch'")
        if normalize:
            raise ValueError("normalize_gate (True) must be False or None with gate='switch'")

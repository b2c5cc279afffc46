"""What is assumed for FSMoE's Table 5, in words: chosen before any result was seen."""

from __future__ import annotations

from collections.abc import Mapping

ASSUMPTIONS: Mapping[str, str] = {
    "lines": "Fig. 5 (c, d), Testbed B, in ms and ms per byte or per floating-point operation; a product of"
    " m x k by k x n is 2 m k n operations. Experts are their products and nothing else.",
    "layers": "Table 4's f, garbled in our text, is 1.2, 2.4 and * (no token dropped); L is 256, 512 or "
    "1024. 3 B x 3 heads x 3 L x 3 M x 3 H/M x 3 f x 2 ffn = 1,458. Heads change no cost here.",
    "f = *": "routing is even, so that no token dropped is the volume of f = 1.",
    "groups": "top_k = 2; E = 8 experts, one a node; N_MP = N_ESP = 4, the GPUs of a node; N_EP = N_DP = 8.",
    "tokens": "B samples are those of an MP group, and its 4 GPUs share them: a GPU sends k f B L / 4 rows."
    " Table 2's all-to-alls agree with this, and not with B samples for every GPU.",
    "bytes": "float32, 4 bytes an element. An all-gather's and a reduce-scatter's size is the whole "
    "gathered tensor, an all-to-all's what one GPU sends, an all-reduce's the gradients of one GPU.",
    "experts": "a GPU computes H / 4 columns for the k f B L rows of its node: 2 products for 'simple', 3 "
    "of the same size for 'Mixtral'. Backward takes twice as long.",
    "attention": "of one MP rank: queries, keys and values as one product, scores, values, output, M / 4 "
    "columns each, all heads in one product, nothing for softmax; then a reduce-scatter and, at the "
    "layer's end, an all-gather of B L rows over the MP group (Fig. 2). Backward computes twice as long"
    " and sends the same.",
    "the rest": "routing, ordering, norms, the optimizer and launch gaps take no time.",
    "gradients": "attention (4 M^2 / 4) and gate (8 M) are all-reduced over the 8 nodes; an expert is on "
    "one node only. The layer stands in a deep stack of its like: the gradients that travel during its "
    "backward pass are those of the layer above, as many as its own, ready when it begins.",
    "degrees": "whole, 1 to 16, each system's best by ideal simulation of its own schedule; under "
    "contention the degrees and partitions stay, for planners know lanes that were measured alone.",
    "DeepSpeed-MoE": "one chunk, every task after the one before, one all-reduce at the end.",
    "Tutel": "with PipeMoE: all-to-alls beside experts; one lane for all communication, so ESP collectives "
    "wait for all-to-alls; dispatches first, then combines; one degree for both passes; one all-reduce "
    "at the end.",
    "Tutel-Improved": "Tutel, with the all-reduce beside attention's backward computing (one lane: not "
    "beside its collectives); what is longer than that is exposed.",
    "FSMoE-No-IIO": "degrees of both passes apart, gradients partitioned over experts' part and attention "
    "(Section 5), all communication on one lane, as in Tutel.",
    "FSMoE": "the same with a lane for collectives inside the node, also beside attention.",
    "experts' backward": "one task in all five systems, as in the paper.",
    "contention": "while a collective between nodes and one inside the node run, each takes C times as "
    "long; computing slows nothing. C = 1.25 unless --contention says otherwise: by Fig. 5 a node's "
    "GPUs send 13 GB/s in all-to-alls and 4 x 6 GB/s inside the node, all through host memory over PCIe"
    " 3.0, for there is neither NVLink nor peer access; C = 1 is two independent networks, C = 2 one "
    "network and nothing gained. A quarter of that way is an assumption, not a measurement.",
    "average": "the mean over layers of Tutel's seconds over the system's, forward and backward together.",
}
"""What Table 5 needs and the paper does not say, or says in several ways."""

"""Mistakes in routing: gates, their losses, capacity and the order of rows."""

from __future__ import annotations

from tests.levels import MAKE_TEST
from tests.plants.plant import Plant

LEVEL = MAKE_TEST

CAPACITY = "pmoe/gates/capacity.py"
SORTED = "pmoe/ordering/sorted.py"
FORMULAS = "tests/unit/test_gates_formulas.py"

GATES = (
    Plant(
        name="capacity-rounded-down",
        breaks="an expert takes a row less than the capacity",
        file=CAPACITY,
        old="    return math.ceil(factor * num_tokens * top_k / num_experts)\n",
        new="    return int(factor * num_tokens * top_k / num_experts)\n",
        tests="tests/unit/test_ordering.py",
    ),
    Plant(
        name="capacity-off-by-one",
        breaks="an expert takes a row more than the capacity",
        file=CAPACITY,
        old="    keep = position + used_E[flat] < min(capacity, 2**62)\n",
        new="    keep = position + used_E[flat] <= min(capacity, 2**62)\n",
        tests="tests/unit/test_ordering.py",
    ),
    Plant(
        name="capacity-forgets-earlier-parts",
        breaks="a batch gated in parts drops other rows than the whole one",
        file=CAPACITY,
        old="    return keep.view_as(expert_TK), used_E + counts_E\n",
        new="    return keep.view_as(expert_TK), counts_E\n",
        tests="tests/unit/test_ordering.py",
    ),
    Plant(
        name="chunks-of-other-tokens",
        breaks="rows are counted in other chunks than tokens are cut into",
        file=SORTED,
        old="torch.arange(n - 1, n * num_tokens + n - 1, n, device",
        new="torch.arange(0, n * num_tokens, n, device",
        tests="tests/unit/test_ordering.py",
    ),
    Plant(
        name="order-within-an-expert",
        breaks="rows of an expert are not in the order of their tokens",
        file=SORTED,
        old='torch.from_numpy(np.argsort(key.to(torch.int16).numpy(), kind="stable")).clone()',
        new="(key.flip(0).argsort(stable=True).neg() + key.numel() - 1)",
        tests="tests/unit/test_ordering.py",
    ),
    Plant(
        name="first-row-of-a-token",
        breaks="a token takes the sum of the next one's rows",
        file=SORTED,
        old="torch.searchsorted(token_S, torch.arange(out.shape[0], device=token_S.device))",
        new="torch.searchsorted(token_S, torch.arange(out.shape[0]), right=True)",
        tests="tests/unit/test_recompute.py -k whatever_the_gate",
    ),
    Plant(
        name="dropped-slots-carry",
        breaks="a dropped slot's row travels for the others",
        file="pmoe/engine/variants/send_once.py",
        old="    return carrier_TK, carries_TK if keep_TK is None else carries_TK & keep_TK\n",
        new="    return carrier_TK, carries_TK\n",
        tests="tests/unit/test_ordering.py",
    ),
    Plant(
        name="balance-loss-scaled",
        breaks="the load-balance loss is 1 / E of what it should be",
        file="pmoe/gates/logits.py",
        old="    scale = num_experts / (max(chosen.numel(), 1) * max(num_tokens, 1))\n",
        new="    scale = 1 / (max(chosen.numel(), 1) * max(num_tokens, 1))\n",
        tests="tests/unit/test_gates.py",
    ),
    Plant(
        name="z-loss-not-squared",
        breaks="the z-loss grows linearly",
        file="pmoe/gates/logits.py",
        old="logits_TE.logsumexp(-1).square().sum()",
        new="logits_TE.logsumexp(-1).abs().sum()",
        tests="tests/unit/test_gates.py",
    ),
    Plant(
        name="noise-in-evaluation",
        breaks="the noisy gate has noise in evaluation and none in training",
        file="pmoe/gates/noisy_topk.py",
        old="        if not self.training:\n",
        new="        if self.training:\n",
        tests=FORMULAS,
    ),
    Plant(
        name="bias-away-from-balance",
        breaks="DeepSeek's bias grows for experts that are overloaded",
        file="pmoe/gates/deepseek.py",
        old="        self.bias.add_(self.update_speed * below_mean_E.sign())\n",
        new="        self.bias.sub_(self.update_speed * below_mean_E.sign())\n",
        tests=FORMULAS,
    ),
    Plant(
        name="group-score-of-one-expert",
        breaks="DeepSeek's groups are scored by their best expert alone",
        file="pmoe/gates/deepseek.py",
        old="grouped_TGX.topk(min(2, size), dim=-1)",
        new="grouped_TGX.topk(1, dim=-1)",
        tests=FORMULAS,
    ),
    Plant(
        name="bias-of-one-rank",
        breaks="ranks update the bias from loads of their own, and part",
        file="pmoe/gates/deepseek.py",
        old="            self.sum_over_ranks(self.load, group, ",
        new="            _ = (self.load, group, ",
        tests="tests/gloo/test_gates_ranks.py",
    ),
    Plant(
        name="hash-mixed-otherwise",
        breaks="token ids get other experts than before",
        file="pmoe/gates/hash.py",
        old="    word = (word ^ _shifted(word, 27)) * SECOND\n",
        new="    word = (word ^ _shifted(word, 26)) * SECOND\n",
        tests="tests/unit/test_gates_fixed.py",
    ),
    Plant(
        name="choices-not-distinct",
        breaks="a token may get an expert twice",
        file="pmoe/gates/draws.py",
        old="        chosen_TK[:, choice] = pick_T.masked_fill(taken_T, last)\n",
        new="        chosen_TK[:, choice] = pick_T\n",
        tests="tests/unit/test_gates_fixed.py",
    ),
    Plant(
        name="priority-by-token-first",
        breaks="a token's second choice comes before another's first one",
        file="pmoe/gates/batch_prioritised.py",
        old="    queue = expert_TK[order_T].t().reshape(-1)",
        new="    queue = expert_TK[order_T].reshape(-1)",
        tests="tests/unit/test_gates_whole_batch.py",
    ),
    Plant(
        name="ties-take-too-many-tokens",
        breaks="an expert takes every token of a tie",
        file="pmoe/gates/expert_choice.py",
        old="(tied_ET & (tied_ET.cumsum(-1) <= room_E1))",
        new="tied_ET",
        tests="tests/unit/test_gates_whole_batch.py",
    ),
)

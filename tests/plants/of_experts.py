"""Mistakes in what experts compute: products, activations, gradients and their sums."""

from __future__ import annotations

from tests.levels import MAKE_TEST
from tests.plants.plant import Plant

LEVEL = MAKE_TEST

STACKED = "pmoe/experts/stacked.py"
MODULES = "pmoe/experts/modules.py"
TESTS = "tests/unit/test_experts.py"

EXPERTS = (
    Plant(
        name="parameters-by-position",
        breaks="experts compute with registered parameters, not with what their names mean",
        file="pmoe/experts/base.py",
        old="        values = [self._value_of(name) for name in names]\n",
        new="        values = list(self.parameters())\n",
        tests="tests/unit/test_surgery.py",
    ),
    Plant(
        name="hooks-of-experts-uncalled",
        breaks="experts are computed without a call of their module",
        file="pmoe/decide/experts_call.py",
        old="            y_TM: Tensor = call_experts(x_TM, run=self._run)\n",
        new="            y_TM: Tensor = self._run(call.modules.experts, x_TM)\n",
        tests="tests/unit/test_called.py",
    ),
    Plant(
        name="experts-of-the-first-in-a-wrapper",
        breaks="where a wrapper calls other experts than the first that it holds, the first compute",
        file="pmoe/decide/experts_call.py",
        old="            modules = replace(modules, experts=experts)\n",
        new="            pass\n",
        tests="tests/unit/test_called.py -k instead_of_the_first",
    ),
    Plant(
        name="padding-counts",
        breaks="rows that a mask leaves out are routed like tokens",
        file="pmoe/decide/route.py",
        old="    return x[mask.bool()]\n",
        new="    return x.reshape(-1, x.shape[-1])\n",
        tests="tests/unit/test_mask.py",
    ),
    Plant(
        name="weight-gradient-without-routing-weight",
        breaks="the gradient of w2 lacks the routing weight",
        file=STACKED,
        old="            grad_NM.mul_(scale_N1)\n",
        new="            pass\n",
        tests=TESTS,
    ),
    Plant(
        name="routing-gradient-without-bias",
        breaks="the gradient of a routing weight lacks <dy, b2>",
        file=STACKED,
        old="                    grad_weight.addmv_(grad, b2_M[expert])\n",
        new="                    pass\n",
        tests=TESTS,
    ),
    Plant(
        name="bias-of-every-shard",
        breaks="each shard of an expert adds the whole bias",
        file=STACKED,
        old="bias = None if self.shard.index else b2",
        new="bias = b2",
        tests="tests/gloo/test_flexible.py -k sharded_experts_equal",
    ),
    Plant(
        name="recomputed-without-bias",
        breaks="T_M is made again without its bias",
        file=STACKED,
        old="self.product(expert_rows.rows_NM, w1, expert_rows.groups, b1, out=hidden_NG,",
        new="self.product(expert_rows.rows_NM, w1, expert_rows.groups, None, out=hidden_NG,",
        tests=f"{TESTS} tests/unit/test_reuse.py",
    ),
    Plant(
        name="adapter-without-its-scale",
        breaks="an adapter's B is not multiplied by alpha / rank",
        file="pmoe/experts/lora.py",
        old="scaled = up if adapter.scale == 1 or not up.numel() else up * adapter.scale",
        new="scaled = up",
        tests="tests/gloo/test_lora.py",
    ),
    Plant(
        name="shared-adapter-of-one-rank",
        breaks="each rank has only its own part of the gradient of an adapter that all experts share",
        file="pmoe/experts/lora.py",
        old="if adapter.shared and self.num_ranks > 1:",
        new="if False:",
        tests="tests/gloo/test_lora.py",
    ),
    Plant(
        name="frozen-experts-with-weight-gradients",
        breaks="the backward pass of frozen experts has tasks of weight gradients",
        file="pmoe/runners/pipeline.py",
        old="    return FrozenBackward\n",
        new="    return Backward\n",
        tests="tests/unit/test_lora.py",
    ),
    Plant(
        name="swiglu-gradient-of-the-gate",
        breaks="the gate's half is multiplied by itself",
        file="pmoe/experts/swiglu.py",
        old="grad_active_NH.mul_(up_NH), gate_NH)",
        new="grad_active_NH.mul_(gate_NH), gate_NH)",
        tests=TESTS,
    ),
    Plant(
        name="gradient-of-the-last-chunk",
        breaks="each chunk's weight gradient replaces the one before",
        file="pmoe/experts/products.py",
        old="                    total.addmm_(grad_On, rows_nI)\n",
        new="                    total.addmm_(grad_On, rows_nI, beta=0.0)\n",
        tests=TESTS,
    ),
    Plant(
        name="bias-gradient-of-the-last-chunk",
        breaks="each chunk's bias gradient replaces the one before",
        file="pmoe/experts/products.py",
        old="            self.total.add_(contribution)\n",
        new="            self.total.copy_(contribution)\n",
        tests=TESTS,
    ),
    Plant(
        name="shared-expert-of-other-width",
        breaks="of a gated expert's halves a shard keeps columns of the first alone",
        file="pmoe/experts/stacked.py",
        old="        parts = stacked.hidden_factor if dim == 1 else 1\n        shape",
        new="        parts = 1\n        shape",
        tests="tests/gloo/test_parallelize.py -k built_alone",
    ),
    Plant(
        name="modules-gradient-unweighted",
        breaks="a module's gradient lacks the routing weight",
        file=MODULES,
        old="            grad_output = (grad_NM[at] * weight_N[at].unsqueeze(1)).to(output.dtype)\n",
        new="            grad_output = grad_NM[at].to(output.dtype)\n",
        tests="tests/unit/test_experts_modules.py",
    ),
    Plant(
        name="modules-random-state-not-repeated",
        breaks="a module that is run again draws other random numbers",
        file=MODULES,
        old="            torch.set_rng_state(self.random)\n",
        new="",
        tests="tests/unit/test_reuse.py -k random_experts or dropout",
    ),
    Plant(
        name="modules-buffers-counted-twice",
        breaks="running statistics of a module count recomputed rows again",
        file=MODULES,
        old="                        buffer.copy_(value)\n",
        new="                        pass\n",
        tests="tests/unit/test_reuse.py -k ones_own_experts",
    ),
)

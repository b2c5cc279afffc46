"""Mistakes beside the layer: reduction of gradients, their norm, loss scales, checkpoints."""

from __future__ import annotations

from tests.levels import MAKE_TEST
from tests.plants.plant import Plant

LEVEL = MAKE_TEST

CHECKPOINT = "tests/gloo/test_checkpoint.py"
STATE = "pmoe/training/checkpoint_state.py"

CONVERT, LAYOUTS = "pmoe/convert/state_dicts.py", "tests/unit/test_convert.py"
BOUNDED = "pmoe/decide/bounded_counts.py"
BOUNDED_ROWS = "tests/gloo/test_bounded_rows.py -k without_a_bound or together"
FILES, FOREIGN = "pmoe/training/checkpoint_files.py", "tests/unit/test_foreign_files.py"

TRAINING = (
    Plant(
        name="halves-in-turn",
        breaks="gpt-oss's gate and up columns, which lie in turn, are taken for halves",
        file="pmoe/layouts.json",
        old='"experts.w1": "X M Hf"',
        new='"experts.w1": "X M fH"',
        tests=LAYOUTS,
    ),
    Plant(
        name="local-numbers",
        breaks="a rank's experts are written under the numbers of another rank's",
        file=CONVERT,
        old="range(len(experts)) if layout.local else experts",
        new="range(len(experts))",
        tests=LAYOUTS,
    ),
    Plant(
        name="tensors-too-many",
        breaks="a tensor that a layout does not know is left out in silence",
        file=CONVERT,
        old="(key for key in tensors if key not in owners)",
        new="(key for key in tensors if key in ())",
        tests=LAYOUTS,
    ),
    Plant(
        name="sums-not-compared",
        breaks="a flipped bit in a checkpoint is trained on",
        file=FILES,
        old="            if _sum(path / Path(name).name) != expected:\n",
        new="            if _sum(path / Path(name).name) < 0:\n",
        tests="tests/gloo/test_checkpoint.py -k flipped",
    ),
    Plant(
        name="any-pickle-is-read",
        breaks="a program in the place of a checkpoint's list is run",
        file=FILES,
        old="    tensor_list = _Records(file).load()\n",
        new="    tensor_list = pickle.load(file)\n",
        tests=FOREIGN,
    ),
    Plant(
        name="list-read-again",
        breaks="a checkpoint's list that is changed once it was seen to be one of records is run",
        file="pmoe/training/checkpoint.py",
        old="storage_reader=reader, **peers)",
        new="storage_reader=FileSystemReader(path), **peers)",
        tests=FOREIGN,
    ),
    Plant(
        name="log-over-another-file",
        breaks="a file without a line's end, in a log's place, is emptied",
        file="pmoe/integrations/run_folder.py",
        old="header.encode().startswith(content)",
        new="not end_of_lines",
        tests=FOREIGN,
    ),
    Plant(
        name="reducer-leaves-the-rest",
        breaks="gradients that no layer carried are never summed",
        file="pmoe/training/reducer.py",
        old="            self._works += [self._all_reduce(memory) for memory in self._timetable.end]\n",
        new="            pass\n",
        tests="tests/gloo/test_reducer.py",
    ),
    Plant(
        name="reducer-sends-too-early",
        breaks="gradients travel before they are made, unnoticed",
        file="pmoe/training/reducer.py",
        old="        self._check_ready(self._timetable.inside.get(self._num_layers))\n",
        new="        pass\n",
        tests="tests/gloo/test_reducer.py",
    ),
    Plant(
        name="reducer-mean-of-one",
        breaks="gradients are sums over ranks, not means",
        file="pmoe/training/reducer.py",
        old="                memory.div_(self.ranks.size)\n",
        new="                pass\n",
        tests="tests/gloo/test_reducer.py",
    ),
    Plant(
        name="expert-gradients-scaled",
        breaks="experts' gradients are divided by their copies, not by the ranks",
        file="pmoe/training/gradient_mean.py",
        old="        torch._foreach_div_(list(gradients), self.num_ranks)\n",
        new="        torch._foreach_div_(list(gradients), self.copies.size)\n",
        tests="tests/gloo/test_parallelize.py -k gradients_and_their_norm",
    ),
    Plant(
        name="norm-counts-copies",
        breaks="values that several ranks hold count several times",
        file="pmoe/training/clipping.py",
        old="            total = total + norms.pow(norm_type).sum() / copies\n",
        new="            total = total + norms.pow(norm_type).sum()\n",
        tests="tests/gloo/test_parallelize.py -k gradients_and_their_norm",
    ),
    Plant(
        name="nan-is-lost-in-the-norm",
        breaks="the largest gradient of two ranks is a number where one has NaN",
        file="pmoe/training/clipping.py",
        old="        total = both[0].where(both[1] == 0, math.nan)\n",
        new="        total = both[0]\n",
        tests="tests/gloo/test_parallelize_experts.py -k norm",
    ),
    Plant(
        name="replicated-counted-twice",
        breaks="gradients that the ranks of a dense layer share are summed over them",
        file="pmoe/training/parallel.py",
        old="        divisor = divide_by * copies\n",
        new="        divisor = divide_by\n",
        tests="tests/gloo/test_parallel.py",
    ),
    Plant(
        name="overflow-of-one-rank",
        breaks="a rank whose gradients overflow skips the step alone",
        file="pmoe/training/clipping.py",
        old="                reduce_to_largest(agreed, ranks.group)\n",
        new="                pass\n",
        tests="tests/gloo/test_grad_scaler.py",
    ),
    Plant(
        name="checkpoint-kept-too-long",
        breaks="one checkpoint more than asked for stays",
        file="pmoe/training/checkpoint_files.py",
        old="    for old in by_age[:-keep]:\n",
        new="    for old in by_age[: -keep - 1]:\n",
        tests="tests/unit/test_checkpoint.py",
    ),
    Plant(
        name="other-types-load",
        breaks="a checkpoint of another type is read without a word",
        file=STATE,
        old="        elif saved_tensor.properties.dtype != tensor.dtype:\n",
        new="        elif saved_tensor.properties.dtype != saved_tensor.properties.dtype:\n",
        tests="tests/unit/test_checkpoint.py",
    ),
    Plant(
        name="random-state-not-restored",
        breaks="a run that resumes draws other random numbers",
        file="pmoe/training/checkpoint_files.py",
        old='    torch.set_rng_state(generators["torch"])\n',
        new="",
        tests="tests/unit/test_checkpoint.py",
    ),
    Plant(
        name="experts-of-rank-0",
        breaks="every rank saves its modules under the names of rank 0's",
        file=STATE,
        old='                return f"{prefix}{int(expert) + first}.{rest}"\n',
        new='                return f"{prefix}{int(expert)}.{rest}"\n',
        tests=CHECKPOINT,
    ),
    Plant(
        name="halves-side-by-side",
        breaks="the second half of a gated expert is saved where another rank's first one is",
        file=STATE,
        old="first[dim] + number * half,",
        new="first[dim] + number * parts[0].shape[dim],",
        tests=CHECKPOINT,
    ),
    Plant(
        name="bound-of-its-own",
        breaks="each rank compares only its own rows with the bound",
        file=BOUNDED,
        old="counts_WPE.sum((0, 2)).max()",
        new="counts_WPE.sum((0, 2))[ranks.rank]",
        tests=BOUNDED_ROWS,
    ),
    Plant(
        name="rows-lost-without-a-word",
        breaks="a call that exceeds the bound is not noted, so its step counts",
        file=BOUNDED,
        old="        self._bound.exceeded.add_(rows.fits.logical_not())\n",
        new="",
        tests=BOUNDED_ROWS,
    ),
    Plant(
        name="example-never-trains-its-experts",
        breaks="the language model's optimizer leaves the experts as they were drawn",
        file="examples/train_lm.py",
        old="    for name, parameter in model.named_parameters():\n        is_matrix",
        new="    for name, parameter in model.named_parameters():\n        if is_expert(parameter):\n"
        "            continue\n        is_matrix",
        tests="tests/gloo/test_train_lm.py -k small_experts",
    ),
)

"""What ranks import, once for all of them: they are forks of a process that has imported this."""

import gc

import pmoe
import pmoe.choose.search
import pmoe.choose.solve
import pmoe.choose.trials
import pmoe.decide.exact_counts
import pmoe.experts.modules
import pmoe.experts.wrapper_checks
import pmoe.layer.reshard
import pmoe.schedule.ring_buffers
import pmoe.schedule.separate_buffers
import pmoe.training.checkpoint
import pmoe.training.expert_parallel
import pmoe.training.parallel
import pmoe.training.reducer  # noqa: F401
import tests.gloo.flexible
import tests.gloo.kit
import tests.libraries  # noqa: F401

# A collection of garbage then looks at the objects that tests make, not at those of all these modules.
gc.collect()
gc.freeze()

"""What ranks import, once for all of them: they are forks of a process that has imported this."""

import gc

import pmoe
import pmoe.experts.modules
import pmoe.experts.wrapped
import pmoe.layer.chosen
import pmoe.layer.exact_counts
import pmoe.layer.searched
import pmoe.layer.solved
import pmoe.layer.spread
import pmoe.schedule.rings
import pmoe.schedule.straight
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

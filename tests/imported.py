"""What ranks import, once for all of them: they are forks of a process that has imported this."""

import gc

import pmoe  # noqa: F401
import tests.libraries  # noqa: F401

# A collection of garbage then looks at the objects that tests make, not at those of all these modules.
gc.collect()
gc.freeze()

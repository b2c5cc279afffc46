"""What ranks import, once for all of them: they are forks of a process that has imported this."""

import contextlib
import gc

import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.profiler
import torch.utils.checkpoint  # noqa: F401

import pmoe  # noqa: F401

with contextlib.suppress(ImportError):  # both are optional
    import accelerate  # noqa: F401
    import transformers.models.mixtral.modeling_mixtral  # noqa: F401

# A collection of garbage then looks at the objects that tests make, not at those of all these modules.
gc.collect()
gc.freeze()

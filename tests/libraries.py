"""What tests import of others, slow as it is: processes that have it are forked rather than started."""

import contextlib

import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.profiler
import torch.utils.checkpoint  # noqa: F401

with contextlib.suppress(ImportError):  # both are optional
    import accelerate  # noqa: F401
    import transformers.models.mixtral.modeling_mixtral  # noqa: F401

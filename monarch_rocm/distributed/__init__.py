"""Training over many processes: `parallelize` anywhere, and one controlling program on PyTorch Monarch.

Nothing here imports torchmonarch before a `Fleet` is made.
"""

from monarch_rocm.distributed.checkpoints import Checkpoints
from monarch_rocm.distributed.fleet import Fleet
from monarch_rocm.distributed.parallel import parallelize
from monarch_rocm.distributed.run import Record, Restart, Restarted, Result, Run, TrainingError
from monarch_rocm.distributed.tensor_parallel import MonarchParallel, NormParallel

__all__ = [
    "Checkpoints",
    "Fleet",
    "MonarchParallel",
    "NormParallel",
    "Record",
    "Restart",
    "Restarted",
    "Result",
    "Run",
    "TrainingError",
    "parallelize",
]

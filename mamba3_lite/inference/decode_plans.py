"""How the decoding kernels are launched: short lists, and the remembered choice.

A plan changes speed, and results only by rounding. The choice for a (GPU, versions, model shape,
precision, batch size) is kept on disk, so that equal seeds give equal text in every process.
"""

from typing import NamedTuple

import torch

from mamba3_lite.models.ssd_plans import choice_key, keep_choice, read_choices

_FILE = "decode_plans.json"
_SOURCES = (
    "kernels/decode.py", "kernels/fused.py", "inference/decode_ops.py", "inference/decode_plans.py",
)  # fmt: skip


class Plan(NamedTuple):
    """One way to launch the kernels of a step.

    pdl: kernels start while their predecessor runs (compute capability 9.0 and more).
    weights: how many weights a program of a product holds at once, at batch 1.
    batch, rows, depth, stages: at larger batches the sequences and the most output columns of a
        program, the slice of the inputs that a round of its loop takes, and the rounds under way.
    state: how many numbers of a state, of one part, a program of the SSD step holds.
    split: at larger batches the most inputs of a product that a program takes; 0: it loops over all
        of them. ``batch`` and ``rows`` are then the program's tile, and ``depth`` and ``stages``
        count for the products that are not split.
    """

    pdl: bool
    num_warps: int
    weights: int
    batch: int
    rows: int
    depth: int
    stages: int
    state: int
    split: int = 0


# Wide operands and small shared memories: a last resort, and what float32 takes.
SMALL_PLAN = Plan(False, 4, 4096, 64, 16, 32, 2, 1024)
VECTOR_PLANS = (
    SMALL_PLAN._replace(pdl=True, weights=8192),
    SMALL_PLAN._replace(pdl=True),
    SMALL_PLAN._replace(pdl=True, num_warps=8, weights=16384),
    # A warp a program: sums without a barrier.
    SMALL_PLAN._replace(pdl=True, num_warps=1, weights=2048),
    SMALL_PLAN._replace(pdl=True, num_warps=2, weights=4096),
    SMALL_PLAN._replace(pdl=True, num_warps=2, weights=2048),
    SMALL_PLAN._replace(weights=8192),
)
BATCH_PLANS = (
    Plan(True, 4, 8192, 64, 32, 64, 4, 2048),
    Plan(True, 4, 8192, 64, 64, 64, 4, 2048),
    Plan(True, 4, 8192, 32, 32, 64, 4, 2048),
    Plan(True, 4, 8192, 64, 32, 128, 3, 4096),
    Plan(False, 4, 8192, 64, 32, 64, 4, 2048),
    Plan(True, 4, 8192, 64, 64, 128, 5, 2048, split=256),
    Plan(True, 8, 8192, 64, 64, 128, 5, 4096, split=256),
    Plan(True, 4, 8192, 64, 64, 256, 2, 2048, split=128),
    Plan(False, 4, 8192, 64, 64, 128, 5, 2048, split=256),
)


def candidates(device: torch.device, dtype: torch.dtype, batch: int) -> list[Plan]:
    """What is worth trying here."""
    if device.type != "cuda":
        return [SMALL_PLAN]
    if batch == 1:
        plans = [*VECTOR_PLANS, SMALL_PLAN]
    elif dtype == torch.float32:
        plans = [SMALL_PLAN._replace(pdl=True), SMALL_PLAN]
    else:
        plans = [*BATCH_PLANS, SMALL_PLAN]
    late = torch.cuda.get_device_capability(device) >= (9, 0)
    return [plan for plan in plans if late or not plan.pdl]


def key(device: torch.device, dtype: torch.dtype, shape: str) -> str:
    """What a choice is valid for."""
    return choice_key(device, dtype, shape, _SOURCES)


def remembered(name: str, among: list[Plan]) -> Plan | None:
    """The plan chosen earlier for this key, if it is one of those that are on offer now."""
    found = read_choices(_FILE).get(name)
    return next((plan for plan in among if list(plan) == found), None)


def remember(name: str, plan: Plan) -> None:
    """Keeps a choice."""
    keep_choice(_FILE, name, list(plan))

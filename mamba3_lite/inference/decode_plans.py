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
    state_warps: of the SSD step; 0: as many as the others have.
    ahead: how many kernels later what a kernel asks into the L2 cache is read; 0: it asks nothing.
    chains: parts of a larger batch that go through the layers beside each other, each in a stream
        of its own: memory works for one while another one waits. Products are split then.
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
    state_warps: int = 0
    ahead: int = 0
    chains: int = 1


# Wide operands and small shared memories: a last resort, and what float32 takes.
SMALL_PLAN = Plan(False, 4, 4096, 64, 16, 32, 2, 1024)
_VECTOR = SMALL_PLAN._replace(pdl=True)
VECTOR_PLANS = (
    _VECTOR,
    _VECTOR._replace(ahead=2),
    _VECTOR._replace(ahead=3),
    _VECTOR._replace(ahead=2, state=512),
    _VECTOR._replace(weights=8192, ahead=2),
    _VECTOR._replace(weights=2048, ahead=2),
    _VECTOR._replace(num_warps=8, weights=8192, ahead=2),
    # Two warps a program: sums without much of a barrier.
    _VECTOR._replace(num_warps=2, weights=2048, ahead=2),
    SMALL_PLAN._replace(ahead=2),
)
_LOOP = Plan(True, 4, 8192, 64, 64, 64, 4, 2048)
_SPLIT = Plan(True, 4, 8192, 64, 64, 128, 5, 2048, split=256)
BATCH_PLANS = (
    _SPLIT,
    _SPLIT._replace(ahead=2),
    _SPLIT._replace(ahead=1),
    _SPLIT._replace(state=1024, state_warps=2),
    _SPLIT._replace(state=1024, ahead=2),
    _SPLIT._replace(state=4096, state_warps=8),
    _SPLIT._replace(rows=32, ahead=2),
    _SPLIT._replace(chains=2),
    _SPLIT._replace(chains=2, ahead=2),
    _SPLIT._replace(chains=2, state=1024),
    _SPLIT._replace(chains=4),
    _SPLIT._replace(pdl=False),
    _LOOP,
    _LOOP._replace(rows=32, pdl=False),
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

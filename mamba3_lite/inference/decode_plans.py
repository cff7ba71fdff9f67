"""How the decoding kernels are launched: short lists, and the remembered choice.

A plan changes speed, and results only by rounding. The choice for a (GPU, versions, model shape,
precision, batch size) is kept on disk, so that equal seeds give equal text in every process.
"""

import importlib.util
from typing import NamedTuple

import torch

from mamba3_lite.models.ssd_plans import choice_key, keep_choice, read_choices

_FILE = "decode_plans.json"
# Gluon is still experimental: what another version of Triton makes of it has not been seen.
_GLUON_OF = "3.6."
_SOURCES = (
    "kernels/decode.py", "kernels/decode_staged.py", "kernels/decode_resident.cu",
    "kernels/fused.py", "inference/decode_ops.py", "inference/decode_plans.py",
    "inference/decode_staged.py", "inference/decode_resident.py",
)  # fmt: skip


class Plan(NamedTuple):
    """One way to launch the kernels of a step.

    pdl: kernels start while their predecessor runs (compute capability 9.0 and more).
    num_warps: of a product.
    weights: how many weights a program of a product holds at once, at batch 1.
    batch, rows, depth, under_way: at larger batches the sequences and the most output columns of a
        program, the slice of the inputs that a round of its loop takes, and the bytes of the rounds
        under way.
    state, state_warps: how many numbers of a state, of one part, a program of the SSD step holds,
        and its warps.
    shared: what part of the cache all kernels ask for as shared memory, in percent; -1: each asks
        for what it needs.
    staged: by the kernels of ``kernels/decode_staged.py``, in 16 bits on Hopper, where they fit.
        What does not fit them is left for what this plan says of products.
    resident: whole steps by ``kernels/decode_resident.cu``, where it fits. Nothing else counts.
    """

    pdl: bool
    num_warps: int
    weights: int
    batch: int
    rows: int
    depth: int
    under_way: int
    state: int
    state_warps: int
    shared: int = -1
    staged: bool = False
    resident: bool = False


# Wide operands and small shared memories: a last resort, and what float32 takes.
SMALL_PLAN = Plan(False, 4, 4096, 64, 16, 32, 40 * 2**10, 1024, 4)
_VECTOR = SMALL_PLAN._replace(pdl=True)
VECTOR_PLANS = (
    SMALL_PLAN._replace(resident=True),
    _VECTOR._replace(state=2048, state_warps=2, staged=True),
    _VECTOR,
    _VECTOR._replace(weights=8192, state=2048),
)
_BATCH = Plan(True, 4, 8192, 64, 64, 128, 160 * 2**10, 4096, 4, shared=100)
BATCH_PLANS = (
    _BATCH._replace(staged=True),
    _BATCH._replace(staged=True, rows=128, depth=64),
    _BATCH,
    _BATCH._replace(state=2048),
    _BATCH._replace(depth=64),
    _BATCH._replace(shared=-1),
    _BATCH._replace(shared=-1, pdl=False),
)


def resident_kernels(device: torch.device) -> bool:
    """Whether this GPU is one that they were written for, and the bindings of CUDA are there."""
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    try:
        return hopper and importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


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
    import triton

    major, _ = torch.cuda.get_device_capability(device)
    staged = major == 9 and dtype != torch.float32 and triton.__version__.startswith(_GLUON_OF)
    resident = dtype == torch.bfloat16 and resident_kernels(device)
    return [
        plan
        for plan in plans
        if (major >= 9 or not plan.pdl)
        and (staged or not plan.staged)
        and (resident or not plan.resident)
    ]


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

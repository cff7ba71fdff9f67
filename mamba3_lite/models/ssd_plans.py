"""How the fused kernels are launched: the short list, and the remembered choice.

A plan changes speed, never results. Which one runs is decided once for a (GPU, versions, shape,
precision) and kept on disk, so that no later process tests or times again.
"""

import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from mamba3_lite import env


class Launch(NamedTuple):
    """Warps and software-pipelining stages of one kernel."""

    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """How the three big kernels are launched.

    tile: the largest tile of state rows and of channels; keep: whether the gradient kernel holds
    its tokens' tiles in 16-bit precision (in float32 it never does).
    """

    tile: int
    keep: bool
    carry: Launch
    output: Launch
    gradient: Launch


CANDIDATES = (
    Plan(64, True, Launch(4, 2), Launch(4, 1), Launch(4, 1)),
    Plan(64, False, Launch(4, 2), Launch(4, 1), Launch(4, 1)),
    Plan(64, False, Launch(4, 3), Launch(4, 1), Launch(4, 1)),
)
# Compute capabilities on which the first candidate was measured to be the fastest (docs/LOG.md):
# there it runs as soon as it has passed parity.
MEASURED = ((9, 0),)


def chunk_size(dtype: torch.dtype) -> int:
    """Tokens of a kernel's chunk; float32 tiles of 64 would not fit the smaller shared memories."""
    return 32 if dtype == torch.float32 else 64


@functools.cache
def _source_hash() -> str:
    """Of the kernels, and of what decides how they are launched."""
    package = Path(__file__).parent.parent
    sources = ("kernels/fused.py", "models/ssd_fused.py", "models/ssd_plans.py")
    text = b"".join((package / source).read_bytes() for source in sources)
    return hashlib.sha256(text).hexdigest()[:12]


def key(device: torch.device, dtype: torch.dtype, heads: int, state_dim: int, head_dim: int) -> str:
    """What a choice is valid for."""
    import triton

    name = torch.cuda.get_device_name(device)
    shape = f"H{heads}-N{state_dim}-P{head_dim}"
    precision = str(dtype).removeprefix("torch.")
    return "|".join([name, f"triton {triton.__version__}", _source_hash(), precision, shape])


def _path() -> Path:
    return Path(env.read("MAMBA3_LITE_CACHE")).expanduser() / "fused_plans.json"


def _entries() -> dict[str, int]:
    """Index of the chosen candidate by key; a file that cannot be read is as good as none."""
    try:
        found = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # RuntimeError: this user has no home directory
        return {}
    known = found.items() if isinstance(found, dict) else ()
    return {n: i for n, i in known if type(i) is int and 0 <= i < len(CANDIDATES)}


def remembered(name: str) -> Plan | None:
    """The plan chosen earlier for this key."""
    index = _entries().get(name)
    return None if index is None else CANDIDATES[index]


def remember(name: str, plan: Plan) -> None:
    """Keeps a choice; a folder that cannot be written only means choosing again next time."""
    text = json.dumps({**_entries(), name: CANDIDATES.index(plan)}, indent=2)
    try:
        _path().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=_path().parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, _path())
    except (OSError, RuntimeError):
        return

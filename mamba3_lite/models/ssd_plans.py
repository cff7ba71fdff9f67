"""How the fused kernels are launched: the short list, and the remembered choice.

A plan changes speed, never results. Which one runs is decided once for a (GPU, versions, shape,
precision) and kept on disk, so that no later process tests or times again.
"""

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

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
_FILE = "fused_plans.json"
_SOURCES = ("kernels/fused.py", "models/ssd_fused.py", "models/ssd_plans.py")


def chunk_size(dtype: torch.dtype) -> int:
    """Tokens of a kernel's chunk; float32 tiles of 64 would not fit the smaller shared memories."""
    return 32 if dtype == torch.float32 else 64


@functools.cache
def _source_hash(sources: tuple[str, ...]) -> str:
    package = Path(__file__).parent.parent
    text = b"".join((package / source).read_bytes() for source in sources)
    return hashlib.sha256(text).hexdigest()[:12]


def choice_key(
    device: torch.device, dtype: torch.dtype, shape: str, sources: tuple[str, ...]
) -> str:
    """What a choice is valid for: this GPU, Triton, code, precision and shape.

    Args:
        sources: files below the package: the kernels, and what decides how they are launched.
    """
    import triton

    name = torch.cuda.get_device_name(device)
    precision = str(dtype).removeprefix("torch.")
    return "|".join([name, f"triton {triton.__version__}", _source_hash(sources), precision, shape])


def choices_path(file: str) -> Path:
    """Where choices are kept, by the name of their file."""
    return Path(env.read("MAMBA3_LITE_CACHE")).expanduser() / file


def read_choices(file: str) -> dict[str, Any]:
    """Choices by key; a file that cannot be read is as good as none."""
    try:
        found = json.loads(choices_path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # RuntimeError: this user has no home directory
        return {}
    return found if isinstance(found, dict) else {}


def keep_choice(file: str, name: str, choice: Any) -> None:
    """Adds a choice; a folder that cannot be written only means choosing again next time."""
    text = json.dumps({**read_choices(file), name: choice}, indent=2)
    with contextlib.suppress(RuntimeError):  # as in read_choices
        keep_bytes(choices_path(file), text.encode())


def keep_bytes(path: Path, data: bytes) -> None:
    """A file of the cache, whole or not at all; without it some work is done again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as kept:
            kept.write(data)
        os.replace(kept.name, path)
    except OSError:
        return


def key(device: torch.device, dtype: torch.dtype, heads: int, state_dim: int, head_dim: int) -> str:
    """What a choice is valid for."""
    return choice_key(device, dtype, f"H{heads}-N{state_dim}-P{head_dim}", _SOURCES)


def _path() -> Path:
    return choices_path(_FILE)


def _entries() -> dict[str, int]:
    """Index of the chosen candidate by key."""
    known = read_choices(_FILE).items()
    return {n: i for n, i in known if type(i) is int and 0 <= i < len(CANDIDATES)}


def remembered(name: str) -> Plan | None:
    """The plan chosen earlier for this key."""
    index = _entries().get(name)
    return None if index is None else CANDIDATES[index]


def remember(name: str, plan: Plan) -> None:
    """Keeps a choice."""
    keep_choice(_FILE, name, CANDIDATES.index(plan))

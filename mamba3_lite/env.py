"""Every environment variable the project reads, and the only reader of ``os.environ``."""

import os
from dataclasses import dataclass

from mamba3_lite.errors import UserError


@dataclass(frozen=True)
class EnvVar:
    """One variable: its name, the text used when it is not set, and what it means."""

    name: str
    default: str
    meaning: str


VARIABLES: tuple[EnvVar, ...] = (
    EnvVar(
        "ENABLE_TRITON_KERNELS",
        "0",
        "1 lets ssd_dispatch: triton run; anything else rewrites it to pytorch with one warning.",
    ),
    EnvVar(
        "TRITON_PER_CHUNK_NUM_STAGES",
        "1",
        "Software-pipelining stages of the per-chunk Triton kernel.",
    ),
    EnvVar("TRITON_PER_CHUNK_NUM_WARPS", "4", "Warps per program of the per-chunk Triton kernel."),
    EnvVar(
        "TRITON_INTERPRET",
        "0",
        "1 makes Triton interpret its kernels on the CPU; read by Triton itself, too.",
    ),
    EnvVar(
        "MAMBA3_LITE_CACHE",
        "~/.cache/mamba3_lite",
        "Folder of what is measured once a machine: the launch plans of the fused kernels.",
    ),
    EnvVar("TORCH_COMPILE_MODE", "", "Overrides training.compile_mode when set."),
    EnvVar("CC", "", "C compiler that Triton builds its launchers with; gcc or clang when empty."),
    EnvVar("WORLD_SIZE", "", "Processes that train together; torchrun sets it, and RANK."),
    EnvVar("LOCAL_RANK", "0", "Which process of its host this is, and so its GPU; of torchrun."),
    EnvVar("LOCAL_WORLD_SIZE", "1", "Processes on this host; torchrun sets it."),
    EnvVar("WANDB_PROJECT", "", "Switches W&B logging on and names the project."),
    EnvVar("WANDB_RUN_NAME", "", "Display name of the W&B run; W&B picks one when empty."),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}


def _listed(name: str) -> EnvVar:
    assert name in _BY_NAME, f"environment variable {name} is not in mamba3_lite.env.VARIABLES"
    return _BY_NAME[name]


def read(name: str) -> str:
    """Value of a listed variable, or its default when it is not set.

    An unlisted name is our own mistake and fails an assertion.
    """
    return os.environ.get(name, _listed(name).default)


def read_int(name: str) -> int:
    """Value of a listed variable as an integer; ``UserError`` when it is not one."""
    value = read(name)
    try:
        return int(value)
    except ValueError:
        raise UserError(
            f"environment variable {name}={value!r} is not an integer; "
            f"unset it or use a number such as {name}={_listed(name).default or 1}"
        ) from None


def is_set(name: str) -> bool:
    """Whether a listed variable is set to a non-empty value."""
    return bool(os.environ.get(_listed(name).name))


def for_child(import_root: str) -> dict[str, str]:
    """This process's environment for a Python child that must import from ``import_root``."""
    path = os.pathsep.join(filter(None, (import_root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}

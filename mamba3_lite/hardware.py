"""What the machine is: device names, stated peaks, memory, and a run's environment record."""

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

_PACKAGE = Path(__file__).resolve().parent

# Dense bf16 tensor-core FLOP/s without sparsity, as stated in the vendor's data sheets. Only the
# variant that the sheet names matches: a peak that is wrong makes a wrong MFU, none makes none.
_PEAKS_BF16: tuple[tuple[str, float], ...] = (
    (r"A100\b.*", 312e12),
    (r"H100 PCIe", 756e12),
    (r"H100 80GB HBM3|H100 SXM.*", 989e12),
    (r"H200|H200 SXM.*", 989e12),
    (r"B200", 2250e12),
    (r"L40S", 362e12),
    (r"L4", 121e12),
    (r"A10", 125e12),
    (r"RTX 4090", 165e12),
    (r"RTX 3090", 71e12),
)

# GPUs that can be named without being there: the product whose peak is meant, and the memory that
# its data sheet states, in GB.
_STATED: dict[str, tuple[str, int]] = {
    "A100": ("A100-SXM4-80GB", 80),
    "A100 40GB": ("A100-SXM4-40GB", 40),
    "H100": ("H100 SXM5", 80),
    "H100 PCIe": ("H100 PCIe", 80),
    "H200": ("H200", 141),
    "B200": ("B200", 180),
    "L40S": ("L40S", 48),
    "L4": ("L4", 24),
    "A10": ("A10", 24),
    "RTX 4090": ("RTX 4090", 24),
    "RTX 3090": ("RTX 3090", 24),
}
GPU_NAMES = tuple(_STATED)


class StatedGpu(NamedTuple):
    """A GPU as its data sheet has it: dense bf16 FLOP/s and bytes of memory."""

    name: str
    peak_bf16_flops: float
    memory_bytes: int


def stated_gpu(name: str) -> StatedGpu | None:
    """The GPU of a name in ``GPU_NAMES``, in any case; None for another."""
    for known, (product, gigabytes) in _STATED.items():
        if known.lower() == name.strip().lower():
            peak = peak_bf16_flops(product)
            assert peak is not None
            return StatedGpu(known, peak, gigabytes * 10**9)
    return None


def device_name(device: torch.device | str) -> str:
    """Product name of a CUDA device, or of the CPU for anything else."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_model()


def peak_bf16_flops(name: str) -> float | None:
    """Stated dense bf16 peak in FLOP/s of a device called ``name``; None if the table lacks it.

    Slices of a GPU (MIG) and laptop variants do not have the peak of the product in their name.
    """
    if re.search(r"\bMIG\b|Laptop|Max-Q", name):
        return None
    product = re.sub(r"^(NVIDIA |Tesla |GeForce )*", "", name.strip())
    for pattern, peak in _PEAKS_BF16:
        if re.fullmatch(pattern, product):
            return peak
    return None


def peak_memory_bytes(device: torch.device | str) -> int:
    """Highest memory use so far: allocated on a CUDA device, else resident in this process."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def environment_record() -> dict[str, Any]:
    """JSON-ready facts that a measured number depends on; what does not apply is None or empty."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "package": _version("mamba3-lite"),
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "cpu": {"model": _cpu_model(), "count": os.cpu_count()},
        "git": _git_state(_PACKAGE.parent),
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {"name": properties.name, "memory_bytes": properties.total_memory}


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if named:
            return named[1].strip()
    return platform.processor() or platform.machine()


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of a checkout of this project and whether it differs from it; None outside of one.

    An installed package may lie inside somebody else's repository, whose commit says nothing.
    """
    top = _git(folder, "rev-parse", "--show-toplevel")
    commit = _git(folder, "rev-parse", "HEAD")
    if not top or not commit or Path(top).resolve() != folder.resolve():
        return None
    return {"commit": commit, "dirty": _git(folder, "status", "--porcelain") != ""}


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command, stripped; None when git is absent or refuses."""
    if (git := shutil.which("git")) is None:
        return None
    run = subprocess.run([git, "-C", str(folder), *arguments], capture_output=True, text=True)
    return run.stdout.strip() if run.returncode == 0 else None

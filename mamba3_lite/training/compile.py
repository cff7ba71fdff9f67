"""torch.compile, block by block."""

import shutil
import sysconfig
from pathlib import Path

import torch
import torch._functorch.config
import torch._inductor

from mamba3_lite.models.mamba_block import Mamba3Block
from mamba3_lite.models.transformer import Mamba3Transformer


def compile_refusal(device: torch.device) -> str | None:
    """Why torch.compile cannot work here, or None."""
    if device.type == "cuda":
        return None
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return "no C++ compiler"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "no Python headers"
    return None


# CUDA graphs would record one block and replay it over another's outputs: only the rest of the mode
# is kept.
_BLOCK_MODES = {"max-autotune": "max-autotune-no-cudagraphs", "reduce-overhead": "default"}


def compile_blocks(model: Mamba3Transformer, mode: str) -> str:
    """torch.compile for each block: one graph serves all, and checkpoints keep the raw names.

    Returns the mode in effect: without CUDA graphs, which need the whole step in one graph.
    """
    mode = _BLOCK_MODES.get(mode, mode)
    # Padded strides would cost two copies of the projection a layer: the fused SSD reads and writes
    # it as it is.
    options = {**torch._inductor.list_mode_options(mode), "comprehensive_padding": False}
    # By default a compiled backward pass is traced under the forward's autocast, and the float32
    # products of the plain SSD paths become bfloat16 in it, where the block's own switch does not
    # reach. Eager backward passes know no autocast.
    torch._functorch.config.backward_pass_autocast = "off"  # type: ignore[attr-defined]
    for block in model.layers:
        assert isinstance(block, Mamba3Block)
        compiled = torch.compile(block._forward_impl, options=options, fullgraph=False)
        block._forward_impl = compiled  # type: ignore[method-assign]
    return mode

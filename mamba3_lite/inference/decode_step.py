"""One step of decoding as a list of operations, which kernels and their plain twins share."""

from typing import Any

from torch import Tensor

from mamba3_lite.inference.decode_ops import Norm
from mamba3_lite.inference.decode_weights import Buffers, Weights


def run_steps(ops: Any, weights: Weights, buffers: Buffers, steps: int) -> None:
    """Steps: ids and state in, the best ids and state out, in the buffers.

    So are the logits of a single step. Of several, each reads the ids of the one before.

    Args:
        ops: as ``PlainOps`` of ``inference/decode_ops.py``.
    """
    for found in buffers.best[:steps]:
        run_step(ops, weights, buffers, found, keep=steps == 1)


def run_step(ops: Any, w: Weights, b: Buffers, found: Tensor, keep: bool) -> None:
    """One of them; found (B, 2) and keep as of ``PlainOps.head``."""
    scales = [scale for layer in w.layers for scale in (layer.norm1, layer.norm2)]
    norms = [Norm(scale, w.eps, b.scaled, b.squares) for scale in (*scales, w.norm_f)]
    ops.embed(b.ids, w.embed, b.x, following=norms[0])
    for i, layer in enumerate(w.layers):
        before, between, behind = norms[2 * i : 2 * i + 3]
        ops.product(b.x, layer.in_proj, b.proj, norm=before)
        ops.ssd_step(b.proj, layer.a, b.state[i], b.y)
        ops.product(b.y, layer.mixer, b.x, add=True, following=between)
        ops.product(b.x, layer.gate_up, b.act, norm=between, gated=True)
        ops.product(b.act, layer.down, b.x, add=True, following=behind)
    ops.head(b.x, w.head, b.logits, b.ids, found, norm=norms[-1], keep=keep)

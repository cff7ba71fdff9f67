"""The operations of one decoding step, each by a kernel or by its plain twin.

``KernelOps(plan)`` and ``PlainOps()`` share one set of methods and write into given buffers, so a
step is written once (``inference/decoder.py``) and each kernel can be held against its twin.

Legend: B batch, K inputs and M outputs of a product, H heads, P channels, N complex state width,
W = H (P + 4 N + 1).
"""

import ctypes
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba3_lite.inference.decode_plans import Plan
from mamba3_lite.models import ssd_rotated
from mamba3_lite.models.swiglu import plain_swiglu

# Beyond this a row of weights does not fit the registers of a program at batch 1.
LARGEST_INPUT = 16_384
LARGEST_STATE = 256
# Of the GPUs that this is for, 108 to 148.
_MULTIPROCESSORS = 128
_BEST_BLOCK = 2048
_LINE_BYTES = 128
# CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of the CUDA driver's interface.
_SHARED_PERCENT = 9


def power_of_two(n: int) -> int:
    """The first from ``n`` >= 1 on."""
    return 1 << (n - 1).bit_length()


class Norm(NamedTuple):
    """An RMSNorm of the residual stream x (B, K).

    scale: (K,). scaled (B, K) and squares (B, parts) float32: who writes x may leave here what the
    norm needs, x times ``scale`` and parts of the sums of x squared, for who reads it.
    """

    scale: Tensor
    eps: float
    scaled: Tensor
    squares: Tensor


def norm_parts(width: int) -> int:
    """Room for the sums of squares of 16 columns each: a power of two, and 16 at least."""
    return power_of_two(max(16, -(-width // 16)))


class PlainOps:
    """In PyTorch, in the precision of the operands (float64 works)."""

    def embed(
        self, ids: Tensor, weight: Tensor, x: Tensor, *, following: Norm | None = None
    ) -> None:
        """x (B, K) <- the rows of ``weight`` that ``ids`` (B,) name.

        Args:
            following: the norm through which x is read next.
        """
        x.copy_(weight[ids])

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        add: bool = False,
        following: Norm | None = None,
    ) -> None:
        """out (B, M) <- weight (M, K) times x (B, K).

        Args:
            norm: what x goes through first.
            gated: weight is (2 M, K); out is silu of the first half times the second.
            add: onto what ``out`` holds.
            following: the norm through which ``out`` is read next.
        """
        if norm is not None:
            x = F.rms_norm(x, x.shape[-1:], norm.scale.to(x.dtype), norm.eps)
        result = F.linear(x, weight)
        result = plain_swiglu(result) if gated else result
        out.copy_(out + result if add else result)

    def head(
        self,
        x: Tensor,
        weight: Tensor,
        logits: Tensor,
        ids: Tensor,
        found: Tensor,
        *,
        norm: Norm,
        keep: bool = True,
    ) -> None:
        """logits (B, V) float32 <- weight (V, K) times x (B, K), and what :meth:`best` finds there.

        Args:
            norm: what x goes through first.
            keep: False: nobody wants the logits, and what ``logits`` then holds is undefined.
        """
        self.product(x, weight, logits, norm=norm)
        self.best(logits, ids, found)

    def best(self, logits: Tensor, ids: Tensor, found: Tensor) -> None:
        """The largest of logits (B, V): ids (B,) <- where; found (B, 2) float64 <- where, value."""
        largest, where = logits.max(-1)
        ids.copy_(where)
        found.copy_(torch.stack([where.double(), largest.double()], -1))

    def ssd_step(self, proj: Tensor, a: Tensor, state: Tensor, y: Tensor) -> None:
        """One token: state (B, H, 2 N, P) in place and y (B, H P).

        Args:
            proj: the projection (B, W).
            a: decays (2, H), the real parts above the imaginary ones.
        """
        _, heads, rows, channels = state.shape
        parts = proj.split([heads * channels, *[heads * rows // 2] * 4, heads], -1)
        x, *pairs = (part.unflatten(-1, (heads, -1)) for part in parts[:5])
        result, new = ssd_rotated.step(
            x, (pairs[0], pairs[1]), (pairs[2], pairs[3]), parts[5], (a[0], a[1]), state
        )
        y.copy_(result.flatten(1))
        state.copy_(new)


class KernelOps:
    """The same by the kernels of ``kernels/decode.py``; tensors contiguous and on one device."""

    def __init__(self, plan: Plan):
        from mamba3_lite.kernels import decode

        self.plan, self.kernels = plan, decode

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *given: Any, num_warps: int, num_stages: int = 1,
        **constants: Any,
    ) -> None:  # fmt: skip
        """As the plan says."""
        options = {"num_warps": num_warps, "num_stages": num_stages, "PDL": self.plan.pdl}
        if self.plan.pdl:
            options["launch_pdl"] = True
        prefer_shared_memory(kernel[grid](*given, **constants, **options), self.plan.shared)

    def embed(
        self, ids: Tensor, weight: Tensor, x: Tensor, *, following: Norm | None = None
    ) -> None:
        """See :meth:`PlainOps.embed`."""
        self._embed(ids, weight, x, None)

    def _embed(self, ids: Tensor, weight: Tensor, x: Tensor, following: Norm | None) -> None:
        batch, width = x.shape
        block = min(1024, power_of_two(width))
        scale, _, scaled, squares = following or (None, None, None, None)
        self.launch(
            self.kernels.embed_kernel, (batch, -(-width // block)), ids, weight, x, scale, scaled,
            squares, K=width, PARTS=1 if squares is None else squares.shape[1], BLOCK=block,
            num_warps=4,
        )  # fmt: skip

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        add: bool = False,
        following: Norm | None = None,
    ) -> None:
        """See :meth:`PlainOps.product`."""
        if len(x) == 1:
            self._vector_product(x, weight, out, norm, gated, add)
        else:
            self._batch_product(x, weight, out, norm, gated, add, following)

    def _vector_product(
        self, x: Tensor, weight: Tensor, out: Tensor, norm: Norm | None, gated: bool, add: bool
    ) -> None:
        inputs, outputs = x.shape[1], out.shape[1]
        width = power_of_two(inputs)
        rows = min(_thin(outputs), max(1, self.plan.weights // width // (2 if gated else 1)))
        scale, eps = (norm.scale, norm.eps) if norm else (None, 0.0)
        self.launch(
            self.kernels.vector_kernel, (-(-outputs // rows),), x, scale, weight, out, eps,
            K=inputs, M=outputs, ROWS=rows, BLOCK_K=width, NORM=norm is not None, GATED=gated,
            ADD=add, num_warps=self.plan.num_warps,
        )  # fmt: skip

    def _batch_product(
        self, x: Tensor, weight: Tensor, out: Tensor, norm: Norm | None, gated: bool, add: bool,
        following: Norm | None,
    ) -> None:  # fmt: skip
        x = self._normed(x, norm) if norm else x
        self._launch_batch(x, weight, out, gated=gated, add=add)

    def _launch_batch(
        self, x: Tensor, weight: Tensor, out: Tensor, *, gated: bool = False, add: bool = False,
        largest: tuple[Tensor, Tensor] | None = None, keep: bool = True,
    ) -> None:  # fmt: skip
        (batch, inputs), outputs = x.shape, out.shape[1]
        slices = 2 if gated else 1
        tile = min(self.plan.batch, max(16, power_of_two(batch)))
        rows = self._batch_rows(outputs, slices)
        # The thinnest slice takes more inputs at a time.
        depth = self.plan.depth * (2 if slices * rows == 16 else 1)
        lines = -(-rows * inputs * weight.element_size() // _LINE_BYTES)
        round_bytes = (tile + slices * rows) * depth * weight.element_size()
        stages = max(2, min(self.plan.under_way // round_bytes, -(-inputs // depth)))
        values, places = largest or (None, None)
        self.launch(
            self.kernels.batch_kernel, (-(-outputs // rows), -(-batch // tile)), x, weight, out,
            batch, values, places, K=inputs, M=outputs, BLOCK_B=tile, BLOCK_M=rows, BLOCK_K=depth,
            LINES=power_of_two(lines), GATED=gated, ADD=add, KEEP=keep,
            num_warps=self.plan.num_warps, num_stages=stages,
        )  # fmt: skip

    def _batch_rows(self, outputs: int, slices: int) -> int:
        return max(16, min(_thin(outputs), self.plan.rows // slices))

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        (batch, width), out = x.shape, torch.empty_like(x)
        self.launch(
            self.kernels.norm_kernel, (batch,), x, norm.scale, out, norm.eps, K=width,
            BLOCK=power_of_two(width), num_warps=self.plan.num_warps,
        )  # fmt: skip
        return out

    def head(
        self,
        x: Tensor,
        weight: Tensor,
        logits: Tensor,
        ids: Tensor,
        found: Tensor,
        *,
        norm: Norm,
        keep: bool = True,
    ) -> None:
        """See :meth:`PlainOps.head`."""
        if len(x) == 1:
            self._vector_product(x, weight, logits, norm, False, False)
            self.best(logits, ids, found)
            return
        self._best_of(self._batch_head(x, weight, logits, norm, keep), ids, found)

    def _batch_head(
        self, x: Tensor, weight: Tensor, logits: Tensor, norm: Norm, keep: bool
    ) -> tuple[Tensor, Tensor]:
        """The largest logits of each block, and where."""
        batch, width = logits.shape
        largest = room_for_largest(batch, -(-width // self._batch_rows(width, 1)), logits.device)
        self._launch_batch(self._normed(x, norm), weight, logits, largest=largest, keep=keep)
        return largest

    def best(self, logits: Tensor, ids: Tensor, found: Tensor) -> None:
        """See :meth:`PlainOps.best`."""
        batch, width = logits.shape
        largest = room_for_largest(batch, -(-width // _BEST_BLOCK), logits.device)
        self.launch(
            self.kernels.largest_kernel, largest[0].shape, logits, *largest,
            M=width, BLOCK=_BEST_BLOCK, num_warps=4,
        )  # fmt: skip
        self._best_of(largest, ids, found)

    def _best_of(self, largest: tuple[Tensor, Tensor], ids: Tensor, found: Tensor) -> None:
        batch, blocks = largest[0].shape
        self.launch(
            self.kernels.best_kernel, (batch,), *largest, ids, found,
            S=blocks, BLOCK=power_of_two(blocks), num_warps=4,
        )  # fmt: skip

    def ssd_step(self, proj: Tensor, a: Tensor, state: Tensor, y: Tensor) -> None:
        """See :meth:`PlainOps.ssd_step`; computed in float32."""
        batch, heads, rows, channels = state.shape
        tile_n = power_of_two(rows // 2)
        tile_p = min(power_of_two(channels), max(1, self.plan.state // tile_n))
        self.launch(
            self.kernels.ssd_step_kernel, (batch * heads, -(-channels // tile_p)),
            proj, a[0], a[1], state, y, H=heads, N=rows // 2, P=channels,
            TILE_N=tile_n, TILE_P=tile_p, num_warps=self.plan.state_warps,
        )  # fmt: skip


def room_for_largest(batch: int, blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For the largest of each block of logits, and where."""
    kinds = torch.float32, torch.int32
    values, places = (torch.empty(batch, blocks, dtype=kind, device=device) for kind in kinds)
    return values, places


def _thin(outputs: int) -> int:
    """Rows of weights; with more of them some multiprocessors would have no program."""
    return power_of_two(max(1, outputs // _MULTIPROCESSORS))


def prefer_shared_memory(kernel: Any, percent: int) -> None:
    """What part of a multiprocessor's cache a compiled kernel asks for as shared memory.

    The driver chooses by what a kernel needs; between two kernels that want different parts a
    multiprocessor has to run empty, so that neither overlaps with the other.

    Args:
        kernel: what Triton's launch returned; None (interpreted) is left alone.
        percent: -1 leaves it to the driver.
    """
    function = getattr(kernel, "function", None)
    if function is not None:
        cuda = ctypes.CDLL("libcuda.so.1")
        cuda.cuFuncSetAttribute(ctypes.c_void_p(function), _SHARED_PERCENT, ctypes.c_int(percent))

"""The operations of one decoding step, each by a kernel or by its plain twin.

``KernelOps(plan)`` and ``PlainOps()`` share one set of methods and write into given buffers, so a
step is written once (``inference/decoder.py``) and each kernel can be held against its twin.

Legend: B batch, K inputs and M outputs of a product, H heads, P channels, N complex state width,
W = H (P + 4 N + 1).
"""

import contextlib
import math
from collections.abc import Iterator

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
_LEAST_SPLIT = 32
_BEST_BLOCK = 2048
_LINE_BYTES = 128
_WARP = 32
# Of what is read later: more would push out of the cache what is read sooner.
_MOST_ASKED = 16 * 2**20


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


class PlainOps:
    """In PyTorch, in the precision of the operands (float64 works)."""

    def embed(self, ids: Tensor, weight: Tensor, x: Tensor) -> None:
        """x (B, K) <- the rows of ``weight`` that ``ids`` (B,) name."""
        x.copy_(weight[ids])

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
        add: bool = False,
        ahead: Tensor | None = None,
    ) -> None:
        """out (B, M) <- weight (M, K) times x (B, K).

        Args:
            norm: scales (K,) of an RMSNorm that x goes through first.
            gated: weight is (2 M, K); out is silu of the first half times the second.
            add: onto what ``out`` holds.
            ahead: what a later operation reads, and may be fetched from memory already.
        """
        if norm is not None:
            x = F.rms_norm(x, x.shape[-1:], norm, eps)
        result = F.linear(x, weight)
        result = plain_swiglu(result) if gated else result
        out.copy_(out + result if add else result)

    def partial_product(self, x: Tensor, weight: Tensor, *, ahead: Tensor | None = None) -> Tensor:
        """Parts (S, B, M), of which the sum is weight (M, K) times x (B, K)."""
        return F.linear(x, weight)[None]

    def add_norm(
        self, x: Tensor, parts: Tensor | None, norm: Tensor, eps: float, out: Tensor
    ) -> None:
        """x (B, K) <- x plus the sum of parts (S, B, K); out (B, K) <- its RMSNorm."""
        if parts is not None:
            x += parts.sum(0).to(x.dtype)
        out.copy_(F.rms_norm(x, x.shape[-1:], norm, eps))

    def best(self, logits: Tensor, ids: Tensor, found: Tensor) -> None:
        """The largest of logits (B, V): ids (B,) <- where; found (B, 2) float64 <- where, value."""
        largest, where = logits.max(-1)
        ids.copy_(where)
        found.copy_(torch.stack([where.double(), largest.double()], -1))

    def ssd_step(
        self, proj: Tensor, a: Tensor, state: Tensor, y: Tensor, *, ahead: Tensor | None = None
    ) -> None:
        """One token: state (B, H, 2 N, P) in place and y (B, H P).

        Args:
            proj: the projection (B, W), or parts of it (S, B, W) to be summed.
            a: decays (2, H), the real parts above the imaginary ones.
        """
        _, heads, rows, channels = state.shape
        proj = proj.sum(0) if proj.dim() == 3 else proj
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
        self._pdl = plan.pdl

    @contextlib.contextmanager
    def where_chains_meet(self) -> Iterator[None]:
        """Where several streams part or meet, a launch waits for the end of all before it."""
        self._pdl = self.plan.pdl and self.plan.chains == 1
        try:
            yield
        finally:
            self._pdl = self.plan.pdl

    def _options(self, stages: int = 1, warps: int = 0) -> dict[str, int]:
        options = {
            "num_warps": warps or self.plan.num_warps, "num_stages": stages, "PDL": self._pdl,
        }  # fmt: skip
        return options | ({"launch_pdl": True} if self._pdl else {})

    def _asked(self, ahead: Tensor | None, programs: int, like: Tensor) -> tuple[Tensor, int, int]:
        """(what is asked for, its bytes, the cache lines a program asks for)."""
        if not self.plan.ahead or ahead is None or ahead.nbytes < _LINE_BYTES:
            return like, 0, 0
        size = min(ahead.nbytes, _MOST_ASKED)
        threads = _WARP * self.plan.num_warps
        return ahead, size, max(threads, _power_of_two(-(-size // (_LINE_BYTES * programs))))

    def _split(self, inputs: int, outputs: int) -> int:
        """How many inputs a program takes: fewer where a product has too few programs."""
        blocks, split = -(-outputs // self.plan.rows), self.plan.split
        while blocks * -(-inputs // split) < _MULTIPROCESSORS and split > _LEAST_SPLIT:
            split //= 2
        return split

    def embed(self, ids: Tensor, weight: Tensor, x: Tensor) -> None:
        """See :meth:`PlainOps.embed`. It starts a step, so it overlaps with nothing before it."""
        batch, width = x.shape
        block = min(1024, _power_of_two(width))
        self.kernels.embed_kernel[(batch, -(-width // block))](
            ids, weight, x, K=width, BLOCK=block, PDL=self.plan.pdl, num_warps=4
        )

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
        add: bool = False,
        ahead: Tensor | None = None,
    ) -> None:
        """See :meth:`PlainOps.product`."""
        (batch, inputs), outputs = x.shape, out.shape[1]
        kind = {"K": inputs, "M": outputs, "NORM": norm is not None, "GATED": gated, "ADD": add}
        if batch == 1:
            width = _power_of_two(inputs)
            rows = max(1, self.plan.weights // width // (2 if gated else 1))
            programs = -(-outputs // rows)
            *asked, lines = self._asked(ahead, programs, weight)
            self.kernels.vector_kernel[(programs,)](
                x, norm, weight, out, eps, *asked, ROWS=rows, BLOCK_K=width, ASKED=lines,
                **kind, **self._options(),
            )  # fmt: skip
            return
        tile = min(self.plan.batch, max(16, _power_of_two(batch)))
        # Narrow outputs in thin slices: a program a multiprocessor reads more at a time. A gated
        # product holds two slices.
        most = max(16, self.plan.rows // (2 if gated else 1))
        rows = min(most, max(16, _power_of_two(outputs // _MULTIPROCESSORS)))
        lines = -(-rows * inputs * weight.element_size() // _LINE_BYTES)
        grid = -(-outputs // rows), -(-batch // tile)
        *asked, asked_lines = self._asked(ahead, math.prod(grid), weight)
        self.kernels.batch_kernel[grid](
            x, norm, weight, out, eps, batch, *asked,
            BLOCK_B=tile, BLOCK_M=rows, BLOCK_K=self.plan.depth, LINES=_power_of_two(lines),
            ASKED=asked_lines, **kind, **self._options(self.plan.stages),
        )  # fmt: skip

    def partial_product(self, x: Tensor, weight: Tensor, *, ahead: Tensor | None = None) -> Tensor:
        """See :meth:`PlainOps.partial_product`; float32, in a buffer of its own."""
        (batch, inputs), outputs = x.shape, len(weight)
        tile = min(self.plan.batch, max(16, _power_of_two(batch)))
        split = self._split(inputs, outputs)
        blocks, splits = -(-outputs // self.plan.rows), -(-inputs // split)
        out = torch.empty(splits, batch, outputs, dtype=torch.float32, device=x.device)
        grid = blocks, splits, -(-batch // tile)
        *asked, lines = self._asked(ahead, math.prod(grid), weight)
        self.kernels.split_kernel[grid](
            x, weight, out, batch, *asked, K=inputs, M=outputs, BLOCK_B=tile,
            BLOCK_M=self.plan.rows, BLOCK_K=split, ASKED=lines, **self._options(),
        )  # fmt: skip
        return out

    def add_norm(
        self, x: Tensor, parts: Tensor | None, norm: Tensor, eps: float, out: Tensor
    ) -> None:
        """See :meth:`PlainOps.add_norm`."""
        batch, width = x.shape
        self.kernels.add_norm_kernel[(batch,)](
            x, parts, norm, out, eps, K=width, S=0 if parts is None else len(parts),
            BLOCK=_power_of_two(width), **self._options(),
        )  # fmt: skip

    def best(self, logits: Tensor, ids: Tensor, found: Tensor) -> None:
        """See :meth:`PlainOps.best`."""
        (batch, width), options = logits.shape, self._options(warps=4)
        blocks = -(-width // _BEST_BLOCK)
        values = torch.empty(batch, blocks, dtype=torch.float32, device=logits.device)
        places = torch.empty(batch, blocks, dtype=torch.int32, device=logits.device)
        self.kernels.largest_kernel[(batch, blocks)](
            logits, values, places, M=width, BLOCK=_BEST_BLOCK, **options
        )
        self.kernels.best_kernel[(batch,)](
            values, places, ids, found, S=blocks, BLOCK=_power_of_two(blocks), **options
        )

    def ssd_step(
        self, proj: Tensor, a: Tensor, state: Tensor, y: Tensor, *, ahead: Tensor | None = None
    ) -> None:
        """See :meth:`PlainOps.ssd_step`; computed in float32."""
        batch, heads, rows, channels = state.shape
        tile_n = _power_of_two(rows // 2)
        tile_p = min(_power_of_two(channels), max(1, self.plan.state // tile_n))
        grid = batch * heads, -(-channels // tile_p)
        *asked, lines = self._asked(ahead, math.prod(grid), state)
        self.kernels.ssd_step_kernel[grid](
            proj, a[0], a[1], state, y, *asked, H=heads, N=rows // 2, P=channels,
            S=len(proj) if proj.dim() == 3 else 1, TILE_N=tile_n, TILE_P=tile_p, ASKED=lines,
            **self._options(warps=self.plan.state_warps),
        )  # fmt: skip

"""The operations of a decoding step by the kernels of ``kernels/decode_staged.py``.

What these kernels cannot take goes to the others, operation by operation.
"""

from typing import Any, NamedTuple

from torch import Tensor

from mamba3_lite.inference.decode_ops import KernelOps, Norm, power_of_two, room_for_largest
from mamba3_lite.inference.decode_plans import Plan
from mamba3_lite.models.transformer import ModelConfig

# Of an H200. With more programs than this some multiprocessors would run two in a row.
_MULTIPROCESSORS = 132
# Of a program, less than the 227 KiB there are, so that others find room beside it.
_SHARED_BYTES = 200 * 2**10
_BATCH_TILE = 64
_WARPS = 4
# Beyond this x does not fit the registers of a warp at batch 1.
_LARGEST_VECTOR = 4096
# Also the rows of a state that a program of the SSD step works on at a time.
_SMALLEST_STATE = 16
_MANY_OUTPUTS = 2**14
# The head: outputs and inputs of a block, and the shared memory of a program, which has no other
# beside it.
_HEAD_ROWS, _HEAD_CHUNK, _HEAD_BYTES = 32, 256, 224 * 2**10
# Clocks between two pieces of weights; of the products of a batch only the gated one gains.
_GATED_REST = 500


class Slices(NamedTuple):
    """A product at batch 1: outputs and warps of a program, inputs of a piece, clocks of a rest."""

    outputs: int
    warps: int
    inputs: int
    rest: int


def slices(inputs: int, outputs: int, gated: bool, add: bool) -> Slices:
    """Found by timing whole steps of the production model."""
    if add:
        return Slices(8, 8, inputs // 2, 1600) if inputs > 1024 else Slices(4, 4, 256, 800)
    if outputs > _MANY_OUTPUTS:
        # So many programs that they do not start together anyway.
        return Slices(8, 4, inputs, 0)
    # At least some 128 programs, of at most 64 KiB.
    thin = power_of_two(outputs // 128 + 1) // 2
    rows = max(4, min(16, thin, 2**15 // inputs // (2 if gated else 1)))
    if gated and rows >= 8:
        return Slices(rows, 8, inputs, 800)
    return Slices(rows, 4, max(256, inputs // 2), 600)


class Tiles(NamedTuple):
    """A product of a batch: outputs of a program, inputs of a round, and rounds of x held."""

    outputs: int
    inputs: int
    ring: int


def tiles(inputs: int, outputs: int, gated: bool) -> Tiles | None:
    """None: the kernel cannot take this product.

    Thin slices read the weights on as many multiprocessors as can be; each program reads all of x.
    """
    rows = max(16, power_of_two(-(-outputs // _MULTIPROCESSORS)))
    # Beside thick ones there is little room for x, so that is in more and smaller pieces.
    depth = max(64, min(128 if rows > 32 else 256, power_of_two(inputs)))
    rounds = -(-inputs // depth)
    weights = rounds * depth * rows * (2 if gated else 1) * 2
    ring = min(rounds, (_SHARED_BYTES - weights) // (_BATCH_TILE * depth * 2))
    # Rows of a matrix that TMA reads start at multiples of 16 bytes.
    if rows > 64 or ring < min(2, rounds) or inputs % 8:
        return None
    return Tiles(rows, depth, ring)


def fits(cfg: ModelConfig, batch: int) -> bool:
    """Whether all that a layer adds to the residual stream can be left for its norms."""
    widths = cfg.n_heads * cfg.head_dim, cfg.ffn_dim
    return batch == 1 or None not in (tiles(width, cfg.d_model, False) for width in widths)


class StagedOps(KernelOps):
    """See :class:`KernelOps`. In a batch a norm reads what was left for it, see :class:`Norm`."""

    def __init__(self, plan: Plan):
        from mamba3_lite.kernels import decode_staged

        super().__init__(plan)
        self.staged = decode_staged

    def embed(
        self, ids: Tensor, weight: Tensor, x: Tensor, *, following: Norm | None = None
    ) -> None:
        """See :meth:`PlainOps.embed`."""
        self._embed(ids, weight, x, following if len(x) > 1 else None)

    def _vector_product(
        self, x: Tensor, weight: Tensor, out: Tensor, norm: Norm | None, gated: bool, add: bool
    ) -> None:
        inputs, outputs = x.shape[1], out.shape[1]
        if inputs != power_of_two(inputs) or not 256 <= inputs <= _LARGEST_VECTOR:
            super()._vector_product(x, weight, out, norm, gated, add)
            return
        cut = slices(inputs, outputs, gated, add)
        scale, eps = (norm.scale, norm.eps) if norm else (None, 0.0)
        self.launch(
            self.staged.staged_vector_kernel, (-(-outputs // cut.outputs),), x, scale, weight, out,
            eps, K=inputs, M=outputs, ROWS=cut.outputs, WARPS=cut.warps, COLUMNS=cut.inputs,
            REST=cut.rest, NORM=norm is not None, GATED=gated, ADD=add, num_warps=cut.warps,
        )  # fmt: skip

    def _batch_product(
        self, x: Tensor, weight: Tensor, out: Tensor, norm: Norm | None, gated: bool, add: bool,
        following: Norm | None,
    ) -> None:  # fmt: skip
        (batch, inputs), outputs = x.shape, out.shape[1]
        cut = tiles(inputs, outputs, gated)
        if cut is None or out.dtype != x.dtype:
            super()._batch_product(x, weight, out, norm, gated, add, following)
            return
        source, squares, eps = (norm.scaled, norm.squares, norm.eps) if norm else (x, None, 0.0)
        left = (following.scale, following.scaled, following.squares) if following else [None] * 3
        given = norm or following
        self.launch(
            self.staged.staged_batch_kernel,
            (-(-outputs // cut.outputs), -(-batch // _BATCH_TILE)),
            _blocks(source, _BATCH_TILE, cut.inputs), _blocks(weight, cut.outputs, cut.inputs),
            out, batch, squares, eps, *left, K=inputs, M=outputs, BLOCK_B=_BATCH_TILE,
            BLOCK_M=cut.outputs, CHUNK=cut.inputs, RING=cut.ring,
            PARTS=given.squares.shape[1] if given else 1, REST=_GATED_REST if gated else 0,
            GATED=gated, ADD=add, num_warps=_WARPS,
        )  # fmt: skip

    def _batch_head(
        self, x: Tensor, weight: Tensor, logits: Tensor, norm: Norm, keep: bool
    ) -> tuple[Tensor, Tensor]:
        (batch, inputs), width = x.shape, logits.shape[1]
        rounds = -(-inputs // _HEAD_CHUNK)
        stages = (_HEAD_BYTES // 2 // _HEAD_CHUNK - rounds * _BATCH_TILE) // _HEAD_ROWS
        if stages < 2 or inputs % 8:
            return super()._batch_head(x, weight, logits, norm, keep)
        blocks = -(-width // _HEAD_ROWS)
        span = -(-blocks // _MULTIPROCESSORS)
        largest = room_for_largest(batch, -(-blocks // span), logits.device)
        self.launch(
            self.staged.staged_head_kernel,
            (-(-blocks // span), -(-batch // _BATCH_TILE)),
            _blocks(norm.scaled, _BATCH_TILE, _HEAD_CHUNK),
            _blocks(weight, _HEAD_ROWS, _HEAD_CHUNK), logits, batch, norm.squares, norm.eps,
            *largest, K=inputs, M=width, BLOCK_B=_BATCH_TILE, BLOCK_M=_HEAD_ROWS,
            CHUNK=_HEAD_CHUNK, RING=min(stages, span * rounds), TILES=span,
            PARTS=norm.squares.shape[1], KEEP=keep, num_warps=_WARPS,
        )  # fmt: skip
        return largest

    def ssd_step(self, proj: Tensor, a: Tensor, state: Tensor, y: Tensor) -> None:
        """See :meth:`PlainOps.ssd_step`; computed in float32."""
        batch, heads, rows, channels = state.shape
        width = rows // 2
        powers = width == power_of_two(width) and channels == power_of_two(channels)
        if not powers or min(width, channels) < _SMALLEST_STATE:
            super().ssd_step(proj, a, state, y)
            return
        tile = min(channels, max(_SMALLEST_STATE, self.plan.state // width), 128)
        warps = self.plan.state_warps
        self.launch(
            self.staged.staged_ssd_step_kernel, (batch * heads, channels // tile),
            proj, a[0], a[1], state, y, H=heads, N=width, P=channels, TILE_P=tile,
            SLICE=_SMALLEST_STATE, WARPS=warps, num_warps=warps,
        )  # fmt: skip


def _blocks(matrix: Tensor, rows: int, columns: int) -> Any:
    """A TMA descriptor of a matrix in blocks that lie in shared memory as ``wgmma`` reads."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


def ops_for(plan: Plan) -> KernelOps:
    """The operations as a plan wants them."""
    return StagedOps(plan) if plan.staged else KernelOps(plan)

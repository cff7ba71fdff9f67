"""The "fused" backend: the whole SSD, forward and backward, in Triton, on the projection in place.

Legend: B batch, T time, H heads, P channels of a head, N complex state width, W = H (P + 4 N + 1)
columns of the projection, C tokens of a kernel's chunk (its own; ``model.chunk_size`` is for the
plain paths), nc chunks.
"""

import contextlib
import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

from mamba3_lite import env
from mamba3_lite.errors import UserError
from mamba3_lite.models.ssd_complex import Pair

HAS_TRITON = importlib.util.find_spec("triton") is not None

LARGEST_DIM = 256
# Below this many programs in flight a GPU is not filled, and a long sequence is cut into splits.
_ENOUGH_PROGRAMS = 128
_FEWEST_CHUNKS_PER_SPLIT = 8


class Launch(NamedTuple):
    """Warps and software-pipelining stages of one kernel."""

    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """Everything that may be chosen without changing the result: chunk, tiles, launches."""

    chunk: int
    tile: int  # largest tile of state rows and of channels
    carry: Launch
    output: Launch
    gradient: Launch


def _plan_for(dtype: torch.dtype) -> Plan:
    if dtype == torch.float32:
        return Plan(32, 64, Launch(4, 2), Launch(4, 1), Launch(4, 1))
    return Plan(64, 64, Launch(4, 3), Launch(4, 1), Launch(4, 1))


_forced: Plan | None = None


def _tile(dim: int, largest: int) -> int:
    """The tile of a dimension: a power of two of at least 16, which tensor cores need."""
    return min(largest, max(16, 1 << (dim - 1).bit_length()))


class Layout(NamedTuple):
    """The sizes of one call."""

    batch: int
    length: int
    heads: int
    state_dim: int
    head_dim: int
    chunk: int

    @property
    def chunks(self) -> int:
        return -(-self.length // self.chunk)

    @property
    def constants(self) -> dict[str, int]:
        """The compile-time sizes of every kernel."""
        return {"H": self.heads, "N": self.state_dim, "P": self.head_dim, "C": self.chunk}


def _on(t: Tensor):
    return torch.cuda.device(t.device) if t.is_cuda else contextlib.nullcontext()


def _tiling(plan: Plan, layout: Layout, segments: Tensor | None) -> dict[str, int | bool]:
    return {
        **layout.constants,
        "TILE_N": _tile(layout.state_dim, plan.tile),
        "TILE_P": _tile(layout.head_dim, plan.tile),
        "ALL_ROWS": layout.length % layout.chunk == 0,
        "HAS_SEGMENTS": segments is not None,
    }


def _tiles(tiling: dict[str, int | bool]) -> int:
    return -(-tiling["N"] // tiling["TILE_N"]) * -(-tiling["P"] // tiling["TILE_P"])


def _carry(
    plan: Plan, layout: Layout, proj: Tensor, values: Tensor, phase: tuple[Tensor, ...],
    segments: Tensor | None, initial: Tensor | None, *, backward: bool, want_last: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """States at the chunks' edges (B, H, nc, 2, N, P), and the last one (B, H, 2, N, P) float32."""
    from mamba3_lite.kernels.fused import carry_kernel

    shape = (2, layout.state_dim, layout.head_dim)
    streams = layout.batch * layout.heads
    tiling = _tiling(plan, layout, segments)
    programs = streams * _tiles(tiling)
    splits = max(1, min(_ENOUGH_PROGRAMS * 2 // programs, layout.chunks // _FEWEST_CHUNKS_PER_SPLIT))
    per_split = -(-layout.chunks // splits)
    splits = -(-layout.chunks // per_split)
    slots = layout.chunks + 1 if backward else layout.chunks
    states = values.new_empty(layout.batch, layout.heads, slots, *shape, dtype=proj.dtype)

    def launch(start: Tensor | None, store_states: bool, store_last: bool) -> tuple[Tensor | None, Tensor | None]:
        last = kept = None
        if store_last:
            last = states.new_empty(layout.batch, layout.heads, splits, *shape, dtype=torch.float32)
            kept = last.new_empty(layout.batch, layout.heads, splits)
        carry_kernel[(streams, _tiles(tiling), splits)](
            proj, values, *phase, segments, start, states, last, kept,
            layout.length, layout.chunks, per_split,
            BACKWARD=backward, HAS_INITIAL=start is not None,
            STORE_STATES=store_states, STORE_LAST=store_last,
            num_warps=plan.carry.num_warps, num_stages=plan.carry.num_stages, **tiling,
        )  # fmt: skip
        return last, kept

    start = None if initial is None else initial.reshape(layout.batch, layout.heads, 1, *shape)
    if splits > 1:
        # Where every split starts: their ends from zero, then one after the other.
        ends, kept = launch(None, False, True)
        assert ends is not None and kept is not None
        h = ends.new_zeros(ends[:, :, 0].shape) if start is None else start[:, :, 0]
        starts = []
        for end, factor in zip(ends.unbind(2), kept[..., None, None, None].unbind(2), strict=True):
            starts.append(h)
            h = torch.addcmul(end, factor, h)
        start = torch.stack(starts, 2)
    last, _ = launch(start, True, want_last)
    return states, None if last is None else last[:, :, -1]


def _turn_state(state: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(real + i imaginary)(cos + i sin) of a state (B, H, 2, N, P); cos, sin (B, H)."""
    re, im = state.unbind(2)
    cos, sin = cos[..., None, None], sin[..., None, None]
    return torch.stack([re * cos - im * sin, re * sin + im * cos], 2)


@torch.library.custom_op("mamba3_lite::fused_ssd", mutates_args=())
def fused_ssd(
    proj: Tensor,
    a_re: Tensor,
    a_im: Tensor,
    state: Tensor | None,
    segment_ids: Tensor | None,
    heads: int,
    state_dim: int,
    head_dim: int,
    return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y (B, T, H, P), the final state, and what the backward pass needs."""
    from mamba3_lite.kernels.fused import output_kernel, phase_kernel

    plan = _forced or _plan_for(proj.dtype)
    layout = Layout(*proj.shape[:2], heads, state_dim, head_dim, plan.chunk)
    proj, a_re, a_im = proj.contiguous(), a_re.contiguous(), a_im.contiguous()
    segments = None if segment_ids is None else segment_ids.contiguous()
    streams, padded = layout.batch * heads, layout.chunks * plan.chunk
    phase = tuple(
        proj.new_empty(layout.batch, heads, padded, dtype=torch.float32) for _ in range(3)
    )
    y = proj.new_empty(layout.batch, layout.length, heads, head_dim)
    tiling = _tiling(plan, layout, segments)
    with _on(proj):
        phase_kernel[(streams,)](
            proj, a_re, a_im, *phase, layout.length, padded,
            **layout.constants, BLOCK=_phase_block(layout), num_warps=4,
        )  # fmt: skip
        initial = None if state is None else state.float().contiguous()
        states, last = _carry(
            plan, layout, proj, proj, phase, segments, initial,
            backward=False, want_last=return_state,
        )  # fmt: skip
        output_kernel[(streams * layout.chunks, -(-head_dim // tiling["TILE_P"]))](
            proj, *phase, segments, states, y, layout.length, layout.chunks, **tiling,
            num_warps=plan.output.num_warps, num_stages=plan.output.num_stages,
        )  # fmt: skip
    if last is None:
        final = proj.new_empty(0, dtype=torch.float32)
    else:
        final = _turn_state(last, phase[1][..., -1], phase[2][..., -1]).flatten(2, 3)
    return y, final, states, *phase


def _phase_block(layout: Layout) -> int:
    return min(max(1024, layout.chunk), layout.chunk * (1 << (layout.chunks - 1).bit_length()))


@fused_ssd.register_fake
def _(proj, a_re, a_im, state, segment_ids, heads, state_dim, head_dim, return_state):
    batch, length = proj.shape[:2]
    plan = _plan_for(proj.dtype)
    chunks = -(-length // plan.chunk)
    phase = [proj.new_empty(batch, heads, chunks * plan.chunk, dtype=torch.float32) for _ in range(3)]
    final = proj.new_empty(
        (batch, heads, 2 * state_dim, head_dim) if return_state else 0, dtype=torch.float32
    )
    return (
        proj.new_empty(batch, length, heads, head_dim), final,
        proj.new_empty(batch, heads, chunks, 2, state_dim, head_dim), *phase,
    )  # fmt: skip


@torch.library.custom_op("mamba3_lite::fused_ssd_backward", mutates_args=())
def fused_ssd_backward(
    proj: Tensor,
    a_re: Tensor,
    a_im: Tensor,
    segment_ids: Tensor | None,
    states: Tensor,
    log_decay: Tensor,
    cos: Tensor,
    sin: Tensor,
    dy: Tensor,
    d_final: Tensor | None,
    want_d_state: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the projection (its layout), of A (H, 2) and of the initial state."""
    from mamba3_lite.kernels.fused import gradient_kernel

    plan = _forced or _plan_for(proj.dtype)
    batch, heads, _, _, state_dim, head_dim = states.shape
    layout = Layout(batch, proj.shape[1], heads, state_dim, head_dim, plan.chunk)
    proj, dy = proj.contiguous(), dy.to(proj.dtype).contiguous()
    a_re, a_im = a_re.contiguous(), a_im.contiguous()
    segments = None if segment_ids is None else segment_ids.contiguous()
    phase = (log_decay, cos, sin)
    d_last = None
    if d_final is not None:
        d_final = d_final.float().unflatten(2, (2, state_dim))
        d_last = _turn_state(d_final, cos[..., -1], -sin[..., -1]).contiguous()
    d_proj = torch.empty_like(proj)
    d_a = proj.new_empty(batch, layout.chunks, heads, 2, dtype=torch.float32)
    with _on(proj):
        d_states, d_first = _carry(
            plan, layout, proj, dy, phase, segments, d_last,
            backward=True, want_last=want_d_state,
        )  # fmt: skip
        gradient_kernel[(batch * heads * layout.chunks,)](
            proj, a_re, a_im, *phase, segments, states, d_states, dy, d_proj, d_a,
            layout.length, layout.chunks, **_tiling(plan, layout, segments),
            num_warps=plan.gradient.num_warps, num_stages=plan.gradient.num_stages,
        )  # fmt: skip
    d_state = proj.new_empty(0, dtype=torch.float32) if d_first is None else d_first.flatten(2, 3)
    return d_proj, d_a.sum((0, 1)), d_state


@fused_ssd_backward.register_fake
def _(
    proj, a_re, a_im, segment_ids, states, log_decay, cos, sin, dy, d_final, want_d_state
):  # fmt: skip
    batch, heads, _, _, state_dim, head_dim = states.shape
    d_state = (batch, heads, 2 * state_dim, head_dim) if want_d_state else 0
    return (
        torch.empty_like(proj), a_re.new_empty(heads, 2), a_re.new_empty(d_state),
    )  # fmt: skip


def _setup_context(ctx, inputs, output):
    proj, a_re, a_im, state, segment_ids, *_ = inputs
    _, _, states, *phase = output
    ctx.save_for_backward(proj, a_re, a_im, segment_ids, states, *phase)
    ctx.return_state = inputs[-1]
    ctx.has_state = state is not None
    ctx.mark_non_differentiable(states, *phase)
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, d_final, *unused):
    proj, a_re, a_im, segment_ids, states, *phase = ctx.saved_tensors
    if dy is None:
        dy = proj.new_zeros(*proj.shape[:2], states.shape[1], states.shape[-1])
    d_proj, d_a, d_state = torch.ops.mamba3_lite.fused_ssd_backward(
        proj, a_re, a_im, segment_ids, states, *phase, dy,
        d_final if ctx.return_state else None, ctx.has_state,
    )  # fmt: skip
    return (
        d_proj, d_a[:, 0], d_a[:, 1], d_state if ctx.has_state else None,
        None, None, None, None, None,
    )  # fmt: skip


torch.library.register_autograd(
    "mamba3_lite::fused_ssd", _backward, setup_context=_setup_context
)


def run_projected(
    proj: Tensor, a: Pair, *, heads: int, state_dim: int, head_dim: int,
    state: Tensor | None = None, return_state: bool = False, segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    y, final, *_ = torch.ops.mamba3_lite.fused_ssd(
        proj, *a, state, segment_ids, heads, state_dim, head_dim, return_state
    )
    return y, final if return_state else None


def run(
    x: Tensor, b: Pair, c: Pair, dt: Tensor, a: Pair, *, chunk_size: int,
    state: Tensor | None = None, return_state: bool = False, segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Whole-sequence seam of ``ssd_backends`` for tensors that are no projection: packs them first."""
    heads, head_dim = x.shape[2:]
    proj = torch.cat([*(t.flatten(2) for t in (x, *b, *c)), dt], -1)
    return run_projected(
        proj, a, heads=heads, state_dim=b[0].shape[-1], head_dim=head_dim,
        state=state, return_state=return_state, segment_ids=segment_ids,
    )  # fmt: skip

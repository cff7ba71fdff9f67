"""The "fused" backend: the whole SSD, forward and backward, in Triton, on the projection in place.

Legend: B batch, T time, H heads, P channels of a head, N complex state width, W = H (P + 4 N + 1)
columns of the projection, C tokens of a kernel's chunk (its own; ``model.chunk_size`` is for the
plain paths), nc chunks.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from mamba3_lite import env
from mamba3_lite.errors import UserError
from mamba3_lite.models import ssd_plans
from mamba3_lite.models.ssd_complex import Pair
from mamba3_lite.models.ssd_plans import CANDIDATES, MEASURED, Plan
from mamba3_lite.models.ssd_self_test import self_test_case

HAS_TRITON = importlib.util.find_spec("triton") is not None

LARGEST_DIM = 256
# Below this many programs in flight a GPU is not filled, and a long sequence is cut into splits.
_ENOUGH_PROGRAMS = 128
_FEWEST_CHUNKS_PER_SPLIT = 8
# Of the phase, which costs little to cut: each span adds up what the spans before it have turned.
_MAX_SPANS = 64


_forced: list[Plan] = []


@contextlib.contextmanager
def forced(plan: Plan) -> Iterator[None]:
    """Runs everything inside under one plan, whatever has been chosen."""
    _forced.append(plan)
    try:
        yield
    finally:
        _forced.pop()


def _tile(dim: int) -> int:
    """A tile that holds a whole dimension: a power of two of at least 16, as tensor cores need."""
    return max(16, 1 << (dim - 1).bit_length())


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


def _layout(proj: Tensor, heads: int, state_dim: int, head_dim: int) -> Layout:
    batch, length, _ = proj.shape
    return Layout(batch, length, heads, state_dim, head_dim, ssd_plans.chunk_size(proj.dtype))


def _on(t: Tensor):
    return torch.cuda.device(t.device) if t.is_cuda else contextlib.nullcontext()


def _tiling(plan: Plan, layout: Layout, segments: Tensor | None) -> dict[str, int | bool]:
    tile_n, tile_p = _tile(layout.state_dim), _tile(layout.head_dim)
    if max(tile_n, tile_p) > plan.tile:
        # Several tiles of 32 channels come out wrong on Hopper (Triton 3.6, docs/LOG.md).
        tile_n = tile_p = plan.tile
    return {
        **layout.constants,
        "TILE_N": tile_n,
        "TILE_P": tile_p,
        "ALL_ROWS": layout.length % layout.chunk == 0,
        "HAS_SEGMENTS": segments is not None,
    }


def _tiles(tiling: dict[str, int | bool]) -> int:
    return -(-tiling["N"] // tiling["TILE_N"]) * -(-tiling["P"] // tiling["TILE_P"])


def _write_phase(
    layout: Layout, proj: Tensor, a_re: Tensor, a_im: Tensor, phase: Sequence[Tensor]
) -> None:
    """Fills log_decay, cos and sin, (B, H, nc C) float32 each."""
    from mamba3_lite.kernels.fused import phase_kernel

    streams, padded = layout.batch * layout.heads, layout.chunks * layout.chunk
    few = streams < _ENOUGH_PROGRAMS
    whole = layout.chunk * (1 << (layout.chunks - 1).bit_length())
    block = min(256 if few else 1024, whole)
    blocks = -(-padded // block)
    per_span = block * (-(-blocks // _MAX_SPANS) if few else blocks)
    spans = -(-padded // per_span)
    turns = None
    if spans > 1:
        turns = proj.new_empty(streams, _MAX_SPANS, dtype=torch.float64)

    def launch(*, sum_only: bool) -> None:
        phase_kernel[(streams, spans)](
            proj, a_re, a_im, turns, *phase, layout.length, padded, per_span,
            **layout.constants, BLOCK=block, MAX_SPANS=_MAX_SPANS,
            HAS_SPANS=spans > 1 and not sum_only, SUM_ONLY=sum_only, num_warps=4,
        )  # fmt: skip

    if spans > 1:
        launch(sum_only=True)
    launch(sum_only=False)


def _carry(
    plan: Plan, layout: Layout, proj: Tensor, values: Tensor, phase: Sequence[Tensor],
    segments: Tensor | None, initial: Tensor | None, *, backward: bool, want_last: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """States at the chunks' edges (B, H, nc, 2, N, P), and the last one (B, H, 2, N, P) float32."""
    from mamba3_lite.kernels.fused import carry_kernel

    shape = (2, layout.state_dim, layout.head_dim)
    streams = layout.batch * layout.heads
    tiling = _tiling(plan, layout, segments)
    programs = streams * _tiles(tiling)
    splits = min(2 * _ENOUGH_PROGRAMS // programs, layout.chunks // _FEWEST_CHUNKS_PER_SPLIT)
    per_split = -(-layout.chunks // max(1, splits))
    splits = -(-layout.chunks // per_split)
    slots = layout.chunks + 1 if backward else layout.chunks
    states = values.new_empty(layout.batch, layout.heads, slots, *shape, dtype=proj.dtype)

    def launch(
        start: Tensor | None, *, store_states: bool, store_last: bool
    ) -> tuple[Tensor | None, Tensor | None]:
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
        ends, kept = launch(None, store_states=False, store_last=True)
        assert ends is not None and kept is not None
        h = ends.new_zeros(ends[:, :, 0].shape) if start is None else start[:, :, 0]
        starts = []
        for end, factor in zip(ends.unbind(2), kept[..., None, None, None].unbind(2), strict=True):
            starts.append(h)
            h = torch.addcmul(end, factor, h)
        start = torch.stack(starts, 2)
    last, _ = launch(start, store_states=True, store_last=want_last)
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
    from mamba3_lite.kernels.fused import output_kernel

    plan = _plan(proj, heads, state_dim, head_dim)
    layout = _layout(proj, heads, state_dim, head_dim)
    proj, a_re, a_im = proj.contiguous(), a_re.contiguous(), a_im.contiguous()
    segments = None if segment_ids is None else segment_ids.contiguous()
    streams, padded = layout.batch * heads, layout.chunks * layout.chunk
    phase = [proj.new_empty(layout.batch, heads, padded, dtype=torch.float32) for _ in range(3)]
    y = proj.new_empty(layout.batch, layout.length, heads, head_dim)
    tiling = _tiling(plan, layout, segments)
    with _on(proj):
        _write_phase(layout, proj, a_re, a_im, phase)
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
    return y, final, states, phase[0], phase[1], phase[2]


@fused_ssd.register_fake
def _(proj, a_re, a_im, state, segment_ids, heads, state_dim, head_dim, return_state):
    batch, length = proj.shape[:2]
    chunk = ssd_plans.chunk_size(proj.dtype)
    chunks = -(-length // chunk)
    phase = [proj.new_empty(batch, heads, chunks * chunk, dtype=torch.float32) for _ in range(3)]
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
    from mamba3_lite.kernels.fused import decay_gradient_kernel, gradient_kernel

    batch, heads, _, _, state_dim, head_dim = states.shape
    plan = _plan(proj, heads, state_dim, head_dim)
    layout = _layout(proj, heads, state_dim, head_dim)
    proj, dy = proj.contiguous(), dy.to(proj.dtype).contiguous()
    a_re, a_im = a_re.contiguous(), a_im.contiguous()
    segments = None if segment_ids is None else segment_ids.contiguous()
    phase = (log_decay, cos, sin)
    d_last = None
    if d_final is not None:
        d_final = d_final.float().unflatten(2, (2, state_dim))
        d_last = _turn_state(d_final, cos[..., -1], -sin[..., -1]).contiguous()
    d_proj = torch.empty_like(proj)
    growth, turn = torch.empty_like(cos), torch.empty_like(cos)
    edges = cos.new_empty(batch, heads, layout.chunks, 2)
    d_a = cos.new_empty(heads, 2, batch * layout.chunks)
    with _on(proj):
        d_states, d_first = _carry(
            plan, layout, proj, dy, phase, segments, d_last,
            backward=True, want_last=want_d_state,
        )  # fmt: skip
        gradient_kernel[(batch * heads * layout.chunks,)](
            proj, *phase, segments, states, d_states, dy, d_proj, growth, turn, edges,
            layout.length, layout.chunks, **_tiling(plan, layout, segments),
            KEEP=plan.keep and proj.dtype != torch.float32,
            num_warps=plan.gradient.num_warps, num_stages=plan.gradient.num_stages,
        )  # fmt: skip
        decay_gradient_kernel[(batch * heads * layout.chunks,)](
            proj, a_re, a_im, growth, turn, edges, d_proj, d_a, layout.length, layout.chunks,
            **layout.constants, num_warps=1,
        )  # fmt: skip
    d_state = proj.new_empty(0, dtype=torch.float32) if d_first is None else d_first.flatten(2, 3)
    return d_proj, d_a.sum(-1), d_state


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


torch.library.register_autograd("mamba3_lite::fused_ssd", _backward, setup_context=_setup_context)


def run_projected(
    proj: Tensor,
    a: Pair,
    *,
    heads: int,
    state_dim: int,
    head_dim: int,
    state: Tensor | None = None,
    return_state: bool = False,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The SSD of a projection (B, T, W) in bfloat16, float16 or float32, read in place.

    Args:
        a: real and imaginary part of A, (H,) float32 each.
        state: (B, H, 2 N, P), zero when absent.
        segment_ids: (B, T) integers; the state is reset where they change.

    Returns:
        y (B, T, H, P) in the dtype of ``proj``, and the final state (B, H, 2 N, P) float32.

    Raises:
        UserError: float64, or no launch plan passes the parity test on this device.
    """
    if proj.dtype == torch.float64:
        raise UserError(
            "ssd_dispatch='fused' computes in bfloat16, float16 or float32; "
            "use ssd_dispatch='rotated' for float64."
        )
    y, final, *_ = torch.ops.mamba3_lite.fused_ssd(
        proj, *a, state, segment_ids, heads, state_dim, head_dim, return_state
    )
    return y, final if return_state else None


def run(
    x: Tensor,
    b: Pair,
    c: Pair,
    dt: Tensor,
    a: Pair,
    *,
    chunk_size: int,
    state: Tensor | None = None,
    return_state: bool = False,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Whole-sequence seam of ``ssd_backends``, for tensors that are no projection: packs them.

    The kernels cut chunks of their own, so ``chunk_size`` changes nothing.
    """
    return run_projected(
        pack(x, b, c, dt), a, heads=x.shape[2], state_dim=b[0].shape[-1], head_dim=x.shape[3],
        state=state, return_state=return_state, segment_ids=segment_ids,
    )  # fmt: skip


def pack(x: Tensor, b: Pair, c: Pair, dt: Tensor) -> Tensor:
    """x (B, T, H, P), pairs of (B, T, H, N) and dt (B, T, H) as one projection (B, T, W)."""
    return torch.cat([*(t.flatten(2) for t in (x, *b, *c)), dt], -1)


# Relative L2 limits of the self-test. 16-bit operands alone cost 3e-3; a wrong kernel is off by far
# more.
_LIMITS = {
    False: {"y": 1e-2, "d_proj": 1e-2, "d_dt": 3e-2, "dA": 1e-1, "d_state": 1e-2, "final": 1e-2},
    True: {"y": 1e-4, "d_proj": 1e-4, "d_dt": 1e-3, "dA": 1e-2, "d_state": 1e-4, "final": 1e-4},
}


def _problem(
    plan: Plan, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> str | None:
    """What is wrong with a plan here, in a few words: results, all gradients, both row cases."""
    from triton.runtime.errors import OutOfResources

    # Long enough for the carry to be split, and short with a ragged end.
    for length in (16 * ssd_plans.chunk_size(dtype), 3 * ssd_plans.chunk_size(dtype) + 5):
        truth, ask = self_test_case(device, dtype, shape, length)
        try:
            with forced(plan):
                got = ask(run_projected)
        except OutOfResources as problem:
            return str(problem)
        for name, limit in _LIMITS[dtype == torch.float32].items():
            want = truth[name]
            error = float((got[name].double() - want).norm() / want.norm())
            if not error <= limit:
                return f"{name} off by {error:.1e} at {length} tokens (limit {limit:.0e})"
    return None


def _milliseconds(
    plan: Plan, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> float:
    """Forward and backward at 8 x 2048 tokens, the best of five."""
    heads, state_dim, head_dim = shape
    proj = torch.randn(
        8, 2048, heads * (head_dim + 4 * state_dim + 1), device=device, dtype=dtype
    ).requires_grad_()
    a = (-torch.ones(heads, device=device), torch.ones(heads, device=device))
    best = float("inf")
    with forced(plan):
        for _ in range(6):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            y, _ = run_projected(proj, a, heads=heads, state_dim=state_dim, head_dim=head_dim)
            torch.autograd.grad(y, proj, torch.ones_like(y))
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end))
    return best


def _choose(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> Plan:
    problems, passed = [], []
    for candidate in CANDIDATES:
        problem = _problem(candidate, device, dtype, shape)
        if problem is not None:
            print(f"[ssd] fused: {candidate} passed over: {problem}")
            problems.append(problem)
            continue
        passed.append(candidate)
        if torch.cuda.get_device_capability(device) in MEASURED:
            break
    if not passed:
        raise UserError(
            f"the fused SSD kernels failed their parity test ({problems[0]}; {dtype}, heads, "
            f"state_dim and head_dim {shape}). Use ssd_dispatch='rotated'."
        )
    if len(passed) == 1:
        return passed[0]
    return min(passed, key=lambda plan: _milliseconds(plan, device, dtype, shape))


@functools.cache
def plan_for(device: torch.device, dtype: torch.dtype, heads: int, state_dim: int, head_dim: int):
    """The launch plan of this device, precision and shape: remembered, or tested (and timed) now.

    Raises:
        UserError: none gives the right results; nothing was trained with a wrong one.
    """
    if device.type != "cuda":
        return CANDIDATES[0]
    shape = (heads, state_dim, head_dim)
    name = ssd_plans.key(device, dtype, *shape)
    plan = ssd_plans.remembered(name)
    if plan is not None:
        return plan
    # The modes of the forward pass that may be under way (autograd, autocast) belong to its thread.
    with ThreadPoolExecutor(1) as thread:
        plan = thread.submit(_choose, device, dtype, shape).result()
    ssd_plans.remember(name, plan)
    return plan


def _plan(proj: Tensor, heads: int, state_dim: int, head_dim: int) -> Plan:
    return _forced[-1] if _forced else plan_for(proj.device, proj.dtype, heads, state_dim, head_dim)


def refuse(*, heads: int | None, head_dim: int, state_dim: int, device: torch.device) -> str | None:
    """Why the fused path cannot run for this shape and device, in a sentence; None if it can."""
    if not HAS_TRITON:
        return "Triton is not installed."
    interpreted = env.read("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        return f"the tensors are on '{device.type}', not on CUDA."
    for name, dim in (("head_dim", head_dim), ("state_dim", state_dim)):
        if dim > LARGEST_DIM:
            return f"{name}={dim} exceeds {LARGEST_DIM}."
    if device.type == "cuda" and not interpreted:
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs a GPU of compute capability 8.0 or more."
        if heads is not None:
            try:
                plan_for(device, torch.bfloat16, heads, state_dim, head_dim)
            except UserError as problem:
                return str(problem)
    return None

"""Decoding kernels for Hopper: what does not depend on the predecessor waits in shared memory.

Legend: as in ``kernels/decode.py``, whose kernels compute the same. They are written in Gluon, the
language below Triton, because only there can a kernel copy its weights, or its state, into shared
memory, wait for its predecessor, and then go on.

A batch reads x through TMA (the copy engine) and multiplies by ``wgmma``. The norms of its layers
need no kernels: who writes the residual stream leaves it multiplied by the scales of the next norm,
and the sums of its squares (see ``inference/decode_ops.py:Norm``).

Nothing is accumulated in memory: equal inputs give equal bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mamba3_lite.kernels import decode, fused

_announce = gluon.jit(decode._announce.fn)
_wait = gluon.jit(decode._wait.fn)
_silu = gluon.jit(decode._silu.fn)
_softplus = gluon.jit(fused._softplus.fn)
_transition = gluon.jit(decode._transition.fn)


@gluon.jit
def _rest(CLOCKS: gl.constexpr):
    """Lets ``CLOCKS`` go by, about.

    Found by timing whole steps (docs/LOG.md): a kernel's programs start together, and what they ask
    for at once stands in the way of the kernels before them. In pieces it does so less.
    """
    if CLOCKS > 0:
        gl.inline_asm_elementwise(
            """{
            .reg .u64 start, now;
            .reg .pred early;
            mov.u64 start, %clock64;
            again:
            nanosleep.u32 40;
            mov.u64 now, %clock64;
            sub.u64 now, now, start;
            setp.lt.u64 early, now, $1;
            @early bra again;
            mov.u32 $0, 0;
            }""",
            "=r,l", [gl.to_tensor(CLOCKS).to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def _ask(room, at):
    """Copies what is read once in a step, so the cache need not keep it."""
    async_copy.async_copy_global_to_shared(room, at, eviction_policy="evict_first")


@gluon.jit
def staged_vector_kernel(
    x, norm, weight, out, eps,
    K: gl.constexpr, M: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr,
    COLUMNS: gl.constexpr, REST: gl.constexpr,
    NORM: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (blocks of M), batch 1: ``vector_kernel``, a warp a row; K a power of two.

    Weights are asked for in pieces of (WARPS, COLUMNS), with REST clocks between. ADD: ROWS is
    WARPS.
    """
    _announce(PDL)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    kind: gl.constexpr = weight.dtype.element_ty
    first = gl.program_id(0) * ROWS
    k = gl.arange(0, K, layout=gl.SliceLayout(0, WIDE))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, WIDE))
    held = gl.allocate_shared_memory(kind, [ROWS, K], PLAIN)
    if GATED:
        held_up = gl.allocate_shared_memory(kind, [ROWS, K], PLAIN)
    for i in gl.static_range(ROWS // WARPS):
        # Rows beyond the end are read as the last one, and not stored.
        row = first + i * WARPS + gl.arange(0, WARPS, layout=gl.SliceLayout(1, WIDE))
        line = weight + gl.minimum(row, M - 1).to(gl.int64)[:, None] * K + column[None, :]
        for start in gl.static_range(0, K, COLUMNS):
            if i + start > 0:
                _rest(REST)
            _ask(held.slice(i * WARPS, WARPS, 0).slice(start, COLUMNS, 1), line + start)
            if GATED:
                _rest(REST)
                room = held_up.slice(i * WARPS, WARPS, 0).slice(start, COLUMNS, 1)
                _ask(room, line + (M * K + start))
    async_copy.commit_group()
    if NORM:
        scale = gl.load(norm + k).to(gl.float32)
    _wait(PDL)
    v = gl.load(x + k).to(gl.float32)
    factor = 1.0
    if NORM:
        factor = gl.rsqrt(gl.sum(v * v, 0) / K + eps)
        v = v * scale
    if ADD:
        gl.static_assert(ROWS == WARPS)
        row = first + gl.arange(0, WARPS, layout=gl.SliceLayout(1, WIDE))
        before = gl.load(out + row, mask=row < M, other=0.0).to(gl.float32)
    async_copy.wait_group(0)
    for i in gl.static_range(ROWS // WARPS):
        row = first + i * WARPS + gl.arange(0, WARPS, layout=gl.SliceLayout(1, WIDE))
        w = held.slice(i * WARPS, WARPS, 0).load(WIDE).to(gl.float32)
        result = gl.sum(w * v[None, :], 1) * factor
        if GATED:
            up = held_up.slice(i * WARPS, WARPS, 0).load(WIDE).to(gl.float32)
            result = _silu(result) * (gl.sum(up * v[None, :], 1) * factor)
        if ADD:
            result += before
        gl.store(out + row, result.to(out.dtype.element_ty), mask=row < M)


@gluon.jit
def _parts(squares, row, batch, BLOCK_B: gl.constexpr, PARTS: gl.constexpr):
    """What was left for the norms of BLOCK_B rows; those beyond the end are as the last one."""
    ACROSS: gl.constexpr = min(PARTS, 128) // 4
    SUMS: gl.constexpr = gl.BlockedLayout([1, 4], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    whose = gl.minimum(row + gl.arange(0, BLOCK_B, gl.SliceLayout(1, SUMS)), batch - 1)
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(0, SUMS))
    return gl.load(squares + whose[:, None] * PARTS + part[None, :])


@gluon.jit
def staged_batch_kernel(
    x, weight, out, batch, squares, eps, scale, scaled, next_squares,
    K: gl.constexpr, M: gl.constexpr, BLOCK_B: gl.constexpr, BLOCK_M: gl.constexpr,
    CHUNK: gl.constexpr, RING: gl.constexpr, PARTS: gl.constexpr, REST: gl.constexpr,
    GATED: gl.constexpr, ADD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (blocks of M, blocks of B): ``batch_kernel`` in 16 bits, by 4 warps.

    x (B, K) and weight (M, K) are TMA descriptors of blocks (BLOCK_B, CHUNK) and (BLOCK_M, CHUNK);
    RING blocks of x are under way at a time. What lies outside is read as 0. REST: clocks between
    two blocks of weights.

    squares (B, PARTS): x is what its writer left for a norm. ADD: onto what ``out`` holds, and left
    for the next norm, whose scales are ``scale`` (M,), as ``scaled`` (B, M) and ``next_squares``
    (B, PARTS), a part for each program; what is beyond has been 0 since the embedding. Each of the
    four can be None.
    """
    _announce(PDL)
    ROUNDS: gl.constexpr = (K + CHUNK - 1) // CHUNK
    COLUMNS: gl.constexpr = 2 * BLOCK_M if GATED else BLOCK_M
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    first = gl.program_id(0) * BLOCK_M
    row = gl.program_id(1) * BLOCK_B
    held = gl.allocate_shared_memory(weight.dtype, [ROUNDS, COLUMNS, CHUNK], weight.layout)
    ring = gl.allocate_shared_memory(x.dtype, [RING, BLOCK_B, CHUNK], x.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [RING + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING + 1):
        mbarrier.init(arrived.index(i), count=1)
    weights_arrived = arrived.index(RING)
    mbarrier.expect(weights_arrived, ROUNDS * COLUMNS * CHUNK * 2)
    for i in gl.static_range(ROUNDS):
        if i > 0:
            _rest(REST)
        room = held.index(i)
        if GATED:
            gates, ups = room.slice(0, BLOCK_M, 0), room.slice(BLOCK_M, BLOCK_M, 0)
            tma.async_copy_global_to_shared(weight, [first, i * CHUNK], weights_arrived, gates)
            tma.async_copy_global_to_shared(weight, [M + first, i * CHUNK], weights_arrived, ups)
        else:
            tma.async_copy_global_to_shared(weight, [first, i * CHUNK], weights_arrived, room)
    for i in gl.static_range(RING):
        mbarrier.expect(arrived.index(i), BLOCK_B * CHUNK * 2)
    _wait(PDL)
    for i in gl.static_range(RING):
        tma.async_copy_global_to_shared(x, [row, i * CHUNK], arrived.index(i), ring.index(i))
    if squares is not None:
        parts = _parts(squares, row, batch, BLOCK_B, PARTS)
    if ADD:
        b = row + gl.arange(0, BLOCK_B, layout=gl.SliceLayout(1, ACC))
        m = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, ACC))
        inside = (b < batch)[:, None] & (m < M)[None, :]
        at = b.to(gl.int64)[:, None] * M + m[None, :]
        before = gl.load(out + at, mask=inside, other=0.0)
        if scale is not None:
            next_scale = gl.load(scale + m, mask=m < M, other=0.0)
    acc = gl.zeros([BLOCK_B, COLUMNS], gl.float32, layout=ACC)
    mbarrier.wait(weights_arrived, 0)
    for i in gl.static_range(ROUNDS):
        slot, here = ring.index(i % RING), arrived.index(i % RING)
        mbarrier.wait(here, (i // RING) % 2)
        w = held.index(i).permute((1, 0))
        acc = warpgroup_mma(slot, w, acc, is_async=True)
        if i + RING < ROUNDS:
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.expect(here, BLOCK_B * CHUNK * 2)
            tma.async_copy_global_to_shared(x, [row, (i + RING) * CHUNK], here, slot)
    if squares is not None:
        factor = gl.rsqrt(gl.sum(parts, 1) / K + eps)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    for i in gl.static_range(RING + 1):
        mbarrier.invalidate(arrived.index(i))
    if squares is not None:
        acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, ACC))[:, None]
    if GATED:
        gate, up = acc.reshape([BLOCK_B, 2, BLOCK_M]).permute((0, 2, 1)).split()
        acc = _silu(gate) * up
    kind: gl.constexpr = out.dtype.element_ty
    if ADD:
        new = (acc + before.to(gl.float32)).to(kind)
        gl.store(out + at, new, mask=inside)
        if scale is not None:
            new = new.to(gl.float32)
            left = (new * next_scale.to(gl.float32)[None, :]).to(kind)
            gl.store(scaled + at, left, mask=inside)
            part_at = next_squares + b * PARTS + gl.program_id(0)
            gl.store(part_at, gl.sum(new * new, 1), mask=b < batch)
    else:
        # Eight columns a thread are 16 bytes; the accumulator's layout has two.
        ROWS: gl.constexpr = gl.BlockedLayout(
            [1, 8], [32 // (BLOCK_M // 8), BLOCK_M // 8], [4, 1], [1, 0]
        )
        b = row + gl.arange(0, BLOCK_B, layout=gl.SliceLayout(1, ROWS))
        m = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, ROWS))
        inside = (b < batch)[:, None] & (m < M)[None, :]
        at = out + b.to(gl.int64)[:, None] * M + m[None, :]
        gl.store(at, gl.convert_layout(acc.to(kind), ROWS), mask=inside)


@gluon.jit(do_not_specialize=["batch"])
def staged_head_kernel(
    x, weight, out, batch, squares, eps, values, places,
    K: gl.constexpr, M: gl.constexpr, BLOCK_B: gl.constexpr, BLOCK_M: gl.constexpr,
    CHUNK: gl.constexpr, RING: gl.constexpr, TILES: gl.constexpr, PARTS: gl.constexpr,
    KEEP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (spans of TILES blocks of M, blocks of B): a product of so many outputs that x stays.

    x, weight and squares as in ``staged_batch_kernel``, but here x waits in shared memory and RING
    blocks of weights are under way at a time. values, places (B, spans): of each span the largest
    output and where, as in ``largest_kernel``. Without KEEP ``out`` (B, M) is not written.
    """
    _announce(PDL)
    ROUNDS: gl.constexpr = (K + CHUNK - 1) // CHUNK
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16]
    )
    first = gl.program_id(0) * (TILES * BLOCK_M)
    row = gl.program_id(1) * BLOCK_B
    held = gl.allocate_shared_memory(x.dtype, [ROUNDS, BLOCK_B, CHUNK], x.layout)
    ring = gl.allocate_shared_memory(weight.dtype, [RING, BLOCK_M, CHUNK], weight.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [RING + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING + 1):
        mbarrier.init(arrived.index(i), count=1)
    for i in gl.static_range(RING):
        mbarrier.expect(arrived.index(i), BLOCK_M * CHUNK * 2)
        at = [first + (i // ROUNDS) * BLOCK_M, (i % ROUNDS) * CHUNK]
        tma.async_copy_global_to_shared(weight, at, arrived.index(i), ring.index(i))
    mbarrier.expect(arrived.index(RING), ROUNDS * BLOCK_B * CHUNK * 2)
    _wait(PDL)
    for i in gl.static_range(ROUNDS):
        tma.async_copy_global_to_shared(x, [row, i * CHUNK], arrived.index(RING), held.index(i))
    parts = _parts(squares, row, batch, BLOCK_B, PARTS)
    factor = gl.convert_layout(gl.rsqrt(gl.sum(parts, 1) / K + eps), gl.SliceLayout(1, ACC))
    b = row + gl.arange(0, BLOCK_B, layout=gl.SliceLayout(1, ACC))
    column = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, ACC))
    best = gl.full([BLOCK_B, BLOCK_M], float("-inf"), gl.float32, layout=ACC)
    place = gl.full([BLOCK_B, BLOCK_M], M - 1, gl.int32, layout=ACC)
    mbarrier.wait(arrived.index(RING), 0)
    for tile in range(TILES):
        acc = gl.zeros([BLOCK_B, BLOCK_M], gl.float32, layout=ACC)
        for i in gl.static_range(ROUNDS):
            round = tile * ROUNDS + i
            slot = round % RING
            mbarrier.wait(arrived.index(slot), (round // RING) % 2)
            w = ring.index(slot).permute((1, 0))
            acc = warpgroup_mma(held.index(i), w, acc, is_async=True)
            # All but the last one are done: what it read makes room.
            acc = warpgroup_mma_wait(1 if i > 0 else 0, deps=(acc,))
            coming = round - 1 + RING
            if (round > 0) & (coming < TILES * ROUNDS):
                free = (round - 1) % RING
                mbarrier.expect(arrived.index(free), BLOCK_M * CHUNK * 2)
                at_m, at_k = first + (coming // ROUNDS) * BLOCK_M, (coming % ROUNDS) * CHUNK
                tma.async_copy_global_to_shared(
                    weight, [at_m, at_k], arrived.index(free), ring.index(free)
                )
        acc = warpgroup_mma_wait(0, deps=(acc,))
        m = first + tile * BLOCK_M + column
        logits = acc * factor[:, None]
        if KEEP:
            inside = (b < batch)[:, None] & (m < M)[None, :]
            gl.store(out + b.to(gl.int64)[:, None] * M + m[None, :], logits, mask=inside)
        # A NaN stays; among equals the first does.
        more = ((logits > best) | (logits != logits)) & (m < M)[None, :]
        best = gl.where(more, logits, best)
        place = gl.where(more, m[None, :], place)
    for i in gl.static_range(RING + 1):
        mbarrier.invalidate(arrived.index(i))
    wrong = gl.sum((best != best).to(gl.int32), 1)
    largest = gl.max(best, 1)
    place = gl.min(gl.where(best == largest[:, None], place, M - 1), 1)
    to = b * gl.num_programs(0) + gl.program_id(0)
    gl.store(values + to, gl.where(wrong > 0, float("nan"), largest), mask=b < batch)
    gl.store(places + to, place, mask=b < batch)


@gluon.jit
def staged_ssd_step_kernel(
    proj, a_re, a_im, state, y,
    H: gl.constexpr, N: gl.constexpr, P: gl.constexpr,
    TILE_P: gl.constexpr, SLICE: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (B H, tiles of P): ``ssd_step_kernel``; N and P powers of two, SLICE rows at a time."""
    _announce(PDL)
    ACROSS: gl.constexpr = TILE_P // 4
    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    kind: gl.constexpr = state.dtype.element_ty
    program = gl.program_id(0)
    head = program % H
    p = gl.program_id(1) * TILE_P + gl.arange(0, TILE_P, layout=gl.SliceLayout(0, TILE))
    both = gl.arange(0, 2 * N, layout=gl.SliceLayout(1, TILE))
    base = state + program.to(gl.int64) * (2 * N * P)
    held = gl.allocate_shared_memory(
        kind, [2 * N, TILE_P], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    # The state is of the last token, so it need not wait.
    _ask(held, base + both[:, None] * P + p[None, :])
    async_copy.commit_group()
    alpha = gl.load(a_re + head)
    omega = gl.load(a_im + head)
    _wait(PDL)
    row = proj + (program // H).to(gl.int64) * (H * (P + 4 * N + 1))
    x = gl.load(row + head * P + p).to(gl.float32)
    pair = gl.arange(0, 4 * N, layout=FLAT)
    pairs = gl.load(row + H * P + head * N + (pair // N) * (H * N) + pair % N).to(gl.float32)
    shared = gl.allocate_shared_memory(
        gl.float32, [4 * N], gl.SwizzledSharedLayout(1, 1, 1, [0]), pairs
    )
    s = _softplus(gl.load(row + H * (P + 4 * N) + head).to(gl.float32))
    whole, real, imag = _transition(alpha, omega, s)
    read = gl.zeros([SLICE, TILE_P], gl.float32, layout=TILE)
    async_copy.wait_group(0)
    for i in gl.static_range(N // SLICE):
        n = i * SLICE + gl.arange(0, SLICE, layout=gl.SliceLayout(1, TILE))
        b_re = shared.slice(i * SLICE, SLICE).load(gl.SliceLayout(1, TILE))
        b_im = shared.slice(N + i * SLICE, SLICE).load(gl.SliceLayout(1, TILE))
        c_re = shared.slice(2 * N + i * SLICE, SLICE).load(gl.SliceLayout(1, TILE))
        c_im = shared.slice(3 * N + i * SLICE, SLICE).load(gl.SliceLayout(1, TILE))
        h_re = held.slice(i * SLICE, SLICE, 0).load(TILE).to(gl.float32)
        h_im = held.slice(N + i * SLICE, SLICE, 0).load(TILE).to(gl.float32)
        new_re = whole * h_re + (real * h_re - imag * h_im + b_re[:, None] * x[None, :])
        new_im = whole * h_im + (real * h_im + imag * h_re + b_im[:, None] * x[None, :])
        at = base + n[:, None] * P + p[None, :]
        gl.store(at, new_re.to(kind), eviction_policy="evict_first")
        gl.store(at + N * P, new_im.to(kind), eviction_policy="evict_first")
        read += c_re[:, None] * new_re - c_im[:, None] * new_im
    gl.store(y + program * P + p, gl.sum(read, 0).to(y.dtype.element_ty))

"""All layers of one token in one launch, for a single sequence: programs meet at a barrier.

Legend as in ``kernels/decode.py``. Every program holds a slice of each product's rows. Between two
operations all programs wait for each other at a counter in memory, which costs less than the end of
one kernel and the start of the next; what does not depend on the result that they wait for, the
weights of the slice, is loaded before, and the slice after the next one is asked into the L2 cache.

The programs have to run all at once (a cooperative launch), and a buffer that others have written
is read past the first-level cache, which is not coherent.
"""

import torch
import triton
import triton.language as tl

from mamba3_lite.kernels.decode import _silu, _to_l2, ssd_of_one_token

# Operations of a layer, each behind a barrier.
OPERATIONS_OF_A_LAYER = 5
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
# Columns of the table of addresses, a row a layer.
NORM1, IN_PROJ, DECAY, MIXER, NORM2, GATE_UP, DOWN, STATE = map(tl.constexpr, range(8))


@triton.jit
def _meet(counter, programs, MEET: tl.constexpr):
    """All programs have come here, and what they have written before can be read."""
    if MEET:
        tl.debug_barrier()
        tl.atomic_add(counter, 1, sem="release", scope="gpu")
        seen = _acquire(counter)
        while seen < programs:
            seen = _acquire(counter)


@triton.jit
def _acquire(counter):
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _program(MEET: tl.constexpr):
    """This program's number, new in every turn of a loop: what is made of it is not kept.

    The compiler would hold the addresses of all operations at once, and registers are for weights.
    """
    pid = tl.program_id(0)
    if MEET:
        pid = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [pid], dtype=tl.int32, is_pure=False, pack=1
        )
    return pid


@triton.jit
def _matrix(table, at, DTYPE: tl.constexpr):
    return tl.multiple_of(tl.load(table + at).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _own(pid, M, PER: tl.constexpr, ROWS: tl.constexpr):
    """The rows of this program's slice of M, PER or fewer of them, and which of ROWS they are."""
    first = pid * PER
    i = tl.arange(0, ROWS)
    return first + i, (i < PER) & (first + i < M)


@triton.jit
def _slice(
    pid, weight, M, K: tl.constexpr, PER: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr
):
    """This program's rows of (M, K); those of a tile that are none are 0 and cost nothing."""
    row, own = _own(pid, M, PER, ROWS)
    k = tl.arange(0, BLOCK_K)
    mask = own[:, None] & (k < K)[None, :]
    return tl.load(weight + row[:, None] * K + k[None, :], mask=mask, other=0.0)


@triton.jit
def _ask(pid, weight, M, K: tl.constexpr, PER: tl.constexpr, LINES: tl.constexpr, ON: tl.constexpr):
    """Asks the lines of this program's rows of (M, K) into the L2 cache."""
    ELEMENT: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    first = pid * PER
    end = tl.minimum(first + PER, M).to(tl.int64) * (K * ELEMENT)
    begin = tl.minimum(first, M).to(tl.int64) * (K * ELEMENT)
    offset = begin + tl.arange(0, LINES) * 128
    if ON:  # noqa: SIM102  (known when compiled; the next one is not)
        if begin < end:
            _to_l2(weight.to(tl.int64) + tl.minimum(offset, end - 128))


@triton.jit
def _vector(at, K: tl.constexpr, BLOCK_K: tl.constexpr):
    k = tl.arange(0, BLOCK_K)
    return tl.load(at + k, mask=k < K, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def _times(w, v):
    return tl.sum(w.to(tl.float32) * v[None, :], 1)


@triton.jit
def layers_kernel(
    table, x, proj, y, act, counters, layers, first_operation, last_operation, eps,
    K: tl.constexpr, F: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    PER_IN: tl.constexpr, PER_OUT: tl.constexpr, PER_UP: tl.constexpr,
    ROWS_IN: tl.constexpr, ROWS_OUT: tl.constexpr, ROWS_UP: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_F: tl.constexpr,
    TILE_N: tl.constexpr, TILE_P: tl.constexpr, LINES: tl.constexpr,
    STATE_DTYPE: tl.constexpr, MEET: tl.constexpr,
    OPERATIONS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (programs,): x (K,) through operations ``first`` to ``last`` of all layers, in place.

    table (layers, COLUMNS) int64 has the addresses; counters (5 layers,) int32 are zero. Without
    MEET a launch may hold one operation only, for whoever runs programs one after the other.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    programs = tl.num_programs(0)
    W: tl.constexpr = H * (P + 4 * N + 1)
    Y: tl.constexpr = H * P
    for operation in range(first_operation, last_operation):
        pid = _program(MEET)
        layer = operation // OPERATIONS
        kind = operation % OPERATIONS
        row = table + layer * COLUMNS
        counter = counters + operation - 1
        if kind == 0:
            weight = _matrix(row, IN_PROJ, DTYPE)
            w = _slice(pid, weight, W, K, PER_IN, ROWS_IN, BLOCK_K)
            scale = _vector(_matrix(row, NORM1, DTYPE), K, BLOCK_K)
            _ask(pid, _matrix(row, MIXER, DTYPE), K, Y, PER_OUT, LINES, MEET)
            if operation > first_operation:
                _meet(counter, programs, MEET)
            v = _vector(x, K, BLOCK_K)
            factor = tl.rsqrt(tl.sum(v * v, 0) / K + eps)
            out, own = _own(pid, W, PER_IN, ROWS_IN)
            tl.store(proj + out, (_times(w, v * scale) * factor).to(DTYPE), mask=own)
        elif kind == 1:
            _ask(pid, _matrix(row, GATE_UP, DTYPE), F, K, PER_UP, LINES, MEET)
            _ask(pid, _matrix(row, GATE_UP, DTYPE) + F * K, F, K, PER_UP, LINES, MEET)
            tiles: tl.constexpr = (P + TILE_P - 1) // TILE_P
            if pid < H * tiles:
                head = pid // tiles
                decay = tl.load(row + DECAY).to(tl.pointer_type(tl.float32))
                n = tl.arange(0, TILE_N)
                p = pid % tiles * TILE_P + tl.arange(0, TILE_P)
                inside = (n < N)[:, None] & (p < P)[None, :]
                state = _matrix(row, STATE, STATE_DTYPE) + head * (2 * N * P)
                at = state + n[:, None] * P + p[None, :]
                h_re = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                h_im = tl.load(at + N * P, mask=inside, other=0.0).to(tl.float32)
                alpha = tl.load(decay + head)
                omega = tl.load(decay + H + head)
                if operation > first_operation:
                    _meet(counter, programs, MEET)
                xs = tl.load(proj + head * P + p, mask=p < P, other=0.0, cache_modifier=".cg")
                pairs = proj + H * P + head * N + n
                b_re = tl.load(pairs, mask=n < N, other=0.0, cache_modifier=".cg")
                b_im = tl.load(pairs + H * N, mask=n < N, other=0.0, cache_modifier=".cg")
                c_re = tl.load(pairs + 2 * H * N, mask=n < N, other=0.0, cache_modifier=".cg")
                c_im = tl.load(pairs + 3 * H * N, mask=n < N, other=0.0, cache_modifier=".cg")
                raw = tl.load(proj + H * (P + 4 * N) + head, cache_modifier=".cg")
                new_re, new_im, read = ssd_of_one_token(
                    h_re, h_im, alpha, omega, xs.to(tl.float32), b_re.to(tl.float32),
                    b_im.to(tl.float32), c_re.to(tl.float32), c_im.to(tl.float32),
                    raw.to(tl.float32),
                )  # fmt: skip
                tl.store(at, new_re.to(STATE_DTYPE), mask=inside)
                tl.store(at + N * P, new_im.to(STATE_DTYPE), mask=inside)
                tl.store(y + head * P + p, read.to(DTYPE), mask=p < P)
            else:
                if operation > first_operation:
                    _meet(counter, programs, MEET)
        elif kind == 2:
            w = _slice(pid, _matrix(row, MIXER, DTYPE), K, Y, PER_OUT, ROWS_OUT, BLOCK_Y)
            _ask(pid, _matrix(row, DOWN, DTYPE), K, F, PER_OUT, LINES, MEET)
            if operation > first_operation:
                _meet(counter, programs, MEET)
            _add_rows(pid, x, K, PER_OUT, ROWS_OUT, _times(w, _vector(y, Y, BLOCK_Y)))
        elif kind == 3:
            weight = _matrix(row, GATE_UP, DTYPE)
            gate = _slice(pid, weight, F, K, PER_UP, ROWS_UP, BLOCK_K)
            up = _slice(pid, weight + F * K, F, K, PER_UP, ROWS_UP, BLOCK_K)
            scale = _vector(_matrix(row, NORM2, DTYPE), K, BLOCK_K)
            if layer + 1 < layers:
                following = _matrix(row + COLUMNS, IN_PROJ, DTYPE)
                _ask(pid, following, W, K, PER_IN, LINES, MEET)
            if operation > first_operation:
                _meet(counter, programs, MEET)
            v = _vector(x, K, BLOCK_K)
            factor = tl.rsqrt(tl.sum(v * v, 0) / K + eps)
            v = v * scale
            result = _silu(_times(gate, v) * factor) * (_times(up, v) * factor)
            out, own = _own(pid, F, PER_UP, ROWS_UP)
            tl.store(act + out, result.to(DTYPE), mask=own)
        else:
            w = _slice(pid, _matrix(row, DOWN, DTYPE), K, F, PER_OUT, ROWS_OUT, BLOCK_F)
            if operation > first_operation:
                _meet(counter, programs, MEET)
            _add_rows(pid, x, K, PER_OUT, ROWS_OUT, _times(w, _vector(act, F, BLOCK_F)))


@triton.jit
def _add_rows(pid, x, K: tl.constexpr, PER: tl.constexpr, ROWS: tl.constexpr, values):
    row, own = _own(pid, K, PER, ROWS)
    old = tl.load(x + row, mask=own, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(x + row, (old + values).to(x.dtype.element_ty), mask=own)

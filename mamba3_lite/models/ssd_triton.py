"""The "triton" path: the per-chunk part of the complex SSD in one kernel, backward in PyTorch.

Legend: B batch, nc chunks of C tokens, H heads, N complex state width, D (also P) head channels.
"""

import contextlib
import importlib.util

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mamba3_lite import env
from mamba3_lite.errors import UserError
from mamba3_lite.models.ssd_complex import per_chunk_ssd_pytorch

HAS_TRITON = importlib.util.find_spec("triton") is not None

_MAX_BLOCK = 256
# float32 products run on FMA units, where a thread keeps its rows and columns of both operands in
# registers: with tiles of 64 the compiler spills 10 KB a thread, with these (nearly) nothing.
_TILE_TOKENS, _TILE_STATE, _TILE_CHANNELS = 32, 16, 32
_MIN_TILE = 16
_MAX_PROGRAMS = 2**31 - 1

_launches = 0


def launch_count() -> int:
    """Kernel launches of this process: proof that a result did not come from a fallback."""
    return _launches


def _block_dims_problem(P: int, N: int, chunk_size: int) -> str | None:
    for name, dim in (("P", P), ("N", N), ("chunk_size", chunk_size)):
        if dim > _MAX_BLOCK:
            trouble = f"exceeds the {_MAX_BLOCK}-cap"
        elif dim < 1 or dim & (dim - 1):
            trouble = "is not a power of two"
        else:
            continue
        return (
            f"per_chunk_ssd_triton: {name}={dim} {trouble}. "
            f"Use ssd_dispatch='pytorch' for this config."
        )
    return None


def _check_block_dims(P: int, N: int, chunk_size: int) -> None:
    """Raises ``UserError``, a ``ValueError``, naming a dimension over 256 or no power of two."""
    problem = _block_dims_problem(P, N, chunk_size)
    if problem is not None:
        raise UserError(problem)


def _device_problem(device: torch.device) -> str | None:
    if device.type == "cuda" or (device.type == "cpu" and env.read("TRITON_INTERPRET") == "1"):
        return None
    return (
        f"per_chunk_ssd_triton: the tensors are on '{device.type}', not on CUDA. "
        f"Use ssd_dispatch='pytorch', or TRITON_INTERPRET=1 to interpret the kernel on a CPU."
    )


def refuse(*, head_dim: int, state_dim: int, chunk_size: int, device: torch.device) -> str | None:
    """Why the Triton path cannot run for this shape and device, in a sentence; None if it can."""
    if not HAS_TRITON:
        return "Triton is not installed."
    return _block_dims_problem(head_dim, state_dim, chunk_size) or _device_problem(device)


def _plain(t: Tensor) -> Tensor:
    # A lazily negated view (the imaginary part of a conjugate) may count as contiguous; the kernel
    # would read its memory with the wrong sign.
    return t.contiguous().resolve_neg()


def _view_real_imag(t: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous float32 real and imaginary parts; ``TypeError`` unless ``t`` is complex64."""
    if t.dtype != torch.complex64:
        raise TypeError(f"per_chunk_ssd_triton: expected complex64, got {t.dtype}.")
    return _plain(t.real), _plain(t.imag)


def _check_tensors(
    Bc: Tensor, Cc: Tensor, Xc: Tensor, Ac: Tensor, decay: Tensor, segment_ids: Tensor | None
) -> None:
    if Xc.dim() != 5 or Bc.dim() != 5:
        raise UserError(
            f"per_chunk_ssd_triton: Bc {tuple(Bc.shape)} and Xc {tuple(Xc.shape)} must have the "
            f"5 dimensions (batch, chunks, chunk_size, heads, width)."
        )
    tokens = Xc.shape[:4]
    wanted = [
        ("Bc", Bc, (*tokens, Bc.shape[-1])),
        ("Cc", Cc, Bc.shape),
        ("Ac", Ac, tokens),
        ("decay_states", decay, tokens),
    ]
    if segment_ids is not None:
        wanted.append(("segment_ids", segment_ids, tokens[:3]))
        if segment_ids.is_floating_point() or segment_ids.is_complex():
            raise TypeError(
                f"per_chunk_ssd_triton: segment_ids is {segment_ids.dtype}, not an integer type."
            )
    for name, tensor, shape in wanted:
        if tensor.shape != torch.Size(shape) or tensor.device != Xc.device:
            raise UserError(
                f"per_chunk_ssd_triton: {name} is {tuple(tensor.shape)} on {tensor.device}, "
                f"but Xc needs {tuple(shape)} on {Xc.device}."
            )
    if Xc.dtype not in (torch.float32, torch.complex64):
        raise TypeError(f"per_chunk_ssd_triton: Xc is {Xc.dtype}, not float32 or complex64.")


def _tile(dim: int, largest: int) -> int:
    return max(_MIN_TILE, min(dim, largest))


def _kernel_options(
    chunk_size: int, state_dim: int, head_dim: int, *, complex_x: bool, has_segments: bool
) -> dict[str, int | bool]:
    """The compile-time arguments of ``per_chunk_kernel``."""
    return {
        "C": chunk_size,
        "N": state_dim,
        "D": head_dim,
        "BLOCK_T": _tile(chunk_size, _TILE_TOKENS),
        "BLOCK_N": _tile(state_dim, _TILE_STATE),
        "BLOCK_D": _tile(head_dim, _TILE_CHANNELS),
        "COMPLEX_X": complex_x,
        "HAS_SEGMENTS": has_segments,
    }


def _launch(pointers: tuple[Tensor | None, ...], sizes: tuple[int, int, int, int, int]) -> None:
    """Runs the kernel; ``pointers`` in the kernel's order, ``sizes`` (programs, H, C, N, D)."""
    from mamba3_lite.kernels.per_chunk import per_chunk_kernel

    global _launches
    programs, heads, chunk_size, state_dim, head_dim = sizes
    if programs > _MAX_PROGRAMS:
        raise UserError(
            f"per_chunk_ssd_triton: batch x chunks x heads = {programs} exceeds the launch limit "
            f"of {_MAX_PROGRAMS}; use a smaller batch."
        )
    x_re, x_im, segments = pointers[4], pointers[5], pointers[10]
    assert x_re is not None
    options = _kernel_options(
        chunk_size,
        state_dim,
        head_dim,
        complex_x=x_im is not None,
        has_segments=segments is not None,
    )
    grid = (programs, -(-head_dim // options["BLOCK_D"]))
    on_device = torch.cuda.device(x_re.device) if x_re.is_cuda else contextlib.nullcontext()
    with on_device:
        per_chunk_kernel[grid](
            *pointers,
            heads,
            **options,
            num_stages=env.read_int("TRITON_PER_CHUNK_NUM_STAGES"),
            num_warps=env.read_int("TRITON_PER_CHUNK_NUM_WARPS"),
        )
    _launches += 1


def _per_chunk_ssd_triton_forward(
    Bc: Tensor,
    Cc: Tensor,
    Xc: Tensor,
    Ac: Tensor,
    decay_states: Tensor,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The kernel without autograd; otherwise as :func:`per_chunk_ssd_triton`."""
    _check_tensors(Bc, Cc, Xc, Ac, decay_states, segment_ids)
    batch, chunks, chunk_size, heads, head_dim = Xc.shape
    state_dim = Bc.shape[-1]
    problem = refuse(
        head_dim=head_dim, state_dim=state_dim, chunk_size=chunk_size, device=Xc.device
    )
    if problem is not None:
        raise UserError(problem)
    x_pair = _view_real_imag(Xc) if Xc.is_complex() else (_plain(Xc), None)
    segments = None if segment_ids is None else segment_ids.to(torch.int64).contiguous()
    y = torch.empty(Xc.shape, dtype=Xc.dtype, device=Xc.device)
    state = Bc.new_empty(batch, chunks, heads, state_dim, head_dim)
    _launch(
        (
            *_view_real_imag(Bc), *_view_real_imag(Cc), *x_pair, *_view_real_imag(Ac),
            *_view_real_imag(decay_states), segments,
            torch.view_as_real(y) if y.is_complex() else y, torch.view_as_real(state),
        ),
        (batch * chunks * heads, heads, chunk_size, state_dim, head_dim),
    )  # fmt: skip
    return y, state


class _PerChunkSSDTriton(torch.autograd.Function):
    """Kernel forward; the backward recomputes and differentiates :func:`per_chunk_ssd_pytorch`."""

    @staticmethod
    def forward(ctx, Bc, Cc, Xc, Ac, decay_states, segment_ids):
        ctx.save_for_backward(Bc, Cc, Xc, Ac, decay_states, segment_ids)
        ctx.set_materialize_grads(False)
        return _per_chunk_ssd_triton_forward(Bc, Cc, Xc, Ac, decay_states, segment_ids)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, grad_state):
        *saved, segment_ids = ctx.saved_tensors
        needed = ctx.needs_input_grad[: len(saved)]
        inputs = [t.detach().requires_grad_(n) for t, n in zip(saved, needed, strict=True)]
        b, c, x, a_log, decay = inputs
        # A backward called under autocast must not recompute in bfloat16.
        with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
            outputs = per_chunk_ssd_pytorch(b, c, x, a_log, decay, segment_ids)
        # An output nobody used has no gradient, and what depends on nothing else gets none either.
        pairs = zip(outputs, (grad_y, grad_state), strict=True)
        seeded = [(o, g) for o, g in pairs if g is not None and o.requires_grad]
        wanted = [t for t in inputs if t.requires_grad]
        grads = iter(
            torch.autograd.grad(
                [o for o, _ in seeded], wanted, [g for _, g in seeded], allow_unused=True
            )
            if seeded
            else [None] * len(wanted)
        )
        return (*(next(grads) if n else None for n in needed), None)


def per_chunk_ssd_triton(
    Bc: Tensor,
    Cc: Tensor,
    Xc: Tensor,
    Ac: Tensor,
    decay_states: Tensor,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`per_chunk_ssd_pytorch` with the forward in one Triton kernel; differentiable once.

    Args:
        Bc, Cc: (B, nc, C, H, N) complex64.
        Xc: (B, nc, C, H, D) float32 or complex64.
        Ac: (B, nc, C, H) complex64, chunk-local inclusive prefix sum of A s; its imaginary part
            may be wrapped to [-pi, pi].
        decay_states: (B, nc, C, H) complex64, exp(Ac at the chunk's end - Ac), 0 where a later
            segment has begun.
        segment_ids: (B, nc, C) integers or None.

    Returns:
        Y_diag (B, nc, C, H, D) in the dtype of Xc, for real x its real part; state
        (B, nc, H, N, D) complex64.

    Raises:
        ImportError: Triton is not installed.
        UserError: C, N or D over 256 or not a power of two, shapes that do not fit each other, or
            tensors that are not on CUDA.
        TypeError: a dtype other than those above.
    """
    if not HAS_TRITON:
        raise ImportError(
            "per_chunk_ssd_triton needs Triton: pip install triton (Linux with an NVIDIA GPU), "
            "or use ssd_dispatch='pytorch'."
        )
    return _PerChunkSSDTriton.apply(Bc, Cc, Xc, Ac, decay_states, segment_ids)

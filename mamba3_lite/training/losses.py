"""Next-token cross-entropy as a sum over tokens, the head's product and its gradient in pieces.

The full logits of a production micro-batch are 6.6 GB in float32; a piece of them is computed,
turned into its gradient at once, and dropped. A sum (not a mean) leaves the weighting to whoever
knows how many tokens the whole accumulation window holds.

There are two ways to the same numbers: :func:`_plain_pieces` in torch operations for every device
and dtype, and :func:`_fused_pieces` with the Triton kernel; :func:`head_loss` chooses.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mamba3_lite.data.dataset import IGNORE_INDEX
from mamba3_lite.models import ssd_triton
from mamba3_lite.models.transformer import Mamba3Transformer
from mamba3_lite.utils.weights import raw_module

# Logits of a piece in float32 (1 GiB); in a narrower dtype as many more as fill the same memory.
_PIECE_ELEMENTS = 2**28
# Rows of bf16 logits that start off a 16-byte boundary make the head's product 8 times slower on an
# H200. So the vocabulary is padded, for the computation only, to whole tiles of that product.
_VOCAB_MULTIPLE = 128

# (summed loss, gradient of hidden, gradient of the weight); no gradients if none are wanted.
_LossAndGradients = tuple[Tensor, Tensor | None, Tensor | None]


def _plain_pieces(
    hidden: Tensor, weight: Tensor, targets: Tensor, compute: torch.dtype, wanted: bool
) -> _LossAndGradients:
    accumulate = torch.float64 if compute == torch.float64 else torch.float32
    w = weight.to(compute)
    loss = hidden.new_zeros((), dtype=accumulate)
    d_hidden = torch.empty_like(hidden) if wanted else None
    d_weight = torch.zeros_like(weight, dtype=accumulate) if wanted else None
    rows = max(1, _PIECE_ELEMENTS // weight.shape[0])
    for h, t, out in zip(
        hidden.split(rows),
        targets.split(rows),
        d_hidden.split(rows) if d_hidden is not None else hidden.split(rows),
        strict=True,
    ):
        h = h.to(compute)
        log_p = torch.log_softmax((h @ w.T).to(accumulate), -1)
        counted = t != IGNORE_INDEX
        index = t.where(counted, 0)[:, None]
        loss -= log_p.gather(1, index).squeeze(1).where(counted, 0).sum()
        if d_weight is not None:
            # Rows that do not count are masked in the narrow factors, not in the wide one.
            d_logits = log_p.exp_().scatter_add_(
                1, index, torch.full_like(index, -1, dtype=accumulate)
            )
            d_logits, row_mask = d_logits.to(compute), counted[:, None]
            out.copy_((d_logits @ w).where(row_mask, 0))
            d_weight += d_logits.T @ h.where(row_mask, 0)
    return loss, d_hidden, d_weight


def _padded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(V, d) -> (V rounded up, d) in ``dtype``, zeros below; copied once, if at all."""
    vocab = weight.shape[0]
    missing = -vocab % _VOCAB_MULTIPLE
    if missing == 0:
        return weight.to(dtype)
    out = weight.new_empty(vocab + missing, weight.shape[1], dtype=dtype)
    out[:vocab] = weight
    out[vocab:] = 0
    return out


def _rows_of_a_piece(rows: int, width: int, itemsize: int) -> int:
    """As few pieces as the memory allows, and equal ones: each reads and writes all of d_weight."""
    most = max(1, _PIECE_ELEMENTS * 4 // itemsize // width)
    pieces = max(1, -(-rows // most))
    return max(1, -(-rows // pieces))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, total in float32."""
    if total.is_cuda:
        # One GEMM that adds to the float32 total as it stands. `+=` would round every piece's
        # product to bf16 first, and pass over the 206 MB of the total twice more.
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _fused_pieces(
    hidden: Tensor, weight: Tensor, targets: Tensor, compute: torch.dtype, wanted: bool
) -> _LossAndGradients:
    from mamba3_lite.kernels.cross_entropy import cross_entropy_

    vocab, w, targets = weight.shape[0], _padded(weight, compute), targets.contiguous()
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    d_hidden = torch.empty_like(hidden) if wanted else None
    d_weight = torch.zeros_like(w, dtype=torch.float32) if wanted else None
    rows = _rows_of_a_piece(len(hidden), len(w), compute.itemsize)
    buffer = w.new_empty(rows, len(w))
    for start in range(0, len(hidden), rows):
        piece = slice(start, start + rows)
        h = hidden[piece].to(compute)
        logits = torch.mm(h, w.T, out=buffer[: len(h)])
        cross_entropy_(
            logits, targets[piece], losses[piece],
            vocab_size=vocab, ignore_index=IGNORE_INDEX, write_gradient=wanted,
        )  # fmt: skip
        if d_hidden is not None and d_weight is not None:
            d_logits = logits  # written over in place
            d_hidden[piece] = d_logits @ w
            _add_product(d_weight, d_logits.T, h)
    return losses.sum(), d_hidden, None if d_weight is None else d_weight[:vocab]


class _HeadLoss(torch.autograd.Function):
    """sum of -log softmax(hidden @ weight.T)[target] over the rows whose target counts."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, fused: bool, wanted: bool
    ) -> Tensor:
        """hidden (M, d), weight (V, d), targets (M,) -> 0-d float32, or float64 for float64."""
        compute = weight.dtype if hidden.dtype != torch.float64 else hidden.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            compute = torch.get_autocast_dtype(hidden.device.type)
        with torch.autocast(hidden.device.type, enabled=False):
            pieces = _fused_pieces if fused else _plain_pieces
            loss, *gradients = pieces(hidden, weight, targets, compute, wanted)
        if wanted:
            ctx.save_for_backward(*gradients)
            ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Nobody else holds the two gradients, so they are scaled where they are; autograd refuses
        # a second backward, because it sees that they have changed. One dimension makes the factor
        # take part in type promotion: a 0-d one would be rounded to bf16 with d_hidden.
        d_hidden, d_weight = ctx.saved_tensors
        factor = grads[0].reshape(1)
        return d_hidden.mul_(factor), d_weight.mul_(factor).to(ctx.weight_dtype), None, None, None


def head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, fused: bool | None = None
) -> Tensor:
    """Summed cross-entropy of targets (...,) int64, without full logits; differentiable once.

    The logits are those of hidden (..., d) @ weight (V, d).T, in the dtype of autocast where it is
    on. Without ``fused`` the Triton kernel is used on CUDA where Triton is installed, except for
    float64; True and False are for comparing the two.
    """
    if fused is None:
        wide = torch.float64 in (hidden.dtype, weight.dtype)
        fused = hidden.is_cuda and ssd_triton.HAS_TRITON and not wide
    # Asked here: inside the function gradients are off, and its own flags ignore `no_grad`.
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _HeadLoss.apply(hidden.flatten(0, -2), weight, targets.flatten(), fused, wanted)


class LossModel(nn.Module):
    """A model and its loss as one module, for wrappers that act around a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, targets: Tensor, segment_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As :func:`next_token_loss` of the model inside."""
        return next_token_loss(self.model, tokens, targets, segment_ids=segment_ids)


def next_token_loss(
    model: nn.Module, tokens: Tensor, targets: Tensor, *, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(summed loss, number of counted tokens), both 0-d.

    Tokens and targets are (B, T); a target of IGNORE_INDEX does not count. Any module that maps ids
    (B, T) to logits (B, T, V) can be trained; ours goes through :func:`head_loss`. Segment ids
    (B, T) reset the state where they change; a module of another kind must take them by keyword.
    A :class:`LossModel`, wrapped for data-parallel training or not, answers by itself.
    """
    if isinstance(raw_module(model), LossModel):
        return model(tokens, targets, segment_ids)
    count = (targets != IGNORE_INDEX).sum()
    if isinstance(model, Mamba3Transformer):
        hidden = model.hidden(tokens, segment_ids=segment_ids)
        return head_loss(hidden, model.lm_head.weight, targets), count
    segments = {} if segment_ids is None else {"segment_ids": segment_ids}
    logits = model(tokens, **segments).flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return loss, count

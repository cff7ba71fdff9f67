"""Next-token cross-entropy as a sum over tokens, the head's product and its gradient in pieces.

The full logits of a production micro-batch are 6.6 GB in float32; a piece of them is computed,
turned into its gradient at once, and dropped. A sum (not a mean) leaves the weighting to whoever
knows how many tokens the whole accumulation window holds.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mamba3_lite.data.dataset import IGNORE_INDEX
from mamba3_lite.models.transformer import Mamba3Transformer

_PIECE_ELEMENTS = 2**28


class _HeadLoss(torch.autograd.Function):
    """sum of -log softmax(hidden @ weight.T)[target] over the rows whose target counts."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """hidden (M, d), weight (V, d), targets (M,) -> 0-d float32, or float64 for float64."""
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        compute = weight.dtype if hidden.dtype != torch.float64 else hidden.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            compute = torch.get_autocast_dtype(hidden.device.type)
        accumulate = torch.float64 if compute == torch.float64 else torch.float32
        w = weight.to(compute)
        loss = hidden.new_zeros((), dtype=accumulate)
        d_hidden = torch.empty_like(hidden) if wanted else None
        d_weight = torch.zeros_like(weight, dtype=accumulate) if wanted else None
        rows = max(1, _PIECE_ELEMENTS // weight.shape[0])
        with torch.autocast(hidden.device.type, enabled=False):
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
        if wanted:
            ctx.save_for_backward(d_hidden, d_weight)
            ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        d_hidden, d_weight = ctx.saved_tensors
        (grad,) = grads
        return d_hidden * grad.to(d_hidden.dtype), (d_weight * grad).to(ctx.weight_dtype), None


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy of targets (...,) int64, without full logits.

    The logits are those of hidden (..., d) @ weight (V, d).T.
    """
    return _HeadLoss.apply(hidden.flatten(0, -2), weight, targets.flatten())


def next_token_loss(
    model: nn.Module, tokens: Tensor, targets: Tensor, *, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(summed loss, number of counted tokens), both 0-d.

    Tokens and targets are (B, T); a target of IGNORE_INDEX does not count. Any module that maps ids
    (B, T) to logits (B, T, V) can be trained; ours goes through :func:`head_loss`. Segment ids
    (B, T) reset the state where they change; a module of another kind must take them by keyword.
    """
    count = (targets != IGNORE_INDEX).sum()
    if isinstance(model, Mamba3Transformer):
        hidden = model.hidden(tokens, segment_ids=segment_ids)
        return head_loss(hidden, model.lm_head.weight, targets), count
    segments = {} if segment_ids is None else {"segment_ids": segment_ids}
    logits = model(tokens, **segments).flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return loss, count

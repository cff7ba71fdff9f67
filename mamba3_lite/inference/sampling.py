"""From logits to the next token."""

import torch
from torch import Tensor

from mamba3_lite.errors import UserError


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """``UserError`` for values that mean nothing."""
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature must be 0 (greedy) or a positive number, got {temperature}.")
    if top_k < 0:
        raise UserError(f"top_k must be 0 (off) or positive, got {top_k}.")
    if not 0 <= top_p <= 1:
        raise UserError(f"top_p must lie between 0 and 1, got {top_p}.")


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws one token a row: logits (B, V) -> ids (B,) int64.

    Temperature 0 takes the largest logit. ``top_k`` 0 is off, above V is V. ``top_p`` keeps the
    smallest set of likeliest tokens whose probability reaches it, always at least one.

    Raises:
        UserError: a parameter out of range, or logits that are not finite.
    """
    check_sampling(temperature, top_k, top_p)
    if not bool(torch.isfinite(logits).all()):
        raise UserError("The model's logits are not finite: the checkpoint is damaged or diverged.")
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float()
    # Relative to the largest, so that a tiny temperature sends the others to -inf instead of
    # overflowing.
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    ranked, order = logits.sort(-1, descending=True)
    if top_k:
        ranked[:, top_k:] = -torch.inf
    probabilities = torch.softmax(ranked, -1)
    before = probabilities.cumsum(-1) - probabilities
    before[:, 0] = -1.0
    probabilities = probabilities.masked_fill(before >= top_p, 0)
    choice = torch.multinomial(probabilities, 1, generator=generator)
    return order.gather(-1, choice).squeeze(-1)

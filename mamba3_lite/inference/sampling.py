"""From logits to the next token."""

import math

import torch
from torch import Tensor

from mamba3_lite.errors import UserError


def check_sampling(
    temperature: float, top_k: int, top_p: float, repetition_penalty: float = 1.0
) -> None:
    """``UserError`` for values that mean nothing."""
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature must be 0 (greedy) or a positive number, got {temperature}.")
    if top_k < 0:
        raise UserError(f"top_k must be 0 (off) or positive, got {top_k}.")
    if not 0 < top_p <= 1:
        raise UserError(
            f"top_p must lie between 0 and 1 and not be 0, got {top_p}; "
            "1 keeps every token, temperature 0 is greedy."
        )
    if not 0 < repetition_penalty < float("inf"):
        raise UserError(
            f"repetition_penalty must be a positive number (1: off), got {repetition_penalty}."
        )


def not_finite() -> UserError:
    """The error for logits that hold NaN or infinity."""
    return UserError("The model's logits are not finite: the checkpoint is damaged or diverged.")


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Makes what was ``seen`` (B, V) bool less likely (arXiv 1909.05858, section 4.1).

    Positive logits are divided by the penalty, negative ones multiplied.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def choose(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`sample` without its checks, which would wait for the device.

    Returns:
        The ids (B,), and the largest logit of each row (B,): finite unless the model is broken.
    """
    if temperature == 0:
        largest, ids = logits.max(-1)
        return ids, largest
    logits = logits.float()
    largest = logits.amax(-1, keepdim=True)
    # Relative to the largest, so that a tiny temperature sends the others to -inf instead of
    # overflowing.
    logits = (logits - largest) / temperature
    order = None
    if 0 < top_k < logits.shape[-1]:
        logits, order = logits.topk(top_k)
    elif top_p < 1:
        logits, order = logits.sort(-1, descending=True)
    if top_p < 1:
        probabilities = torch.softmax(logits, -1)
        before = probabilities.cumsum(-1) - probabilities
        before[:, 0] = -1.0
        logits = logits.masked_fill(before >= top_p, -math.inf)
    # The largest of log p - log q, q exponential, is a draw from p. multinomial would do the same,
    # and wait for the device to check its input.
    draws = torch.empty_like(logits).exponential_(generator=generator)
    tiny = torch.finfo(draws.dtype).tiny
    choice = (logits - draws.clamp_min_(tiny).log_()).argmax(-1, keepdim=True)
    ids = choice if order is None else order.gather(-1, choice)
    return ids.squeeze(-1), largest.squeeze(-1)


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
        UserError: a parameter out of range, or logits with NaN, infinity, or nothing but -inf.
    """
    check_sampling(temperature, top_k, top_p)
    ids, largest = choose(
        logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
    )
    if not bool(torch.isfinite(largest).all()):
        raise not_finite()
    return ids

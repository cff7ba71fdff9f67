"""One small case with known answers, for a device to prove itself on before it trains anything.

Legend: B batch, T time, H heads, P channels of a head, N complex state width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mamba3_lite.models import ssd_rotated
from mamba3_lite.models.ssd_complex import Pair


def self_test_case(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], length: int
) -> tuple[dict[str, Tensor], Callable[[Callable], dict[str, Tensor]]]:  # fmt: skip
    """The right answers in float64, and how to ask an implementation for its own.

    Every input is in use: an initial state, a final one, a document that ends on the way.

    Args:
        shape: heads, state_dim and head_dim.
        length: tokens of each of the two sequences.

    Returns:
        The answers by name (y, final, d_proj, d_dt, dA, d_state), and a function that takes
        anything with the signature of :func:`mamba3_lite.models.ssd_fused.run_projected` and
        gives the same names.
    """
    heads, state_dim, head_dim = shape
    generator = torch.Generator(device=device).manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    proj = draw(2, length, heads * (head_dim + 4 * state_dim + 1)).to(dtype)
    a = torch.stack([-torch.logspace(-2, 0, heads), torch.linspace(0.5, 3, heads)]).to(device)
    state = draw(2, heads, 2 * state_dim, head_dim)
    segments = (torch.arange(length, device=device) >= length // 3).long().expand(2, -1)
    dy, d_final = draw(2, length, heads, head_dim), draw(*state.shape)

    def answers(run: Callable, cast: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        leaves = [cast(t).detach().clone().requires_grad_() for t in (proj, a, state)]
        y, final = run(
            leaves[0], leaves[1].unbind(), heads=heads, state_dim=state_dim, head_dim=head_dim,
            state=leaves[2], return_state=True, segment_ids=segments,
        )  # fmt: skip
        loss = (y * dy.to(y)).sum() + (final * d_final.to(final)).sum()
        d_proj, d_a, d_state = torch.autograd.grad(loss, leaves)
        return {
            "y": y.detach(), "final": final.detach(), "d_proj": d_proj[..., :-heads],
            "d_dt": d_proj[..., -heads:], "dA": d_a, "d_state": d_state,
        }  # fmt: skip

    return answers(_plain_twin, torch.Tensor.double), lambda run: answers(run, lambda t: t)


def _plain_twin(proj: Tensor, a: Pair, *, heads, state_dim, head_dim, **rest):
    """``run_projected`` through the plain path, in the precision of ``proj``."""
    sizes = [heads * head_dim, *[heads * state_dim] * 4, heads]
    x, *pairs, dt = proj.split(sizes, -1)
    x, *pairs = (t.unflatten(-1, (heads, -1)) for t in (x, *pairs))
    b, c = tuple(pairs[:2]), tuple(pairs[2:])
    return ssd_rotated.run(x, b, c, dt, a, chunk_size=64, **rest)

"""From logits to tokens: edges, distributions, filters."""

import pytest
import torch

from mamba3_lite.errors import UserError
from mamba3_lite.inference.sampling import penalize, sample


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# case D04
def test_d04_sampling_at_its_edges():
    logits = torch.randn(4, 50, generator=seeded(0))
    greedy = logits.argmax(-1)
    for options in ({"temperature": 0.0}, {"temperature": 1e-8}, {"top_p": 1e-9}, {"top_k": 1}):
        assert torch.equal(sample(logits, **options), greedy), options
    for options in ({"top_k": 0}, {"top_k": 500}, {"top_k": 50}, {"top_p": 1.0}):
        draws = [sample(logits, generator=seeded(s), **options) for s in range(50)]
        assert len({tuple(d.tolist()) for d in draws}) > 10
    top = logits.topk(5).indices
    for s in range(50):
        ids = sample(logits, top_k=5, generator=seeded(s))
        assert bool((top == ids[:, None]).any(-1).all())
    for wrong in (float("nan"), float("inf")):
        for temperature in (0, 1):
            with pytest.raises(UserError, match="not finite"):
                sample(torch.tensor([[0.0, wrong]]), temperature=temperature)


# case D04
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"temperature": float("inf")}, "temperature must be 0"),
        ({"top_k": -1}, "top_k must be 0"), ({"top_p": 1.5}, "top_p must lie between 0 and 1"),
        ({"top_p": 0.0}, "top_p must .* not be 0, got 0.0; .* temperature 0 is greedy"),
        ({"top_p": -0.1}, "top_p must"), ({"top_p": float("nan")}, "top_p must"),
    ],
)  # fmt: skip
def test_d04_values_that_mean_nothing_are_named(wrong, says):
    with pytest.raises(UserError, match=says):
        sample(torch.zeros(1, 5), **wrong)


def test_sampling_follows_the_probabilities():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(20_000, 4)
    for options, want in (
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_p": 0.7}, [0.625, 0.375, 0, 0]),
        ({"top_k": 3}, [0.526, 0.316, 0.158, 0]),
        ({"top_k": 3, "top_p": 0.5}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, [0.685, 0.247, 0.062, 0.007]),
    ):
        ids = sample(logits, generator=seeded(1), **options)
        share = torch.bincount(ids, minlength=4) / 20_000
        assert float((share - torch.tensor(want)).abs().max()) < 0.02, options


def test_what_is_left_out_is_never_drawn():
    logits = torch.tensor([[0.0, -torch.inf, 5.0, -torch.inf]]).expand(5_000, 4)
    assert set(sample(logits, generator=seeded(2)).tolist()) <= {0, 2}
    assert set(sample(logits, top_p=0.999, generator=seeded(2)).tolist()) <= {0, 2}


def test_a_penalty_divides_positive_logits_and_multiplies_negative_ones():
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    seen = torch.tensor([[True, True, False, False]])
    assert penalize(logits, seen, 2.0).tolist() == [[1.0, -4.0, 2.0, -2.0]]


def test_half_precision_logits_are_drawn_from_in_float32():
    logits = torch.log(torch.tensor([[0.5, 0.5]])).expand(20_000, 2).bfloat16()
    share = sample(logits, generator=seeded(3)).float().mean()
    assert abs(float(share) - 0.5) < 0.02

"""Scoring on a CUDA device: precision, batches, and passages longer than memory would hold."""

import math

import numpy as np
import pytest
import torch

from mamba3_lite.errors import UserError
from mamba3_lite.evaluation.scoring import Passage, Scorer
from mamba3_lite.inference.generate import choose_dispatch
from mamba3_lite.models.transformer import Mamba3Transformer

pytestmark = pytest.mark.gpu

WIDE = {
    "vocab_size": 50_257, "d_model": 256, "n_layers": 3, "n_heads": 4, "head_dim": 64,
    "state_dim": 64, "ffn_dim": 512,
}  # fmt: skip


def built(device: str) -> Mamba3Transformer:
    """With logits of some size, as those of a trained model."""
    torch.manual_seed(0)
    model = Mamba3Transformer(WIDE).eval()
    with torch.no_grad():
        model.embed.weight.mul_(4)
    choose_dispatch(model, torch.device(device))
    return model.to(device)


@pytest.fixture(scope="module")
def model() -> Mamba3Transformer:
    return built("cuda")


def passages(*lengths: int) -> list[Passage]:
    draw = np.random.default_rng(0)
    return [Passage(draw.integers(50_257, size=n), 1 + n // 5) for n in lengths]


def losses(scorer: Scorer, asked: list[Passage]) -> np.ndarray:
    """-log p of every scored token, in the order of the passages."""
    found = [np.full(len(passage.ids), np.nan) for passage in asked]
    for part in scorer.score(asked):
        found[part.passage][part.begin : part.begin + len(part.ids)] = part.losses
    scored = [one[passage.first :] for one, passage in zip(found, asked, strict=True)]
    values = np.concatenate(scored)
    assert not np.isnan(values).any()
    return values


def test_float32_equals_the_cpu_whatever_the_batch(model):
    asked = passages(3, 700, 64, 65, 130, 257, 2, 40)
    want = losses(Scorer(built("cpu")), asked)
    means = []
    for how in ({}, {"batch_size": 1}, {"batch_size": 3, "batch_tokens": 384}):
        found = losses(Scorer(model, **how), asked)
        np.testing.assert_allclose(found, want, atol=1e-3)
        means.append(found.mean())
        assert math.exp(means[-1]) == pytest.approx(math.exp(means[0]), rel=1e-5)
    assert means[0] == pytest.approx(want.mean(), rel=1e-5)


def test_bfloat16_is_near_float32_and_nearly_the_same_in_every_batch(model):
    asked = passages(*range(20, 1_000, 49))
    want = losses(Scorer(model), asked)
    means = []
    for how in ({}, {"batch_size": 1}, {"batch_size": 5, "batch_tokens": 1_000}):
        scorer = Scorer(model, dtype=torch.bfloat16, **how)
        found = losses(scorer, asked)
        assert np.abs(found - want).mean() < 0.05 and np.abs(found - want).max() < 0.5
        means.append(found.mean())
        assert means[-1] == pytest.approx(want.mean(), rel=2e-3)
        assert losses(scorer, asked).tolist() == found.tolist(), "the same twice"
    assert means == pytest.approx([means[0]] * 3, rel=5e-4)
    logits = scorer._logits(torch.randn(9, 256, device="cuda").bfloat16())
    known = logits[:, : WIDE["vocab_size"]]
    assert logits.dtype == torch.float32 and (known != known.bfloat16()).float().mean() > 0.9
    assert bool((logits[:, WIDE["vocab_size"] :] == -torch.inf).all())


def test_greedy_agrees_with_the_logits(model):
    (passage,) = passages(300)
    with torch.no_grad():
        logits = model(torch.from_numpy(passage.ids)[None, :-1].cuda())[0]
    passage.ids[1:][::2] = logits.argmax(-1).cpu().numpy()[::2]
    with torch.no_grad():
        logits = model(torch.from_numpy(passage.ids)[None, :-1].cuda())[0]
    want = logits.argmax(-1).cpu().numpy() == passage.ids[1:]
    (part,) = Scorer(model).score([passage._replace(first=1)], greedy=True)
    assert part.greedy is not None and np.mean(part.greedy == want) > 0.99 and want.any()


def test_memory_does_not_grow_with_the_length(model):
    peaks = []
    for length in (20_000, 300_000):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        losses(Scorer(model, dtype=torch.bfloat16, batch_tokens=8_192), passages(length))
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < 1.1 * peaks[0]


def test_a_broken_model_is_named(model):
    broken = built("cuda")
    with torch.no_grad():
        broken.norm_f.weight[0] = math.nan
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(UserError, match="not finite"):
            list(Scorer(broken, dtype=dtype).score(passages(50)))

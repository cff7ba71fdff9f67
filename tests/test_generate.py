"""Decoding: prompts of mixed lengths in one batch, steps against the full forward, sampling."""

import pytest
import torch

from mamba3_lite.errors import UserError
from mamba3_lite.inference import generate as module
from mamba3_lite.inference.generate import generate, load_model, prefill
from mamba3_lite.inference.sampling import sample
from mamba3_lite.models.transformer import Mamba3Transformer
from mamba3_lite.training.pretrain import Pretrainer
from tests.runs import VOCAB, config, tokens


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Mamba3Transformer:
    """A model that has learnt something: a random one has no opinions to get wrong."""
    folder = tmp_path_factory.mktemp("trained")
    settings = config(folder, max_steps=60, lr=1e-2, save_every=60)
    assert Pretrainer(settings).train() == 0
    return load_model(folder / "run")


def prompts(*lengths: int) -> list[list[int]]:
    return [tokens(n, seed=n).tolist() for n in lengths]


# case D02
@pytest.mark.parametrize("side", ["left", "right"])
def test_acc12_d02_mixed_lengths_equal_one_by_one(trained, side):
    batch = prompts(3, 64, 200)
    logits, state = prefill(trained, batch, padding_side=side)
    for row, prompt in enumerate(batch):
        alone, alone_state = prefill(trained, [prompt])
        assert float((logits[row] - alone[0]).abs().max()) < 1e-5
        for got, want in zip(state, alone_state, strict=True):
            assert float((got[row] - want[0]).norm()) <= 1e-5 * float(want[0].norm())


def test_acc12_d02_greedy_text_is_the_same(trained):
    batch = prompts(3, 64, 200)
    together = generate(trained, batch, max_new_tokens=40, temperature=0)
    assert together == [generate(trained, [p], max_new_tokens=40, temperature=0)[0] for p in batch]
    assert len({tuple(t) for t in together}) == 3


# case D01
@pytest.mark.parametrize("length", [1, 8, 9])
def test_d01_steps_equal_the_full_forward_for_300_tokens(trained, length):
    sequence = tokens(length + 300, seed=4)[None]
    with torch.no_grad():
        want = trained(sequence)
        logits, state = trained(sequence[:, :length], return_state=True)
        got = [logits[:, -1]]
        for t in range(length, length + 300):
            logits, state = trained.step(sequence[:, t], state)
            got.append(logits)
    difference = torch.stack(got, 1) - want[:, length - 1 :]
    assert float(difference.abs().max()) < 1e-4
    again = generate(trained, [sequence[0, :9].tolist()], max_new_tokens=50, seed=3)
    assert again == generate(trained, [sequence[0, :9].tolist()], max_new_tokens=50, seed=3)


def test_long_prompts_go_through_in_pieces(trained, monkeypatch):
    batch = prompts(100, 37)
    want, want_state = prefill(trained, batch)
    monkeypatch.setattr(module, "PREFILL_TOKENS", 16)
    for side in ("left", "right"):
        got, state = prefill(trained, batch, padding_side=side)
        assert float((got - want).abs().max()) < 1e-5
        for a, b in zip(state, want_state, strict=True):
            assert float((a - b).abs().max()) < 1e-5


def test_each_row_ends_at_its_own_eos(trained):
    batch = prompts(3, 64)
    free = generate(trained, batch, max_new_tokens=30, temperature=0)
    eos = free[0][5]
    ended = generate(trained, batch, max_new_tokens=30, temperature=0, eos_id=eos)
    for got, want in zip(ended, free, strict=True):
        assert got == (want[: want.index(eos)] if eos in want else want)
    assert len(ended[0]) <= 5


# case D04
def test_d04_sampling_at_its_edges():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    greedy = logits.argmax(-1)
    for options in (
        {"temperature": 0.0}, {"temperature": 1e-8}, {"top_p": 0.0}, {"top_p": 1e-9}, {"top_k": 1},
    ):  # fmt: skip
        assert torch.equal(sample(logits, **options), greedy), options
    for options in ({"top_k": 0}, {"top_k": 500}, {"top_p": 1.0}):
        draws = [
            sample(logits, generator=torch.Generator().manual_seed(s), **options) for s in range(50)
        ]
        assert len({tuple(d.tolist()) for d in draws}) > 10
    top = logits.topk(5).indices
    for s in range(50):
        ids = sample(logits, top_k=5, generator=torch.Generator().manual_seed(s))
        assert bool((top == ids[:, None]).any(-1).all())
    with pytest.raises(UserError, match="not finite"):
        sample(torch.tensor([[0.0, float("nan")]]))
    for wrong in ({"temperature": -1.0}, {"top_k": -1}, {"top_p": 1.5}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            sample(logits, **wrong)


def test_sampling_follows_the_probabilities():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(20_000, 4)
    for options, want in (
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_p": 0.7}, [0.625, 0.375, 0, 0]),
        ({"top_k": 3}, [0.526, 0.316, 0.158, 0]),
    ):
        ids = sample(logits, generator=torch.Generator().manual_seed(1), **options)
        share = torch.bincount(ids, minlength=4) / 20_000
        assert float((share - torch.tensor(want)).abs().max()) < 0.02


def test_mistakes_are_named(trained, tmp_path):
    with pytest.raises(UserError, match="at least one token"):
        generate(trained, [[]], max_new_tokens=1)
    with pytest.raises(UserError, match=f"outside 0 to {VOCAB - 1}"):
        generate(trained, [[VOCAB]], max_new_tokens=1)
    with pytest.raises(UserError, match="is not a folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no checkpoint"):
        load_model(tmp_path)

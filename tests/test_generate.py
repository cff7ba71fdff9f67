"""Decoding: prompts of mixed lengths in one batch, steps against the full forward, endless text."""

import copy

import pytest
import torch

from mamba3_lite.errors import UserError
from mamba3_lite.inference import generate as module
from mamba3_lite.inference.decoder import PlainDecoder, decoder_for
from mamba3_lite.inference.generate import generate, load_model, prefill, stream
from mamba3_lite.models.mamba_block import Mamba3Block
from mamba3_lite.models.transformer import Mamba3Transformer
from mamba3_lite.training.pretrain import Pretrainer
from tests.runs import VOCAB, config, tokens

# Every path that reads prompts on a CPU; "triton" does so by falling back.
DISPATCHES = ("pytorch", "rotated", "triton", "auto")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Mamba3Transformer:
    """A model that has learnt something: a random one has no opinions to get wrong."""
    folder = tmp_path_factory.mktemp("trained")
    settings = config(folder, max_steps=100, lr=1e-2, save_every=100)
    assert Pretrainer(settings).train() == 0
    return load_model(folder / "run")


def prompts(*lengths: int) -> list[list[int]]:
    return [tokens(n, seed=n).tolist() for n in lengths]


def variant(model: Mamba3Transformer, dispatch: str, chunk_size: int = 64) -> Mamba3Transformer:
    """The same weights, prompts read by another path in chunks of the production size."""
    model = copy.deepcopy(model)
    for block in model.layers:
        assert isinstance(block, Mamba3Block)
        block.ssd_dispatch, block.chunk_size, block._resolved = dispatch, chunk_size, None
    return model


def step_through(model: Mamba3Transformer, state, ids: torch.Tensor) -> torch.Tensor:
    """Logits (T, V) after each of the tokens ``ids`` (T,), by single steps of the decoder."""
    logits = []
    with decoder_for(model, 1) as decoder:
        decoder.load(state)
        for token in ids:
            logits.append(decoder.step(token[None])[0].clone())
    return torch.stack(logits)


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
@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_d01_steps_equal_the_full_forward_for_300_tokens(trained, dispatch):
    model = variant(trained, dispatch)
    sequence = tokens(2300, seed=4)
    with torch.no_grad():
        want = model(sequence[None])[0]
    gap = -want.topk(2).values.diff().squeeze(-1)
    assert float((gap > 1e-4).float().mean()) > 0.99
    for length in (1, 63, 64, 65, 2000):
        logits, state = prefill(model, [sequence[:length]])
        got = torch.cat([logits, step_through(model, state, sequence[length : length + 300])])
        truth = want[length - 1 : length + 300]
        assert float((got - truth).abs().max()) < 1e-4, length
        clear = gap[length - 1 : length + 300] > 1e-4
        assert torch.equal(got.argmax(-1)[clear], truth.argmax(-1)[clear]), length


# case D01
def test_d01_repeated_calls_are_bitwise_equal(trained):
    for how in ({"temperature": 0}, {"top_k": 9}, {"top_p": 0.9, "repetition_penalty": 1.2}):
        texts = [
            generate(trained, prompts(9, 70), max_new_tokens=50, seed=3, **how) for _ in range(2)
        ]
        assert texts[0] == texts[1]
    runs = []
    for _ in range(2):
        logits, state = prefill(trained, prompts(70))
        runs.append([logits, *state, step_through(trained, state, tokens(30))])
    assert all(map(torch.equal, *runs))
    assert generate(trained, prompts(9), max_new_tokens=50, seed=4) != generate(
        trained, prompts(9), max_new_tokens=50, seed=3
    )


def test_long_prompts_go_through_in_pieces(trained, monkeypatch):
    batch = prompts(100, 37)
    want, want_state = prefill(trained, batch)
    monkeypatch.setitem(module.PREFILL_TOKENS, "cpu", 32)
    longest = []
    hidden = trained.hidden

    def watched(ids, **rest):
        longest.append(ids.numel())
        return hidden(ids, **rest)

    monkeypatch.setattr(trained, "hidden", watched)
    for side in ("left", "right"):
        got, state = prefill(trained, batch, padding_side=side)
        assert float((got - want).abs().max()) < 1e-5
        for a, b in zip(state, want_state, strict=True):
            assert float((a - b).abs().max()) < 1e-5
    assert len(longest) == 2 * 7 and max(longest) == 32, "over all rows"


def test_pieces_without_padding_are_read_without_a_mask(trained, monkeypatch):
    monkeypatch.setitem(module.PREFILL_TOKENS, "cpu", 40)
    masked = []
    hidden = trained.hidden

    def watched(ids, *, token_mask, **rest):
        masked.append(token_mask is not None)
        return hidden(ids, token_mask=token_mask, **rest)

    monkeypatch.setattr(trained, "hidden", watched)
    prefill(trained, prompts(60, 45))
    assert masked == [True, False, False]


def test_each_row_ends_at_its_own_eos(trained):
    batch = prompts(3, 64)
    free = generate(trained, batch, max_new_tokens=30, temperature=0)
    eos = free[0][5]
    ended = generate(trained, batch, max_new_tokens=30, temperature=0, eos_id=eos)
    for got, want in zip(ended, free, strict=True):
        assert got == (want[: want.index(eos)] if eos in want else want)
    assert len(ended[0]) <= 5
    shown = list(stream(trained, batch, max_new_tokens=30, temperature=0, eos_id=eos))
    columns = [[step[row] for step in shown] for row in range(2)]
    for column, text in zip(columns, ended, strict=True):
        assert column == text + [None] * (len(shown) - len(text))
    seen = []
    generate(
        trained, batch, max_new_tokens=30, temperature=0, eos_id=eos,
        on_tokens=lambda ids: seen.append(ids.tolist()),
    )  # fmt: skip
    assert seen == [[-1 if t is None else t for t in step] for step in shown]


def test_no_token_at_all_and_exactly_one(trained, monkeypatch):
    assert generate(trained, prompts(5), max_new_tokens=0) == [[]]
    steps = []
    step = PlainDecoder.step
    monkeypatch.setattr(PlainDecoder, "step", lambda *a: steps.append(1) or step(*a))
    (text,) = generate(trained, prompts(5), max_new_tokens=1)
    assert len(text) == 1 and not steps, "the prompt's own logits are enough"


def test_only_ids_the_tokenizer_knows_are_drawn(trained):
    free = generate(trained, prompts(5), max_new_tokens=40, temperature=0)[0]
    (bound,) = generate(trained, prompts(5), max_new_tokens=40, temperature=0, vocab_size=30)
    assert max(free) >= 30 > max(bound)


def test_a_penalty_makes_repetition_rarer(trained):
    how = {"max_new_tokens": 60, "temperature": 0}
    (free,) = generate(trained, prompts(5), **how)
    (varied,) = generate(trained, prompts(5), repetition_penalty=1.5, **how)
    assert len(set(varied)) > len(set(free))


def test_the_model_is_left_in_the_mode_it_was_in(trained):
    trained.train()
    generate(trained, prompts(5), max_new_tokens=2)
    assert trained.training
    tokens_of = stream(trained, prompts(5), max_new_tokens=5)
    next(tokens_of)
    assert not trained.training
    tokens_of.close()
    assert trained.training
    trained.eval()


def test_a_run_of_another_device_can_be_used_here(trained):
    model = variant(trained, "fused")
    model.cfg.ssd_dispatch = "fused"
    with pytest.raises(UserError, match="cannot run here"):
        prefill(model, prompts(5))
    module.choose_dispatch(model, torch.device("cpu"))
    got, _ = prefill(model, prompts(5))
    want, _ = prefill(trained, prompts(5))
    assert float((got - want).abs().max()) < 1e-5


# case D05
def test_d05_the_state_stays_float32_and_bfloat16_weights_drift_little(trained):
    """2,000 steps of a model in bfloat16, its state in float32 and in bfloat16."""
    model = copy.deepcopy(trained).bfloat16()
    sequence = tokens(2065, seed=8)
    _, state = prefill(trained, [sequence[:65]])
    truth = step_through(trained, state, sequence[65:])
    drift = {}
    for dtype in (torch.float32, torch.bfloat16):
        _, state = prefill(model, [sequence[:65]])
        assert {t.dtype for t in state} == {torch.float32}
        decoder, logits = PlainDecoder(model, state_dtype=dtype), []
        decoder.load(state)
        for token in sequence[65:]:
            logits.append(decoder.step(token[None])[0])
        assert {t.dtype for t in decoder._state} == {dtype}
        error = (torch.stack(logits).float() - truth).norm(dim=-1) / truth.norm(dim=-1)
        assert bool(torch.isfinite(error).all())
        drift[dtype] = float(error[:1000].mean()), float(error[1000:].mean())
    early, late = drift[torch.float32]
    assert late < 2e-2 and late < 1.5 * early, drift
    assert drift[torch.bfloat16][1] < 5e-2, drift


def forgetful(model: Mamba3Transformer, dtype: torch.dtype) -> Mamba3Transformer:
    """The same weights, but decays that remember hundreds of tokens."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for block in model.layers:
            assert isinstance(block, Mamba3Block)
            block.A += torch.linspace(1, 6, len(block.A))
    # Not `.to(dtype)`: the decay is complex and stays so.
    casts = {
        torch.float64: model.double,
        torch.float32: model.float,
        torch.bfloat16: model.bfloat16,
    }
    return casts[dtype]()


def errors_after(trained: Mamba3Transformer, length: int, steps: int) -> dict:
    """Mean relative L2 error of the logits of ``steps`` tokens after so long a prompt."""
    sequence = tokens(length + steps, seed=6)
    logits = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = forgetful(trained, dtype)
        _, state = prefill(model, [sequence[:length]])
        logits[dtype] = step_through(model, state, sequence[length:]).double()
        assert bool(torch.isfinite(logits[dtype]).all())
    truth = logits.pop(torch.float64)
    return {
        dtype: float(((got - truth).norm(dim=-1) / truth.norm(dim=-1)).mean())
        for dtype, got in logits.items()
    }


def test_a_long_prompt_then_steps_stays_right(trained):
    short, long = errors_after(trained, 2000, 200), errors_after(trained, 20_000, 200)
    assert long[torch.float32] < 1e-2
    assert long[torch.bfloat16] < 1.5 * short[torch.bfloat16]


@pytest.mark.campaign
def test_campaign_a_million_tokens_then_1000_steps_stay_right(trained):
    short, long = errors_after(trained, 2000, 1000), errors_after(trained, 2**20, 1000)
    assert long[torch.float32] < 1e-2
    assert long[torch.bfloat16] < 1.5 * short[torch.bfloat16]


def test_mistakes_are_named(trained, tmp_path):
    with pytest.raises(UserError, match="at least one token"):
        generate(trained, [[]], max_new_tokens=1)
    with pytest.raises(UserError, match=f"outside 0 to {VOCAB - 1}"):
        generate(trained, [[VOCAB]], max_new_tokens=1)
    with pytest.raises(UserError, match="is not a folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no checkpoint"):
        load_model(tmp_path)
    with pytest.raises(UserError, match="max_new_tokens must be 0 or more"):
        stream(trained, [[1]], max_new_tokens=-1)
    # Sampling values are judged before anything is computed, for streams as well.
    with pytest.raises(UserError, match="top_p"):
        stream(trained, [[1]], max_new_tokens=1, top_p=0)
    broken = copy.deepcopy(trained)
    with torch.no_grad():
        broken.norm_f.weight[0] = float("nan")
    for how in ({"temperature": 0}, {"top_k": 5}, {"top_p": 0.5}, {"repetition_penalty": 2.0}):
        with pytest.raises(UserError, match="not finite"):
            generate(broken, prompts(5), max_new_tokens=3, **how)

"""Decoding on CUDA: kernels, plans and whole steps against the plain path; graphs and memory."""

import copy
import gc

import pytest
import torch

from mamba3_lite.inference import decode_plans, decode_self_test, decoder
from mamba3_lite.inference.decode_plans import BATCH_PLANS, SMALL_PLAN, VECTOR_PLANS, Plan
from mamba3_lite.inference.decode_staged import ops_for
from mamba3_lite.inference.decode_weights import make_buffers, prepare
from mamba3_lite.inference.decoder import Decoder, PlainDecoder, decoder_for
from mamba3_lite.inference.generate import generate, load_model, prefill, read
from mamba3_lite.models import ssd_triton
from mamba3_lite.models.mamba_block import Mamba3Block
from mamba3_lite.models.transformer import Mamba3Transformer, ModelConfig
from mamba3_lite.training.pretrain import Pretrainer
from tests import decode_checks
from tests.decode_checks import (
    HEADS,
    PRODUCTS,
    STAGED_KERNELS,
    assert_best,
    assert_embed,
    assert_greedy,
    assert_head,
    assert_product,
    assert_ssd_step,
    relative,
)
from tests.runs import config, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ssd_triton.HAS_TRITON, reason="needs Triton"),
]
DEVICE = "cuda"
KINDS = ({"normed": True}, {"add": True}, {"normed": True, "gated": True})
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODEL = {"head_dim": 16, "state_dim": 16, "d_model": 64, "ffn_dim": 96, "chunk_size": 64}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(autouse=True)
def one_cache_for_all(cache, monkeypatch):
    """Not the user's, and not a new one for each test: choosing takes seconds."""
    monkeypatch.setenv("MAMBA3_LITE_CACHE", str(cache))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Mamba3Transformer:
    folder = tmp_path_factory.mktemp("trained")
    settings = config(folder, max_steps=100, lr=5e-3, save_every=100, model=MODEL)
    assert Pretrainer(settings).train() == 0
    return load_model(folder / "run", device=DEVICE)


def plans_for(batch: int, dtype: torch.dtype) -> list[Plan]:
    """Those whose steps are operations."""
    found = decode_plans.candidates(torch.device(DEVICE), dtype, batch)
    return [plan for plan in found if not plan.resident]


def staged_plans(batch: int) -> list[Plan]:
    found = [plan for plan in plans_for(batch, torch.bfloat16) if plan.staged]
    if not found:
        pytest.skip("needs Hopper and the version of Triton that was tried")
    return found


def prompts(*lengths: int) -> list[list[int]]:
    return [tokens(n, seed=n).tolist() for n in lengths]


def step_through(steps: decoder.StepDecoder, state, ids: torch.Tensor) -> torch.Tensor:
    """Logits (T, B, V) after each row of ids (T, B)."""
    steps.load(state)
    return torch.stack([steps.step(row).float().clone() for row in ids.to(DEVICE)])


# Kernels and plans


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind))
def test_products_agree_with_their_twin(dtype, kind):
    for batch in (1, 2, 17, 70):
        for plan in plans_for(batch, dtype)[:2]:
            for shape in PRODUCTS[: 5 if batch == 1 else 3]:
                assert_product(ops_for(plan), batch, shape, dtype, DEVICE, **kind)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind))
@pytest.mark.parametrize("shape", [(1024, 1024), (2048, 1024), (1024, 5136), (192, 72), (512, 33)])
def test_staged_products_agree_with_their_twin(shape, kind):
    for batch in (1, 2, 64, 65, 130):
        for plan in staged_plans(batch):
            for dtype in (torch.bfloat16, torch.float16):
                assert_product(ops_for(plan), batch, shape, dtype, DEVICE, **kind)


# Of the kernels' source, and what the self-test must find wrong first.
STAGED_FAULTS = {
    "no norm": (64, "rsqrt(gl.sum(parts, 1)", "rsqrt(1.0 + 0.0 * gl.sum(parts, 1)", "in_proj"),
    "no gate": (64, "acc = _silu(gate) * up", "acc = gate * up", "gate_up"),
    "no residual": (64, "(acc + before.to", "(acc + 0.0 * before.to", "mixer"),
    "squares of another": (64, "gl.sum(new * new, 1)", "gl.sum(new * new, 1) * 1.1", "gate_up"),
    "scales forgotten": (64, "new * next_scale.to(gl.float32)[None, :]", "new", "gate_up"),
    "a row too far": (1, "program_id(0) * ROWS", "program_id(0) * ROWS + 1", "in_proj"),
    "state not kept": (1, "gl.store(at + N * P", "gl.store(at", "SSD step: state"),
}


# cases A06, A13
@pytest.mark.parametrize("name", STAGED_FAULTS)
def test_the_self_test_finds_a_planted_fault_in_a_staged_kernel_a06_a13(name, tmp_path):
    batch, old, new, first = STAGED_FAULTS[name]
    plan = staged_plans(batch)[0]
    wide = {"d_model": 256, "n_heads": 4, "head_dim": 64, "state_dim": 64, "ffn_dim": 512}
    model = decode_checks.model(DEVICE, torch.bfloat16, **wide)
    weights = prepare(model, torch.bfloat16)
    buffers = make_buffers(model.cfg, batch, torch.bfloat16, torch.float32, torch.device(DEVICE))
    assert decode_self_test.problem(ops_for(plan), weights, buffers) is None
    with decode_checks.planted(tmp_path, old, new, STAGED_KERNELS):
        problem = decode_self_test.problem(ops_for(plan), weights, buffers)
    assert problem is not None and problem.startswith(first)


@pytest.mark.parametrize("sizes", HEADS)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_the_ssd_step_agrees_with_its_twin(state_dtype, sizes):
    for dtype, batch, plan in (
        (torch.float32, 1, SMALL_PLAN), (torch.bfloat16, 3, BATCH_PLANS[-1]),
    ):  # fmt: skip
        assert_ssd_step(ops_for(plan), batch, sizes, dtype, state_dtype, DEVICE)


@pytest.mark.parametrize("sizes", HEADS)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_the_staged_ssd_step_agrees_with_its_twin(state_dtype, sizes):
    for batch in (1, 3):
        for plan in staged_plans(batch):
            assert_ssd_step(ops_for(plan), batch, sizes, torch.bfloat16, state_dtype, DEVICE)


def test_the_best_id_is_the_first_of_the_largest():
    assert_best(ops_for(SMALL_PLAN), DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_head_finds_the_best_ids_with_and_without_logits(dtype):
    for batch in (1, 2, 70):
        for plan in plans_for(batch, dtype)[:2]:
            assert_head(ops_for(plan), batch, dtype, DEVICE)


@pytest.mark.parametrize("batch", [2, 70])
def test_the_embedding_leaves_its_part_for_the_next_norm(batch):
    for plan in (SMALL_PLAN, *staged_plans(batch)):
        assert_embed(ops_for(plan), torch.bfloat16, DEVICE)


@pytest.mark.parametrize("raw_dt", [-20.0, 2.0, 50.0, 1000.0])
def test_any_step_is_finite_and_right(raw_dt):
    for slow in (-1e-4, -0.9):
        for dtype in (torch.float32, torch.bfloat16):
            assert_ssd_step(
                ops_for(SMALL_PLAN), 2, (2, 64, 64), dtype, torch.float32, DEVICE, raw_dt, slow
            )


# case A04
@pytest.mark.parametrize("batch", [1, 2, 64])
def test_every_candidate_is_right_at_the_production_shape_a04(batch):
    torch.manual_seed(0)
    cfg = ModelConfig(n_layers=1, vocab_size=50257)
    model = Mamba3Transformer(cfg).to(DEVICE).bfloat16()
    weights = prepare(model, torch.bfloat16)
    for state_dtype in (torch.float32, torch.bfloat16):
        buffers = make_buffers(cfg, batch, torch.bfloat16, state_dtype, torch.device(DEVICE))
        for plan in plans_for(batch, torch.bfloat16):
            assert decode_self_test.problem(ops_for(plan), weights, buffers) is None, plan


@pytest.mark.parametrize(
    "batch, plan",
    [(1, plan) for plan in VECTOR_PLANS[1:3]] + [(64, plan) for plan in BATCH_PLANS[:3]],
)
def test_overlapping_kernels_change_no_bit(batch, plan):
    """A kernel that read before its predecessor had written would, sooner or later."""
    if plan not in plans_for(batch, torch.bfloat16):
        pytest.skip("this GPU has no kernels that overlap, or no staged ones")
    assert plan.pdl
    torch.manual_seed(0)
    model = Mamba3Transformer(ModelConfig(n_layers=6, vocab_size=5000)).to(DEVICE).bfloat16().eval()
    start = [torch.randn(batch, 16, 128, 64, device=DEVICE) for _ in range(6)]
    ids = torch.randint(0, 5000, (300, batch), generator=torch.Generator().manual_seed(1))
    runs = []
    for each in (plan, plan._replace(pdl=False)):
        fast = Decoder(model, batch, plan=each)
        runs.append([step_through(fast, start, ids), *fast.state()])
    assert all(map(torch.equal, *runs))


# Whole steps


# case D01
@pytest.mark.parametrize("dispatch", ["pytorch", "rotated", "triton", "fused", "auto"])
def test_d01_steps_equal_the_full_forward_for_300_tokens(trained, dispatch, monkeypatch):
    monkeypatch.setenv("ENABLE_TRITON_KERNELS", "1")
    model = copy.deepcopy(trained)
    for block in model.layers:
        assert isinstance(block, Mamba3Block)
        block.ssd_dispatch, block._resolved = dispatch, None
    sequence = tokens(2300, seed=4)
    with torch.no_grad():
        want = model(sequence[None].to(DEVICE))[0]
    gap = -want.topk(2).values.diff().squeeze(-1)
    fast = Decoder(model, 1)
    assert fast._graphs
    for length in (1, 63, 64, 65, 2000):
        logits, state = prefill(model, [sequence[:length]])
        rest = sequence[length : length + 300, None]
        got = torch.cat([logits, step_through(fast, state, rest)[:, 0]])
        truth = want[length - 1 : length + 300]
        assert float((got - truth).abs().max()) < 1e-4, length
        clear = gap[length - 1 : length + 300] > 1e-4
        assert torch.equal(got.argmax(-1)[clear], truth.argmax(-1)[clear]), length


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_greedy_steps_are_those_one_by_one(trained, dtype, batch):
    model = trained if dtype == torch.float32 else copy.deepcopy(trained).bfloat16()
    _, state = prefill(trained, [tokens(40, seed=i) for i in range(batch)])
    ids = torch.arange(batch, device=DEVICE) % trained.cfg.vocab_size
    assert_greedy(Decoder(model, batch), state, ids)


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_decoder_follows_the_plain_path(trained, dtype, batch):
    model = trained if dtype == torch.float32 else copy.deepcopy(trained).bfloat16()
    _, state = prefill(trained, [tokens(40, seed=i) for i in range(batch)])
    ids = torch.stack([tokens(60, seed=100 + i) for i in range(batch)], 1)
    truth = step_through(PlainDecoder(trained), state, ids)
    fast = Decoder(model, batch)
    got = step_through(fast, state, ids)
    assert relative(got, truth) < (1e-5 if dtype == torch.float32 else 2e-2)
    assert fast.buffers.state.dtype == torch.float32


# case D02
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_acc12_d02_mixed_lengths_equal_one_by_one(trained, dtype, side):
    model = trained if dtype == torch.float32 else copy.deepcopy(trained).bfloat16()
    batch = prompts(3, 64, 200, 2000)
    logits, state = prefill(model, batch, padding_side=side)
    assert {t.dtype for t in state} == {torch.float32}
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    for row, prompt in enumerate(batch):
        alone, alone_state = prefill(model, [prompt])
        assert relative(logits[row], alone[0]) < limit
        for got, want in zip(state, alone_state, strict=True):
            assert relative(got[row], want[0]) < limit
    if dtype == torch.float32:
        how = {"max_new_tokens": 40, "temperature": 0}
        assert generate(model, batch, **how) == [generate(model, [p], **how)[0] for p in batch]


# case D01
def test_d01_repeated_calls_are_bitwise_equal(trained):
    model = copy.deepcopy(trained).bfloat16()
    for batch in (prompts(9), prompts(9, 70, 30)):
        runs = []
        for _ in range(3):
            state = read(model, batch)
            with decoder_for(model, len(batch)) as fast:
                assert isinstance(fast, Decoder)
                logits = step_through(
                    fast, state.layers, tokens(50)[:, None].expand(-1, len(batch))
                )
            runs.append([state.logits, *state.layers, logits])
        assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
        for how in ({"temperature": 0}, {"top_k": 9}, {"top_p": 0.9, "repetition_penalty": 1.2}):
            texts = [generate(model, batch, max_new_tokens=60, seed=3, **how) for _ in range(2)]
            assert texts[0] == texts[1]


def test_eos_ends_rows_as_on_a_cpu(trained):
    model = copy.deepcopy(trained).cpu()
    batch = prompts(3, 64)
    free = generate(model, batch, max_new_tokens=30, temperature=0)
    how = {"max_new_tokens": 30, "temperature": 0, "eos_id": free[0][5]}
    assert generate(trained, batch, **how) == generate(model, batch, **how)


# case D05
def test_d05_2000_steps_in_bfloat16_drift_little(trained):
    model = copy.deepcopy(trained).bfloat16()
    sequence = tokens(2065, seed=8)
    _, state = prefill(trained, [sequence[:65]])
    truth = step_through(PlainDecoder(trained), state, sequence[65:, None])[:, 0]
    for state_dtype, limit in ((torch.float32, 2e-2), (torch.bfloat16, 5e-2)):
        fast = Decoder(model, 1, state_dtype=state_dtype)
        got = step_through(fast, state, sequence[65:, None])[:, 0]
        assert fast.buffers.state.dtype == state_dtype
        error = (got - truth).norm(dim=-1) / truth.norm(dim=-1)
        assert float(error[1000:].mean()) < limit, state_dtype


# Graphs, plans, memory


def test_a_choice_is_remembered_and_a_fault_falls_back_in_one_line(trained, monkeypatch, capsys):
    model = copy.deepcopy(trained).bfloat16()
    first = Decoder(model, 5)
    assert "us a step, the best of" in capsys.readouterr().out
    monkeypatch.setattr(decoder, "_microseconds", lambda graph: pytest.fail("timed again"))
    assert Decoder(model, 5).plan == first.plan and capsys.readouterr().out == ""
    monkeypatch.setattr(decode_self_test, "problem", lambda *a: "planted off by 1")
    with decoder_for(model, 5) as steps:
        assert isinstance(steps, PlainDecoder)
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "[decode] plain path: the decoding kernels failed their self-test: planted off by 1."
    ]
    assert len(generate(model, prompts(4), max_new_tokens=3)[0]) == 3


def test_memory_is_constant_from_token_1000_to_token_5000(trained):
    model = copy.deepcopy(trained).bfloat16()
    held = {}

    def watch(ids):
        watch.count += 1
        if watch.count in (1000, 5000):
            gc.collect()
            held[watch.count] = torch.cuda.memory_allocated()

    watch.count = 0
    generate(model, prompts(100), max_new_tokens=5001, top_k=5, on_tokens=watch)
    assert held[1000] == held[5000]


def test_changed_weights_are_seen_and_a_forgotten_model_is_freed(trained):
    model = copy.deepcopy(trained)
    before = generate(model, prompts(9), max_new_tokens=20, temperature=0)
    with torch.no_grad():
        for block in model.layers:
            block.mimo.mix.weight.neg_()
    after = generate(model, prompts(9), max_new_tokens=20, temperature=0)
    with decoder_for(model, 1) as fast:
        state = read(model, prompts(9))
        got = step_through(fast, state.layers, tokens(5)[:, None])
    assert relative(got, step_through(PlainDecoder(model), state.layers, tokens(5)[:, None])) < 1e-5
    assert before != after
    count = len(decoder._idle)
    del model, block
    gc.collect()
    assert len(decoder._idle) == count - 1


@pytest.mark.campaign
def test_campaign_a_million_tokens_then_1000_steps_stay_right(trained):
    errors = {}
    for length in (2000, 2**20):
        sequence, logits = tokens(length + 1000, seed=6), {}
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            model = copy.deepcopy(trained)
            with torch.no_grad():
                for block in model.layers:
                    block.A += torch.linspace(1, 6, len(block.A), device=DEVICE)
            if dtype == torch.float64:
                for block in model.layers:
                    block.ssd_dispatch, block._resolved = "rotated", None
                model = model.double()
            elif dtype == torch.bfloat16:
                model = model.bfloat16()
            torch.cuda.reset_peak_memory_stats()
            _, state = prefill(model, [sequence[:length]])
            with decoder_for(model, 1) as steps:
                logits[dtype] = step_through(steps, state, sequence[length:, None])[:, 0].double()
            assert bool(torch.isfinite(logits[dtype]).all())
        truth = logits.pop(torch.float64)
        errors[length] = {
            dtype: float(((got - truth).norm(dim=-1) / truth.norm(dim=-1)).mean())
            for dtype, got in logits.items()
        }
    assert errors[2**20][torch.float32] < 1e-2
    assert errors[2**20][torch.bfloat16] < 1.5 * errors[2000][torch.bfloat16]


def test_a_model_with_random_decays_and_mixers_is_followed():
    for changes in ({}, {"weight_tying": False}, {"head_dim": 5, "state_dim": 3, "d_model": 20}):
        model = decode_checks.model(DEVICE, **changes)
        for batch in (1, 4):
            _, state = prefill(model, [[3 + i, 5, 8] for i in range(batch)])
            ids = torch.randint(0, 61, (20, batch))
            got = step_through(Decoder(model, batch), state, ids)
            assert relative(got, step_through(PlainDecoder(model), state, ids)) < 1e-5

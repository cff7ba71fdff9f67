"""Whole steps of one sequence by one kernel, on CUDA: against the plain path, and with itself."""

import copy

import pytest
import torch

from mamba3_lite.inference import decode_resident, decode_self_test
from mamba3_lite.inference.decode_plans import VECTOR_PLANS, resident_kernels
from mamba3_lite.inference.decode_resident import SOURCE, Resident
from mamba3_lite.inference.decode_weights import make_buffers, prepare
from mamba3_lite.inference.decoder import Decoder, PlainDecoder
from mamba3_lite.models.transformer import Mamba3Transformer
from tests import decode_checks
from tests.decode_checks import RESIDENT_MODEL, RESIDENT_SHAPES, assert_greedy, relative

DEVICE = torch.device("cuda")
RESIDENT = VECTOR_PLANS[0]


@pytest.fixture(autouse=True)
def needs_the_kernel(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MAMBA3_LITE_CACHE", str(tmp_path_factory.getbasetemp() / "resident"))
    if not resident_kernels(DEVICE):
        pytest.skip("needs Hopper and the bindings to CUDA")


pytestmark = pytest.mark.gpu


def model_of(dtype: torch.dtype = torch.bfloat16, **changes) -> Mamba3Transformer:
    settings = {**RESIDENT_MODEL, **changes}
    model = decode_checks.model("cuda", **settings)
    return model.bfloat16() if dtype == torch.bfloat16 else model


def start_of(model: Mamba3Transformer) -> list[torch.Tensor]:
    cfg, generator = model.cfg, torch.Generator("cuda").manual_seed(1)
    shape = (1, cfg.n_heads, 2 * cfg.state_dim, cfg.head_dim)
    return [torch.randn(shape, generator=generator, device=DEVICE) for _ in model.layers]


def followed(steps, state, count: int, vocabulary: int) -> torch.Tensor:
    ids = torch.randint(vocabulary, (count, 1), generator=torch.Generator().manual_seed(2))
    steps.load(state)
    return torch.stack([steps.step(row).float().clone() for row in ids.to(DEVICE)])


@pytest.mark.parametrize("shape", RESIDENT_SHAPES)
def test_steps_follow_the_plain_path(shape):
    for state_dtype in (torch.float32, torch.bfloat16):
        if shape == "wide state" and state_dtype == torch.bfloat16:
            continue  # refused, see tests/interp/test_decode_aot.py
        model = model_of(**RESIDENT_SHAPES[shape])
        wide = copy.deepcopy(model).float()
        state, count, width = start_of(model), 30, model.cfg.vocab_size
        fast = Decoder(model, 1, plan=RESIDENT, state_dtype=state_dtype)
        decoders = PlainDecoder(wide), fast, PlainDecoder(model, state_dtype=state_dtype)
        logits = [followed(each, state, count, width) for each in decoders]
        states = [torch.stack(each.state()) for each in decoders]
        for truth, got, narrow in (logits, states):
            assert relative(got, truth) < 1.25 * relative(narrow, truth), state_dtype
        assert_greedy(fast, state, torch.tensor([7], device=DEVICE))


def test_a_model_that_is_too_wide_or_odd_is_left_to_the_others():
    model = decode_checks.model("cuda", torch.bfloat16)
    assert not Decoder(model, 1).plan.resident
    assert not Decoder(model_of(torch.float32), 1).plan.resident
    assert not Decoder(model_of(), 2).plan.resident


@pytest.mark.parametrize("rest", [0, 3000])
def test_no_bit_depends_on_when_weights_arrive(rest, monkeypatch):
    """A word taken for another, or a row read too early, would be seen sooner or later."""
    model = model_of(**{**RESIDENT_SHAPES["production"], "n_layers": 6, "vocab_size": 5003})
    state, runs = start_of(model), []
    for clocks in (decode_resident._REST, rest, rest):
        monkeypatch.setattr(decode_resident, "_REST", clocks)
        fast = Decoder(model, 1, plan=RESIDENT)
        runs.append([followed(fast, state, 1000, 5003), *fast.state()])
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))


def test_tags_start_anew_without_being_mistaken():
    model = model_of()
    weights = prepare(model, torch.bfloat16)
    buffers = make_buffers(model.cfg, 1, torch.bfloat16, torch.float32, DEVICE)
    found = []
    # Of 16 bits, so that these steps end before, at and behind the last of them.
    for epoch in (1, 2**16 - 10, 2**32 - 10):
        resident = Resident(weights, buffers)
        resident._epoch.copy_(torch.tensor([epoch]).to(torch.uint32).view(torch.int32))
        buffers.state.zero_()
        buffers.ids.fill_(3)
        rows = []
        for _ in range(4):
            resident.run(8)
            rows.append(buffers.best.clone())
        found.append([torch.cat(rows), buffers.state.clone()])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


FAULTS = {
    "no norm": ("return rsqrtf(", "return 0.9f * rsqrtf("),
    "no scales": ("narrow(v * wide(here.of[i]))", "narrow(v)"),
    "no gate": ("__fdividef(gate, 1.0f + __expf(-gate)) * up", "gate * up"),
    "no residual": ("narrow(residual + sum_of", "narrow(0.0f * residual + sum_of"),
    "a piece forgotten": ("sum += s.part[turn][threadIdx.x % 8][unit + k]",
                          "sum += s.part[turn][threadIdx.x % 8][unit]"),
    "state not kept": ("store_two(state + (N + n) * P + channel, im0, im1)",
                       "store_two(state + (N + n) * P + channel, im.x, im.y)"),
    "another decay": ("whole = x > -0.5f", "whole = x > 0.5f"),
    "the last of equals": ("there < place))", "there > place))"),
}  # fmt: skip


# cases A06, A13
@pytest.mark.parametrize("name", FAULTS)
def test_the_self_test_finds_a_planted_fault_a06_a13(name, tmp_path, monkeypatch):
    old, new = FAULTS[name]
    model = model_of(**RESIDENT_SHAPES["production"])
    with torch.no_grad():
        # So each logit is there twice, and so is the largest.
        half = len(model.lm_head.weight) // 2
        model.lm_head.weight[half : 2 * half] = model.lm_head.weight[:half]
    weights = prepare(model, torch.bfloat16)
    buffers = make_buffers(model.cfg, 1, torch.bfloat16, torch.float32, DEVICE)
    resident = Resident(weights, buffers)
    assert decode_self_test.problem_of_steps(resident, weights, buffers) is None
    text = SOURCE.read_text()
    assert old in text
    planted = tmp_path / "planted.cu"
    planted.write_text(text.replace(old, new))
    monkeypatch.setattr(decode_resident, "SOURCE", planted)
    wrong = Resident(weights, buffers)
    problem = decode_self_test.problem_of_steps(wrong, weights, buffers)
    assert problem is not None


def test_a_compiler_that_is_missing_leaves_the_other_plans(monkeypatch, capsys):
    def missing(*given):
        raise decode_resident.ResidentError("NVRTC: planted")

    monkeypatch.setattr(decode_resident, "_load", missing)
    fast = Decoder(model_of(vocab_size=4999), 1)
    assert not fast.plan.resident
    assert "passed over: NVRTC: planted" in capsys.readouterr().out


def test_the_compiled_kernel_is_kept_and_a_damaged_one_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("MAMBA3_LITE_CACHE", str(tmp_path))
    model = model_of()
    weights = prepare(model, torch.bfloat16)
    buffers = make_buffers(model.cfg, 1, torch.bfloat16, torch.float32, DEVICE)
    decode_resident._load.cache_clear()
    Resident(weights, buffers)
    (kept,) = tmp_path.glob("*.cubin")
    code = kept.read_bytes()
    decode_resident._load.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(decode_resident, "compile_source", lambda *a: pytest.fail("again"))
        Resident(weights, buffers).run(1)
    kept.write_bytes(code[: len(code) // 2])
    decode_resident._load.cache_clear()
    Resident(weights, buffers).run(1)
    torch.cuda.synchronize()
    assert kept.read_bytes() == code

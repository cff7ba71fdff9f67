"""The decoding kernels interpreted: each against its twin, whole steps, planted faults.

As with the other kernels, they need a process of their own: started plainly, this file runs itself
once more with TRITON_INTERPRET=1.
"""

import itertools
from pathlib import Path

import pytest
import torch

from mamba3_lite import env
from mamba3_lite.errors import UserError
from mamba3_lite.inference import decode_self_test
from mamba3_lite.inference.decode_ops import KernelOps
from mamba3_lite.inference.decode_plans import SMALL_PLAN
from mamba3_lite.inference.decode_staged import ops_for
from mamba3_lite.inference.decode_weights import make_buffers, prepare
from mamba3_lite.inference.decoder import Decoder, PlainDecoder, decoder_for
from mamba3_lite.inference.generate import generate, prefill
from mamba3_lite.models import ssd_triton
from tests import decode_checks
from tests.decode_checks import (
    HEADS,
    PRODUCTS,
    assert_best,
    assert_embed,
    assert_greedy,
    assert_head,
    assert_product,
    assert_ssd_step,
    relative,
)
from tests.interp.again import start_again

pytestmark = pytest.mark.skipif(not ssd_triton.HAS_TRITON, reason="needs Triton")
INTERPRETED = ssd_triton.HAS_TRITON and env.read("TRITON_INTERPRET") == "1"
KINDS = ({"normed": True}, {"add": True}, {"normed": True, "gated": True})
# The interpreter multiplies bit patterns of bfloat16. A GPU adds up exact products in float32.
WIDE_PRODUCTS = (
    "tl.dot(a, ", "tl.dot(a.to(tl.float32), ", "w, acc, input", "w.to(tl.float32), acc, input",
    "up, acc_up, input", "up.to(tl.float32), acc_up, input",
)  # fmt: skip

# What is replaced in the kernels' source, and what the self-test must find wrong first.
FAULTS = {
    "another row": ("tl.load(ids + row) * K", "(tl.load(ids + row) + 1) * K", "embed"),
    "3 % in a product": ("result += tl.load", "result = 1.03 * result + tl.load", "mixer"),
    "no norm": ("tl.sum(v * v, 0) / K", "0.0 * tl.sum(v * v, 0) + 1.0", "in_proj"),
    "no gate": ("_silu(result)", "result", "gate_up"),
    "no residual": ("result += tl.load(out", "result += 0.0 * tl.load(out", "mixer"),
    "no phase": ("angle = (", "angle = 0.0 * (", "SSD step"),
    "no decay": ("size = tl.exp(alpha * s)", "size = tl.exp(0.0 * alpha * s)", "SSD step"),
    "a factor too large": ("near_one = _expm1", "near_one = 1.0 + _expm1", "SSD step"),
    "state not kept": ("tl.store(at + N * P", "tl.store(at", "SSD step: state"),
    "C not conjugated": ("- c_im[:, None]", "+ c_im[:, None]", "SSD step: y"),
    "no norm of many": ("v = v * tl.rsqrt(tl.sum(v * v, 0) / K + eps)", "v = v", "in_proj"),
    "another place of many": ("tl.store(places + to, place", "tl.store(places + to, 0", "best"),
}


if INTERPRETED:

    @pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind))
    @pytest.mark.parametrize("shape", PRODUCTS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_a_product_of_one_row_agrees_with_its_twin(dtype, shape, kind):
        for weights in (256, 4096):
            ops = KernelOps(SMALL_PLAN._replace(weights=weights))
            assert_product(ops, 1, shape, dtype, "cpu", **kind)

    @pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind))
    @pytest.mark.parametrize("batch", [2, 17, 70])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_a_product_of_many_rows_agrees_with_its_twin(dtype, batch, kind):
        ops = KernelOps(SMALL_PLAN)
        for shape in PRODUCTS:
            assert_product(ops, batch, shape, dtype, "cpu", **kind)

    @pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind))
    def test_a_product_of_many_rows_in_bfloat16(kind, tmp_path):
        old, new = WIDE_PRODUCTS[::2], WIDE_PRODUCTS[1::2]
        from mamba3_lite.kernels import decode

        source = Path(decode.__file__).read_text(encoding="utf-8")
        wide = source
        for a, b in zip(old, new, strict=True):
            wide = wide.replace(a, b)
        with decode_checks.planted(tmp_path, source, wide):
            for shape in PRODUCTS:
                assert_product(KernelOps(SMALL_PLAN), 5, shape, torch.bfloat16, "cpu", **kind)

    @pytest.mark.parametrize("sizes", HEADS)
    @pytest.mark.parametrize(
        "dtype, state_dtype",
        [
            (torch.float32, torch.float32), (torch.bfloat16, torch.float32),
            (torch.bfloat16, torch.bfloat16),
        ],
    )  # fmt: skip
    def test_the_ssd_step_agrees_with_its_twin(dtype, state_dtype, sizes):
        for batch, tile in ((1, 512), (3, 4096)):
            ops = KernelOps(SMALL_PLAN._replace(state=tile))
            assert_ssd_step(ops, batch, sizes, dtype, state_dtype, "cpu")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_the_embedding_leaves_what_the_next_norm_needs(dtype):
        for staged in (False, True):
            assert_embed(ops_for(SMALL_PLAN._replace(staged=staged)), dtype, "cpu")

    def test_the_best_id_is_the_first_of_the_largest():
        assert_best(KernelOps(SMALL_PLAN), "cpu")

    @pytest.mark.parametrize("batch", [1, 2, 20])
    def test_the_head_finds_the_best_ids_with_and_without_logits(batch):
        assert_head(KernelOps(SMALL_PLAN), batch, torch.float32, "cpu")

    @pytest.mark.parametrize("raw_dt", [-20.0, 2.0, 50.0, 1000.0])
    def test_any_step_is_finite_and_right(raw_dt):
        for slow in (-1e-4, -0.9):
            sizes, precision = (2, 8, 16), torch.float32
            assert_ssd_step(
                KernelOps(SMALL_PLAN), 2, sizes, precision, precision, "cpu", raw_dt, slow
            )

    @pytest.mark.parametrize("batch", [1, 3])
    @pytest.mark.parametrize("tied", [True, False])
    def test_whole_steps_agree_with_the_plain_path(tied, batch):
        model = decode_checks.model("cpu", weight_tying=tied)
        prompts = [[3 + i, 5, 8] for i in range(batch)]
        _, state = prefill(model, prompts)
        plain, fused = PlainDecoder(model), Decoder(model, batch)
        for decoder in (plain, fused):
            decoder.load(state)
        ids = torch.arange(batch)
        for _ in range(8):
            want, got = plain.step(ids), fused.step(ids)
            assert relative(got, want) < 1e-5
            assert torch.equal(got.argmax(-1), want.argmax(-1))
            ids = want.argmax(-1)
        for ours, theirs in zip(fused.state(), plain.state(), strict=True):
            assert ours.dtype == torch.float32 and relative(ours, theirs) < 1e-5

    @pytest.mark.parametrize("batch", [1, 3])
    def test_several_greedy_steps_are_those_one_by_one(batch):
        model = decode_checks.model("cpu")
        _, state = prefill(model, [[3 + i, 5, 8] for i in range(batch)])
        assert_greedy(Decoder(model, batch), state, torch.arange(batch))

    # case D05
    def test_a_state_in_bfloat16_drifts_and_one_in_float32_does_not_d05():
        model = decode_checks.model("cpu")
        errors = {}
        for dtype in (torch.float32, torch.bfloat16):
            decoder, truth = Decoder(model, 1, state_dtype=dtype), PlainDecoder(model)
            _, state = prefill(model, [[1, 2, 3]])
            decoder.load(state)
            truth.load(state)
            for token in range(20):
                ids = torch.tensor([token])
                error = relative(decoder.step(ids), truth.step(ids))
            errors[dtype] = error
        assert errors[torch.float32] < 1e-5 < 1e-4 < errors[torch.bfloat16] < 2e-2

    # case D01
    def test_generation_takes_the_kernels_and_repeats_bit_for_bit_d01(monkeypatch):
        model = decode_checks.model("cpu")
        with decoder_for(model, 2) as first, decoder_for(model, 2) as second:
            assert isinstance(first, Decoder) and second is not first
        with decoder_for(model, 2) as again:
            assert again is first or again is second
        runs = []
        step = Decoder.step

        def kept(self, ids):
            logits = step(self, ids)
            runs[-1].append(logits.clone())
            return logits

        monkeypatch.setattr(Decoder, "step", kept)
        texts = []
        for _ in range(2):
            runs.append([])
            texts.append(generate(model, [[1, 2], [3]], max_new_tokens=6, top_k=5, seed=3))
        assert texts[0] == texts[1] and len(runs[0]) == 5
        assert all(map(torch.equal, *runs))

    def test_changed_weights_are_seen():
        model = decode_checks.model("cpu")
        with decoder_for(model, 1) as first:
            pass
        with torch.no_grad():
            model.layers[0].mimo.mix.weight.mul_(2)
        with decoder_for(model, 1) as second:
            assert second is not first
            mixer = second.weights.layers[0].mixer
        assert relative(mixer, 2 * first.weights.layers[0].mixer) < 1e-6

    def test_prepared_weights_are_shared_where_they_can_be():
        model = decode_checks.model("cpu")
        weights = prepare(model, torch.float32)
        assert weights.head is weights.embed
        assert weights.embed.data_ptr() == model.embed.weight.data_ptr()
        block, layer = model.layers[0], weights.layers[0]
        y = torch.randn(4, 32)
        want = block.out_proj(block.mimo(y)).detach()
        assert relative(y @ layer.mixer.T, want) < 1e-6

    # cases A06, A13
    @pytest.mark.parametrize("name", FAULTS)
    def test_the_self_test_finds_a_planted_fault_a06_a13(name, tmp_path, capsys, monkeypatch):
        old, new, first = FAULTS[name]
        model = decode_checks.model("cpu")
        with decode_checks.planted(tmp_path, old, new):
            weights = prepare(model, torch.float32)
            batch = 2 if "many" in name else 1
            buffers = make_buffers(
                model.cfg, batch, torch.float32, torch.float32, torch.device("cpu")
            )
            problem = decode_self_test.problem(KernelOps(SMALL_PLAN), weights, buffers)
            assert problem is not None and problem.startswith(first), problem
            with pytest.raises(UserError, match="self-test"):
                Decoder(model, batch, plan=SMALL_PLAN)
            with decoder_for(model, batch) as decoder:
                assert isinstance(decoder, PlainDecoder)

    def test_every_kernel_passes_its_self_test():
        for batch, dtype, state in itertools.product(
            (1, 2), (torch.float32,), (torch.float32, torch.bfloat16)
        ):
            model = decode_checks.model("cpu", vocab_size=600)
            weights = prepare(model, dtype)
            buffers = make_buffers(model.cfg, batch, dtype, state, torch.device("cpu"))
            assert decode_self_test.problem(KernelOps(SMALL_PLAN), weights, buffers) is None

else:

    def test_every_check_passes_under_the_interpreter():
        assert start_again(__file__) > 90

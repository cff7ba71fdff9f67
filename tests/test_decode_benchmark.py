"""What of the decoding benchmark a machine without a GPU can check."""

import json
import sys
from pathlib import Path

import pytest
import torch

from mamba3_lite.inference.decode_plans import (
    BATCH_PLANS,
    SMALL_PLAN,
    VECTOR_PLANS,
    candidates,
    remember,
    remembered,
)
from mamba3_lite.inference.decoder import PlainDecoder
from mamba3_lite.models.transformer import Mamba3Transformer, ModelConfig
from tests.runs import MODEL

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import decode


@pytest.fixture(scope="module")
def model() -> Mamba3Transformer:
    torch.manual_seed(0)
    return Mamba3Transformer(MODEL).eval()


def test_the_floor_is_the_arithmetic_of_the_design():
    cfg = ModelConfig()
    assert decode.floor_us(cfg, 1, "NVIDIA H200") == pytest.approx(187, abs=0.6)
    assert decode.floor_us(cfg, 64, "NVIDIA H200") == pytest.approx(572, abs=0.6)
    assert decode.floor_us(cfg, 1, "Abacus 3000") is None


def test_red_parity_ends_the_run_and_green_parity_says_how_far(model):
    same = decode.parity_or_exit(model, model, PlainDecoder(model), 3)
    assert same == {"decoder": 0.0, "plain_path": 0.0}
    narrow = Mamba3Transformer(MODEL).eval()
    narrow.load_state_dict(model.state_dict())
    narrow = narrow.bfloat16()
    found = decode.parity_or_exit(model, narrow, PlainDecoder(narrow), 1)
    assert 1e-4 < found["decoder"] == found["plain_path"] < 5e-2
    with torch.no_grad():
        narrow.norm_f.weight.mul_(1.03)
    wrong = PlainDecoder(narrow)
    right = Mamba3Transformer(MODEL).eval()
    right.load_state_dict(model.state_dict())
    with pytest.raises(SystemExit, match="parity failed at batch 1 .*: nothing is timed"):
        decode.parity_or_exit(model, right.bfloat16(), wrong, 1)


def test_speed_and_first_token_are_measured_on_the_loop_users_run(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    speeds = decode.tokens_per_sec(model, 2, 6, 3)
    assert len(speeds) == 3 and speeds == sorted(speeds) and speeds[0] > 0
    times = decode.first_token_ms(model, 50, 2)
    assert len(times) == 2 and times[0] > 0


def test_no_gpu_no_row(tmp_path, monkeypatch):
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["decode.py", "--out", str(out)])
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        decode.main()
    assert not out.exists()


def test_a_peers_lines_are_kept_and_its_failure_ends_the_run(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text("print('context 2048: 900 tok/s')")
    row = decode.run_peer(str(script))
    assert row["printed"] == ["context 2048: 900 tok/s"] and row["script"] == "peer.py"
    assert json.dumps(row)
    script.write_text("import a_module_that_is_not_there")
    with pytest.raises(SystemExit, match="a_module_that_is_not_there"):
        decode.run_peer(str(script))


# The launch plans


def test_older_gpus_and_float32_get_plans_that_suit_them(monkeypatch):
    device = torch.device("cuda")
    for capability in ((8, 0), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d, c=capability: c)
        for batch, dtype in ((1, torch.bfloat16), (64, torch.bfloat16), (64, torch.float32)):
            plans = candidates(device, dtype, batch)
            assert plans and len(set(plans)) == len(plans) and plans[-1] == SMALL_PLAN
            assert any(plan.pdl for plan in plans) is (capability == (9, 0))
    assert candidates(torch.device("cpu"), torch.float32, 1) == [SMALL_PLAN]


def test_a_choice_is_kept_and_anything_else_in_the_file_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("MAMBA3_LITE_CACHE", str(tmp_path / "new"))
    plans = [*VECTOR_PLANS, *BATCH_PLANS]
    assert remembered("a", plans) is None
    remember("a", plans[2])
    remember("b", plans[-1])
    assert remembered("a", plans) == plans[2] and remembered("b", plans) == plans[-1]
    assert remembered("b", list(VECTOR_PLANS)) is None, "no longer on offer"
    file = tmp_path / "new" / "decode_plans.json"
    for damage in ("", "[]", '{"a": 5}', '{"a": [1, 2]}'):
        file.write_text(damage)
        assert remembered("a", plans) is None
    monkeypatch.setenv("MAMBA3_LITE_CACHE", str(file / "below"))
    remember("a", plans[0])
    assert remembered("a", plans) is None

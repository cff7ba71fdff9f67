"""CUDA graphs of whole micro-steps: the same training, with one launch."""

import pytest
import torch

from mamba3_lite.models import ssd_triton
from mamba3_lite.training import losses, passes
from mamba3_lite.training.pretrain import Pretrainer
from tests import runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ssd_triton.HAS_TRITON, reason="needs Triton"),
]
MODEL = {
    "d_model": 128, "n_layers": 3, "n_heads": 4, "head_dim": 32, "state_dim": 32, "ffn_dim": 256,
    "chunk_size": 64, "ssd_dispatch": "fused",
}  # fmt: skip


def trained(folder, mode: str, **changes) -> tuple[list, dict[str, torch.Tensor]]:
    folder.mkdir()
    if "eval_interval" in changes:
        changes["val_data_path"] = runs.write_tokens(folder / "val.bin", 400, seed=1)
    settings = runs.config(
        folder, max_steps=8, compile_model=True, compile_mode=mode, model=MODEL, log_every=1,
        **changes,
    )  # fmt: skip
    assert Pretrainer(settings).train() == 0
    return runs.losses(folder / "run"), runs.final_weights(folder / "run")


@pytest.mark.parametrize("changes", [
    {"gradient_accumulation_steps": 1}, {"gradient_accumulation_steps": 3},
    {"gradient_accumulation_steps": 2, "eval_interval": 3, "save_every": 4},
])  # fmt: skip
def test_recorded_training_is_the_plain_one(tmp_path, changes, capsys):
    want, weights = trained(tmp_path / "plain", "default", **changes)
    got, got_weights = trained(tmp_path / "recorded", "reduce-overhead", **changes)
    assert "recorded as CUDA graphs" in capsys.readouterr().out
    for ours, theirs in zip(got, want, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    for name, weight in weights.items():
        error = float((got_weights[name] - weight).abs().max())
        assert error <= 1e-4 * float(weight.abs().max()) + 1e-6, name


def test_what_waits_for_the_device_runs_plainly(tmp_path, monkeypatch, capsys):
    def reads(*operands, **how):
        loss_sum, count = losses.next_token_loss(*operands, **how)
        assert float(loss_sum) > 0
        return loss_sum, count

    monkeypatch.setattr(passes, "next_token_loss", reads)
    want, weights = trained(tmp_path / "plain", "default")
    got, got_weights = trained(tmp_path / "recorded", "reduce-overhead")
    assert "[warn] micro-steps are not recorded, and run plainly" in capsys.readouterr().out
    assert got == want
    assert all(torch.equal(got_weights[name], weight) for name, weight in weights.items())


def test_a_recorded_run_is_the_same_twice(tmp_path):
    first, weights = trained(tmp_path / "one", "reduce-overhead")
    second, again = trained(tmp_path / "two", "reduce-overhead")
    assert first == second
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())

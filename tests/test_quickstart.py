"""The quickstart on the real corpus, cut short: interrupted, gone on, measured, drawn, sampled."""

import json

import pytest
import torch

from mamba3_lite import cli, quickstart
from mamba3_lite.data.dataset import PretrainDataset
from mamba3_lite.training.stop import EXIT_OUT_OF_TIME
from mamba3_lite.utils.logging import read_metrics

SMALL = (
    "training.total_steps=6", "training.warmup_steps=2", "training.eval_interval=3",
    "training.eval_batches=1", "training.save_interval=2", "training.log_interval=1",
    "training.micro_batch_size=2", "model.d_model=32", "model.n_heads=2", "model.n_layers=1",
    "model.ffn_dim=32",
)  # fmt: skip


def run(folder, *overrides: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["quickstart", "--run-dir", str(folder), *SMALL, *overrides])
    return int(end.value.code or 0)


def test_quickstart_from_corpus_to_sample(tmp_path, capsys, monkeypatch):
    # The whole library takes a minute to tokenise on a busy core; every fortieth document is real
    # text too.
    everything = list(quickstart.documents())
    assert len(everything) > 500 and sum(len(t.encode()) for _, t in everything) > 8e6
    assert any(name.startswith("help(") for name, _ in everything)
    monkeypatch.setattr(quickstart, "documents", lambda: iter(everything[::40]))
    monkeypatch.setattr(quickstart, "VAL_FRACTION", 0.4)
    assert run(tmp_path / "q", "training.max_time_sec=1e-6") == EXIT_OUT_OF_TIME
    assert "run the same command again" in capsys.readouterr().out
    assert run(tmp_path / "q") == 0
    said = capsys.readouterr().out
    assert "resumed from" in said and "a sample, one recurrent step a token" in said
    assert "next: mamba3-lite generate" in said
    result = json.loads((tmp_path / "q" / "quickstart.json").read_text())
    rows = [r for r in read_metrics(tmp_path / "q" / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["opt_step"] for r in rows] == [1, 2, 3, 4, 5, 6]
    assert f"{result['val_loss']:.3f} nat" in said
    assert (tmp_path / "q" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert run(tmp_path / "q") == 0, "a finished run reports again"


def test_unigram_entropy_is_that_of_the_targets(tmp_path):
    tokens = torch.tensor([0, 1, 1, 2, 2, 2, 2, 9, 9])
    torch.save(tokens, tmp_path / "t.bin")
    dataset = PretrainDataset(tmp_path / "t.bin", 8, 10)
    share = torch.tensor([2, 4, 2]) / 8
    assert quickstart.unigram_entropy(dataset) == pytest.approx(float(-(share * share.log()).sum()))

"""The command bench on a GPU: everything is timed on the device, behind the parity of its path."""

import json
from pathlib import Path

import pytest

from mamba3_lite import cli
from mamba3_lite.measure import bench

pytestmark = pytest.mark.gpu
SMALL = [
    "model.vocab_size=997", "model.d_model=128", "model.n_layers=2", "model.n_heads=2",
    "model.head_dim=64", "model.state_dim=64", "model.ffn_dim=128", "model.max_seq_len=256",
    "training.micro_batch_size=2", "training.compile=false",
]  # fmt: skip


def test_everything_is_timed_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "REPEAT_MS", 5.0)
    path = tmp_path / "rows.jsonl"
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", *SMALL, "--repeats", "2", "--out", str(path)])
    assert stop.value.code == 0
    rows = {row["case"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert len(rows) == 8 and "decode, token, batch 64" in rows
    assert all(row["min_ms"] > 0 for row in rows.values())
    # The operator's inputs, float32 or narrower, and the step's weights with two moments.
    assert rows["operator, forward"]["peak_mem_gib"] > 2 * 2 * 256 * 642 * 2 / 2**30
    weights = 4 * (997 * 128 + 2 * (642 * 128 + 128 * 128 + 3 * 128 * 128))
    assert rows["step"]["peak_mem_gib"] > 3 * weights / 2**30
    assert set(rows["step"]["parity_relative_l2"]) <= {"float32", "bfloat16"}
    assert rows["loader"]["settings"]["pin_memory"] and "tok/s" in capsys.readouterr().out

"""Loss curves that a change which computes nothing new must reproduce.

Recorded by ``python tests/test_golden.py`` and compared to 1e-4 across machines and torch versions;
on one machine two runs agree bit for bit.
"""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mamba3_lite.training.pretrain import Pretrainer
from tests.runs import config, losses

GOLDEN = Path(__file__).parent / "golden" / "loss_curves.json"
RUNS = {
    "rotated_shuffled_accumulation": {},
    "pytorch_sequential_checkpointed": {
        "model": {"ssd_dispatch": "pytorch", "n_heads": 1, "weight_tying": False},
        "data_order": "sequential",
        "gradient_accumulation_steps": 1,
        "grad_checkpoint": True,
        "lr": 1e-2,
        "max_grad_norm": 0.25,
        "seed": 7,
    },
}


def curve(folder: Path, name: str) -> list[float]:
    """Loss of every micro-step of a named run."""
    assert Pretrainer(config(folder, **{k: _copy(v) for k, v in RUNS[name].items()})).train() == 0
    return [loss for _, loss, _ in losses(folder / "run")]


def _copy(value):
    return dict(value) if isinstance(value, dict) else value


@pytest.mark.parametrize("name", RUNS)
def test_golden_loss_curve(name, tmp_path):
    want = json.loads(GOLDEN.read_text())[name]
    runs = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        runs.append(curve(folder, name))
    assert runs[0] == runs[1]
    assert len(want) >= 12 and want[-1] < want[0] - 0.1
    assert runs[0] == pytest.approx(want, abs=1e-4)


if __name__ == "__main__":
    import tempfile

    curves = {}
    for run in RUNS:
        with tempfile.TemporaryDirectory() as scratch:
            curves[run] = [round(loss, 7) for loss in curve(Path(scratch), run)]
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(curves, indent=1) + "\n")

"""Eight end-to-end checks on a CUDA machine with Triton: ``python tests/e2e_gpu_smoke.py``.

Prints one line a check with PASS or FAIL and its seconds; exits with 1 if any check failed.
"""

import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mamba3_lite.data.dataset import PretrainDataset  # noqa: E402
from mamba3_lite.models import ssd_triton  # noqa: E402
from mamba3_lite.models.transformer import Mamba3Transformer  # noqa: E402
from mamba3_lite.training.optim import build_optimizer, load_optimizer  # noqa: E402
from mamba3_lite.training.pretrain import Pretrainer, TrainingConfig, train_step  # noqa: E402
from mamba3_lite.training.schedule import build_schedule  # noqa: E402
from mamba3_lite.utils.checkpoint import CheckpointManager  # noqa: E402
from mamba3_lite.utils.weights import load_weights  # noqa: E402

DEVICE = torch.device("cuda")
# Heads as in production; everything else small. 160 tokens are two and a half chunks.
SHAPE = {
    "d_model": 128, "n_layers": 2, "n_heads": 2, "head_dim": 64, "state_dim": 64, "chunk_size": 64,
    "ffn_dim": 128,
}  # fmt: skip
VOCAB_SIZE, SEQ_LEN, BATCH_SIZE = 512, 160, 2


def _build_synthetic_shard(
    path: Path, *, n_tokens: int = 20_000, vocab_size: int = VOCAB_SIZE
) -> Path:
    """Writes ``path``/shard_00000.bin, a ``torch.save``d int64 tensor of random ids; returns it."""
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (n_tokens,), dtype=torch.int64, generator=generator)
    torch.save(tokens, path / "shard_00000.bin")
    return path / "shard_00000.bin"


def _config(folder: Path, dispatch: str) -> TrainingConfig:
    return TrainingConfig(
        model_config=SHAPE | {"ssd_dispatch": dispatch},
        data_path=str(folder / "data"),
        checkpoint_dir=str(folder / "run"),
        vocab_size=VOCAB_SIZE,
        max_seq_len=SEQ_LEN,
        batch_size=BATCH_SIZE,
        max_steps=100,
        warmup_steps=1,
        lr=1e-3,
        compile_model=False,
        tensorboard=False,
    )


def _model(dispatch: str) -> Mamba3Transformer:
    torch.manual_seed(0)
    shape = SHAPE | {"vocab_size": VOCAB_SIZE, "ssd_dispatch": dispatch}
    return Mamba3Transformer(shape).to(DEVICE)


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB_SIZE, (BATCH_SIZE, SEQ_LEN + 1), generator=generator).to(DEVICE)
    return ids[:, :-1], ids[:, 1:]


def _amp():
    return torch.autocast("cuda", torch.bfloat16) if DEVICE.type == "cuda" else nullcontext()


def _forward_backward(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and the gradient of every parameter, after checking that all of it is finite."""
    tokens, targets = _batch()
    logits = model(tokens)
    assert logits.shape == (BATCH_SIZE, SEQ_LEN, VOCAB_SIZE), logits.shape
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    loss.backward()
    initial = float(loss.detach())
    assert abs(initial - math.log(VOCAB_SIZE)) < 0.5, f"initial loss {initial}"
    grads = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.isfinite().all(), f"the gradient of {name} is not finite"
        grads[name] = parameter.grad
    return logits.detach(), grads


def _relative_error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def check_environment(folder: Path) -> str:
    """The kernel is available for the production shape on this device."""
    import triton

    reason = ssd_triton.refuse(head_dim=64, state_dim=64, chunk_size=64, device=DEVICE)
    assert reason is None, reason
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    assert capability >= (8, 0), f"{name} is older than an A100"
    assert float((torch.ones(8, device=DEVICE) * 2).sum()) == 16.0
    return f"{name}, torch {torch.__version__}, triton {triton.__version__}"


def check_data_pipeline(folder: Path) -> str:
    """A synthetic shard comes back as shifted windows that overlap by one token."""
    tokens = torch.load(_build_synthetic_shard(folder / "data"), weights_only=True)
    dataset = PretrainDataset(str(folder / "data"), SEQ_LEN, VOCAB_SIZE)
    assert len(dataset) == (len(tokens) - 1) // SEQ_LEN, len(dataset)
    for index in (0, 1, len(dataset) - 1):
        start = index * SEQ_LEN
        x, y = dataset[index]
        assert torch.equal(x, tokens[start : start + SEQ_LEN])
        assert torch.equal(y, tokens[start + 1 : start + SEQ_LEN + 1])
    return f"{len(dataset)} windows of {SEQ_LEN} tokens"


def check_pytorch_model(folder: Path) -> str:
    """Forward and backward without the kernel."""
    before = ssd_triton.launch_count()
    _, grads = _forward_backward(_model("pytorch"))
    assert ssd_triton.launch_count() == before, "the PyTorch path launched the Triton kernel"
    return f"{len(grads)} finite gradients"


def check_triton_model(folder: Path) -> str:
    """Forward and backward with the kernel, once in every layer."""
    before = ssd_triton.launch_count()
    _, grads = _forward_backward(_model("triton"))
    launches = ssd_triton.launch_count() - before
    assert launches == SHAPE["n_layers"], f"{launches} kernel launches"
    return f"{len(grads)} finite gradients, {launches} kernel launches"


def check_triton_equals_pytorch(folder: Path) -> str:
    """Same weights, same batch, float32: outputs and every gradient agree."""
    want_y, want = _forward_backward(_model("pytorch"))
    before = ssd_triton.launch_count()
    got_y, got = _forward_backward(_model("triton"))
    assert ssd_triton.launch_count() > before, "the Triton path fell back"
    output_error = _relative_error(got_y, want_y)
    errors = {name: _relative_error(got[name], want[name]) for name in want}
    worst = max(errors, key=errors.__getitem__)
    assert output_error < 1e-5, f"outputs differ by {output_error:.1e}"
    assert errors[worst] < 1e-4, f"gradients of {worst} differ by {errors[worst]:.1e}"
    return f"outputs {output_error:.1e}, gradients {errors[worst]:.1e} ({worst})"


def _train(model: nn.Module, config: TrainingConfig, micro_steps: int):
    """Trains on one batch; returns the optimizer, the losses and the optimizer steps taken."""
    optimizer = build_optimizer(model, config)
    scheduler = build_schedule(optimizer, config)
    tokens, targets = _batch()
    opt_steps, losses = 0, []
    for micro_step in range(micro_steps):
        metrics, opt_steps = train_step(
            model, optimizer, scheduler, config, _amp(), print, opt_steps, tokens, targets,
            micro_step,
        )  # fmt: skip
        assert metrics is not None, f"micro_step {micro_step} was dropped"
        losses.append(float(metrics["loss"]))
    return optimizer, losses, opt_steps


def check_training_step(folder: Path) -> str:
    """Ten optimizer steps on one batch, two micro-steps each, lower its loss."""
    _, losses, opt_steps = _train(_model("triton"), _config(folder, "triton"), 20)
    assert opt_steps == 10, opt_steps
    assert losses[-1] < losses[0] - 0.1, losses
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"


def check_pretrainer_dry_run(folder: Path) -> str:
    """The whole trainer with Triton dispatch; the run folder stays untouched."""
    _build_synthetic_shard(folder / "data")
    before = ssd_triton.launch_count()
    with _environment("ENABLE_TRITON_KERNELS", "1"):
        code = Pretrainer(_config(folder, "triton"), dry_run=True).train()
    assert code == 0, f"exit code {code}"
    launches = ssd_triton.launch_count() - before
    assert launches > 0, "the dry run did not reach the kernel"
    assert not (folder / "run").exists(), "the dry run wrote to the run folder"
    return f"{launches} kernel launches"


def check_checkpoint_round_trip(folder: Path) -> str:
    """Weights, moments and metadata come back bit for bit, and so does the next output."""
    config = _config(folder, "triton")
    model = _model("triton")
    optimizer, _, opt_steps = _train(model, config, 2)
    saved = CheckpointManager(folder / "run")
    saved.save(
        opt_steps, model.state_dict(), {"optimizer": optimizer.state_dict()}, {"note": "e2e"}
    )

    loaded = CheckpointManager(folder / "run").load(None)
    assert loaded is not None and loaded.opt_step == opt_steps and loaded.meta["note"] == "e2e"
    fresh = _model("triton")
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.add_(1.0)
    load_weights(fresh, loaded.model)
    fresh_optimizer = build_optimizer(fresh, config)
    load_optimizer(fresh_optimizer, loaded.training["optimizer"], config)
    for (name, want), got in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(got, want), name
    moments = zip(optimizer.state.values(), fresh_optimizer.state.values(), strict=True)
    for want_state, got_state in moments:
        for moment in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(got_state[moment], want_state[moment]), moment
    tokens, _ = _batch()
    with torch.no_grad():
        assert torch.equal(model(tokens), fresh(tokens)), "outputs differ after the round trip"
    return f"opt_step {opt_steps}, {len(loaded.model)} tensors"


CHECKS: list[tuple[str, Callable[[Path], str]]] = [
    ("environment", check_environment),
    ("data pipeline", check_data_pipeline),
    ("PyTorch model forward and backward", check_pytorch_model),
    ("Triton model forward and backward", check_triton_model),
    ("Triton against PyTorch", check_triton_equals_pytorch),
    ("training step", check_training_step),
    ("Pretrainer dry run with Triton dispatch", check_pretrainer_dry_run),
    ("checkpoint round trip", check_checkpoint_round_trip),
]


def run_check(number: int) -> bool:
    """Runs one check of CHECKS (1-based) in a folder of its own and prints its line."""
    name, check = CHECKS[number - 1]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            detail, passed = check(Path(folder)), True
        # A failed check must not hide the result of the next one; its traceback is printed whole.
        except Exception:
            traceback.print_exc()
            detail, passed = "see the traceback above", False
    seconds = time.perf_counter() - start
    verdict = "PASS" if passed else "FAIL"
    print(f"[{number}/{len(CHECKS)}] {verdict} {name} ({seconds:.1f} s): {detail}", flush=True)
    return passed


def main() -> int:
    """All checks; returns the exit code."""
    if not torch.cuda.is_available():
        sys.exit(f"e2e_gpu_smoke needs a CUDA device; torch {torch.__version__} sees none.")
    if not ssd_triton.HAS_TRITON:
        sys.exit("e2e_gpu_smoke needs Triton; install the build that belongs to this torch.")
    results = [run_check(number) for number in range(1, len(CHECKS) + 1)]
    print(f"{sum(results)} of {len(results)} checks passed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Document mode from the file to the weights: packed documents train as if each stood alone."""

import contextlib
import dataclasses
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mamba3_lite.data.dataset import PretrainDataset
from mamba3_lite.data.loader import SampleOrder, make_loader
from mamba3_lite.data.shards import ShardWriter
from mamba3_lite.data.tokenizer import GPT2_SHA256
from mamba3_lite.distributed.world import World
from mamba3_lite.errors import UserError
from mamba3_lite.models.ssd_backends import BACKENDS, Shape
from mamba3_lite.models.transformer import Mamba3Transformer
from mamba3_lite.training.config import TrainingConfig, check_resume, load_training_config
from mamba3_lite.training.losses import next_token_loss
from mamba3_lite.training.pretrain import Pretrainer
from mamba3_lite.training.step import train_step
from mamba3_lite.training.validation import evaluate
from tests import runs

VOCAB, EOS = runs.VOCAB, runs.VOCAB - 1
# Case A10's documents, each with its EOS: borders before, at and after the end of a chunk of 64.
LENGTHS = [1, 63, 64, 65, 130]
MODEL = {
    "vocab_size": VOCAB, "d_model": 16, "n_layers": 2, "n_heads": 2, "head_dim": 8, "state_dim": 8,
    "ffn_dim": 32, "chunk_size": 64, "init_std": 0.2,
}  # fmt: skip
CPU = torch.device("cpu")
# Without Triton and in float64 too; the kernels are in tests/interp and tests/gpu.
PATHS = ["pytorch", "rotated"]
# Relative L2; what multiplies in tf32 keeps three digits.
FLOAT64_LIMIT, FLOAT32_LIMIT, TF32_LIMIT = 1e-11, 1e-5, 2e-3


def texts(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    """Documents with their EOS at the end."""
    rng = np.random.default_rng(seed)
    return [np.append(rng.integers(0, EOS, n - 1), EOS) for n in lengths]


def pack(folder: Path, documents: list[np.ndarray], *, indexed: bool = True) -> Path:
    """Our shards, smaller than a window; without an index EOS tells the documents apart."""
    with ShardWriter(
        folder, vocab_size=VOCAB, eos_id=EOS, tokenizer_name="gpt2",
        tokenizer_fingerprint=GPT2_SHA256, shard_size_tokens=50,
        source_names=["only"] if indexed else None,
    ) as out:  # fmt: skip
        lengths = [len(d) for d in documents]
        if indexed:
            out.append_documents(np.concatenate(documents), lengths, [0] * len(lengths))
        else:
            out.append(np.concatenate(documents), documents=len(documents))
    return folder


def first_batch(data: PretrainDataset, device: torch.device = CPU) -> list[Tensor]:
    """The only window, as the trainer gets it."""
    batch = next(make_loader(data, SampleOrder(len(data)), start_sample=0, batch_size=1))
    return [t.to(device) for t in batch]


def refusal(path: str, device: torch.device) -> str | None:
    """Why a backend cannot run the model of these tests there."""
    shape = Shape(MODEL["head_dim"], MODEL["state_dim"], MODEL["chunk_size"], device)
    return BACKENDS[path].refuse(shape)


def build(path: str, dtype: torch.dtype, device: torch.device = CPU) -> Mamba3Transformer:
    # Where it is refused, "triton" would fall back to another path.
    assert refusal(path, device) is None
    torch.manual_seed(0)
    model = Mamba3Transformer({**MODEL, "ssd_dispatch": path})
    with torch.no_grad():
        for layer in model.layers:
            layer.A.copy_(torch.tensor([-0.02 + 0.5j, -1e-4 + 0.1j]))  # type: ignore[operator]
    return (model.double() if dtype == torch.float64 else model).to(device)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert len(found) == len(list(model.parameters()))
    return found


def distance(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def assert_packed_documents_train_as_if_alone(
    path: str,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    *,
    indexed: bool = True,
) -> None:
    """Case A10 for one SSD path: logits, loss and every gradient."""
    limit = FLOAT64_LIMIT if dtype == torch.float64 else FLOAT32_LIMIT
    if path == "fused":
        limit = TF32_LIMIT
    documents = texts(LENGTHS)
    data = PretrainDataset(
        pack(folder / "packed", documents, indexed=indexed), sum(LENGTHS) - 1, VOCAB,
        document_mode=True, mask_boundary_targets=True,
    )  # fmt: skip
    x, y, segments = first_batch(data, device)
    assert int(segments.max()) == len(LENGTHS) - 1
    model = build(path, dtype, device)

    packed_logits = model(x, segment_ids=segments)[0].detach()
    packed_loss, packed_count = next_token_loss(model, x, y, segment_ids=segments)
    packed_loss.backward()
    packed = gradients(model)

    alone_logits, alone_loss, alone_count = [], 0.0, 0
    for document in documents:
        ids = torch.from_numpy(document)[None].to(device)
        alone_logits.append(model(ids)[0].detach())
        if ids.shape[1] > 1:
            # case C07: labels are the inputs shifted by exactly one
            loss, count = next_token_loss(model, ids[:, :-1], ids[:, 1:])
            loss.backward()
            alone_loss, alone_count = alone_loss + loss.item(), alone_count + int(count)
    alone = gradients(model)

    # The packed window leaves out the last EOS, which is only a target.
    assert distance(packed_logits, torch.cat(alone_logits)[:-1]) < limit
    assert int(packed_count) == alone_count == sum(LENGTHS) - len(LENGTHS)
    assert packed_loss.item() == pytest.approx(alone_loss, rel=limit)
    for name, want in alone.items():
        # A stays complex64 in a float64 model.
        assert distance(packed[name], want) < (max(limit, 1e-6) if want.is_complex() else limit), (
            name
        )

    # The same without segment ids is another function: the comparison could have failed.
    leaking = model(x)[0].detach()
    assert distance(leaking, packed_logits) > 0.1


def assert_an_edit_stays_in_its_document(
    path: str, folder: Path, device: torch.device = CPU
) -> None:
    """Case A10 once more: bit for bit, whatever the document before says.

    The phase of "fused" runs on through documents: there the last bits may differ.
    """
    model = build(path, torch.float32, device)
    logits = []
    for seed in (0, 1):
        documents = [*texts([64], seed), *texts([63, 70], seed=9)]
        data = PretrainDataset(
            pack(folder / str(seed), documents), 64 + 63 + 69, VOCAB, document_mode=True
        )
        x, _, segments = first_batch(data, device)
        logits.append(model(x, segment_ids=segments)[0].detach())
    if path == "fused":
        assert distance(logits[0][64:], logits[1][64:]) < 1e-6
    else:
        assert torch.equal(logits[0][64:], logits[1][64:])
    assert distance(logits[0][:64], logits[1][:64]) > 1e-2


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("path", PATHS)
def test_a10_packed_documents_train_as_if_alone(
    path: str, dtype: torch.dtype, indexed: bool, tmp_path: Path
) -> None:
    # case A10
    assert_packed_documents_train_as_if_alone(path, tmp_path, dtype, indexed=indexed)


@pytest.mark.parametrize("path", PATHS)
def test_a10_editing_a_document_changes_nothing_in_the_next(path: str, tmp_path: Path) -> None:
    # case A10
    assert_an_edit_stays_in_its_document(path, tmp_path)


@pytest.mark.parametrize("path", PATHS)
def test_an_optimizer_step_on_packed_documents_is_that_on_each_alone(
    path: str, tmp_path: Path
) -> None:
    """One packed micro-step, or an accumulation window of one document a micro-step."""
    documents = texts(LENGTHS[1:])
    data = PretrainDataset(
        pack(tmp_path / "packed", documents), sum(LENGTHS[1:]) - 1, VOCAB,
        document_mode=True, mask_boundary_targets=True,
    )  # fmt: skip
    pairs = [torch.from_numpy(d)[None] for d in documents]
    alone: list[list[Tensor]] = [[ids[:, :-1], ids[:, 1:]] for ids in pairs]
    models, metrics = [], []
    for batches in ([first_batch(data)], alone):
        model = build(path, torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        config = TrainingConfig(gradient_accumulation_steps=len(batches))
        for micro_step, (x, y, *rest) in enumerate(batches):
            result, opt_steps = train_step(
                model, optimizer, scheduler, config, contextlib.nullcontext(), print, 0, x, y,
                micro_step, segment_ids=rest[0] if rest else None,
            )  # fmt: skip
        assert opt_steps == 1 and result is not None
        models.append(model)
        metrics.append(result)
    start = build(path, torch.float64)
    for (name, got), want, first in zip(
        models[0].named_parameters(), models[1].parameters(), start.parameters(), strict=True
    ):
        # A, complex64, also rounds the difference of its own values.
        assert distance(got - first, want - first) < (1e-5 if name.endswith("A") else 1e-8), name
    assert float(metrics[0]["grad_norm"]) == pytest.approx(float(metrics[1]["grad_norm"]), rel=1e-6)


def test_a_foreign_model_is_asked_to_honour_the_documents() -> None:
    class Deaf(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return torch.zeros(*ids.shape, VOCAB)

    x = torch.zeros(1, 4, dtype=torch.int64)
    assert int(next_token_loss(Deaf(), x, x)[1]) == 4
    with pytest.raises(TypeError, match="segment_ids"):
        next_token_loss(Deaf(), x, x, segment_ids=x)


def test_validation_honours_the_documents(tmp_path: Path) -> None:
    folder = pack(tmp_path / "packed", texts([20, 30, 9, 70, 41]))
    model = build("rotated", torch.float64).train()

    def loss(**options: Any) -> tuple[float, int]:
        return evaluate(
            model, PretrainDataset(folder, 32, VOCAB, **options), batch_size=2, world=World(CPU),
            amp_context=contextlib.nullcontext(),
        )  # fmt: skip

    data = PretrainDataset(folder, 32, VOCAB, document_mode=True, mask_boundary_targets=True)
    total, count = 0.0, 0
    for x, y, segments in (data[i] for i in range(len(data))):
        for number in segments.unique():
            mine = segments == number
            part, n = next_token_loss(model, x[mine][None], y[mine][None])
            total, count = total + part.item(), count + int(n)
    assert loss(document_mode=True, mask_boundary_targets=True)[0] == pytest.approx(total / count)
    assert loss(document_mode=True, mask_boundary_targets=True)[1] == count == 32 * 5 - 4
    assert loss(document_mode=True)[1] == 32 * 5
    assert abs(loss()[0] - loss(document_mode=True)[0]) > 1e-4


# Whole runs --------------------------------------------------------------------------------------


def run_config(folder: Path, **changes: Any) -> TrainingConfig:
    """A run of tests/runs.py over documents of 1 to 40 tokens, in 31 windows of 24."""
    path = folder / "packed"
    if not path.exists():
        lengths = np.random.default_rng(0).integers(1, 41, 34).tolist()
        rest = 24 * 31 + 1 - sum(lengths)
        pack(path, texts([*lengths, rest]))
    return runs.config(folder, **{"data_path": str(path), "val_data_path": str(path), **changes})


class Stopping(Pretrainer):
    """Sends itself SIGTERM after so many micro-steps."""

    left = 0

    def _micro_step(self, *batch: Tensor) -> None:
        assert len(batch) == 3
        super()._micro_step(*batch)
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("workers", [0, 2])
def test_b04_exact_resume_in_document_mode(workers: int, tmp_path: Path) -> None:
    # case B04, with data read ahead by a thread or by processes
    knobs = {"document_mode": True, "mask_boundary_targets": True}
    for name in ("whole", "cut", "leaking", "plain"):
        (tmp_path / name).mkdir()
    assert Pretrainer(run_config(tmp_path / "whole", **knobs)).train() == 0
    settings = run_config(tmp_path / "cut", num_workers=workers, **knobs)
    trainer = Stopping(settings)
    trainer.left = 13
    assert trainer.train() == 143
    assert Pretrainer(settings).train() == 0
    whole, cut = tmp_path / "whole" / "run", tmp_path / "cut" / "run"
    assert runs.losses(cut) == runs.losses(whole)
    runs.assert_same_weights(runs.final_weights(cut), runs.final_weights(whole))

    # Each knob reaches the run: without it the losses are others.
    leaking, plain = tmp_path / "leaking", tmp_path / "plain"
    assert Pretrainer(run_config(leaking, mask_boundary_targets=True)).train() == 0
    assert Pretrainer(run_config(plain)).train() == 0
    curves = [runs.losses(folder / "run") for folder in (tmp_path / "whole", leaking, plain)]
    assert curves[0] != curves[1] != curves[2]


def test_a_dry_run_without_data_has_documents_too(tmp_path: Path) -> None:
    settings = runs.config(tmp_path, data_path=str(tmp_path / "absent"), document_mode=True)
    seen: list[int] = []

    class Counting(Pretrainer):
        def _micro_step(self, *batch: Tensor) -> None:
            seen.append(len(batch))
            super()._micro_step(*batch)

    assert Counting(settings, dry_run=True).train() == 0
    assert seen == [3] * 4


def test_the_knobs_are_yaml_keys_of_the_data_section(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {document_mode: true, mask_boundary_targets: true}\n")
    config, sources = load_training_config(path)
    assert config.document_mode and config.mask_boundary_targets
    assert set(sources) == {"data.document_mode", "data.mask_boundary_targets"}
    default = TrainingConfig()
    assert not (default.document_mode or default.mask_boundary_targets)
    with pytest.raises(UserError, match="needs true or false, got 'yes please'"):
        load_training_config(None, ["data.document_mode='yes please'"])


def test_a_checkpoint_from_before_the_knobs_resumes() -> None:
    old = dataclasses.asdict(TrainingConfig())
    del old["document_mode"], old["mask_boundary_targets"]
    assert check_resume(old, TrainingConfig()) == []
    assert check_resume(old, TrainingConfig(document_mode=True)) == [
        "data.document_mode: False -> True"
    ]


def test_tensors_without_a_fitting_eos_are_refused(tmp_path: Path) -> None:
    settings = runs.config(tmp_path, document_mode=True)
    with pytest.raises(UserError, match=r"name the tokenizer of these data in data\.tokenizer"):
        Pretrainer(settings)
    assert not (tmp_path / "run").exists()

"""Published checkpoints: every layout, the decay kept or refused with numbers, strict errors."""

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mamba3_lite import cli
from mamba3_lite.errors import UserError
from mamba3_lite.export import foreign
from mamba3_lite.export.foreign import import_checkpoint, raw_decay, slowest_decay
from mamba3_lite.inference.generate import load_model
from mamba3_lite.models import mamba_block
from mamba3_lite.models.mamba_block import stable_decay
from mamba3_lite.models.transformer import Mamba3Transformer, ModelConfig
from mamba3_lite.training.pretrain import Pretrainer
from mamba3_lite.utils.checkpoint import CheckpointManager
from tests import runs

A = ([-1.0 + 0.5j, -0.3 - 2j], [-0.002 + 1j, -2.5 + 0j])  # by layer and head, the decay itself
Tensors = dict[str, Tensor]


def published(**changes) -> tuple[Mamba3Transformer, Tensors]:
    """A model as the seeds have it, whose A is the decay, and its state dict."""
    torch.manual_seed(0)
    model = Mamba3Transformer(ModelConfig(**{**runs.MODEL, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(".A"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for layer, decay in zip(model.layers, A, strict=True):
            layer.A.copy_(torch.tensor(decay))
    return model, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def write(folder: Path, tensors: Tensors, *, step: int = 4000, meta: object = None) -> Path:
    """Three files without our hashes."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / f"model_step_{step}.safetensors")
    torch.save({"optimizer": {}, "step": step}, folder / f"optim_step_{step}.pt")
    if meta is None:
        meta = {"step": step, "loss": 3.2, "config": {"model_config": {"d_model": 16}}}
    (folder / f"meta_step_{step}.json").write_text(json.dumps(meta))
    return folder


def logits(model: Mamba3Transformer) -> Tensor:
    with torch.no_grad():
        return model(runs.tokens(60)[None])


def without_stable_decay(monkeypatch: pytest.MonkeyPatch, model: Mamba3Transformer) -> Tensor:
    """What the seeds compute with these weights: A taken as it is."""
    with monkeypatch.context() as patch:
        patch.setattr(mamba_block, "stable_decay", lambda a: torch.view_as_real(a).unbind(-1))
        return logits(model)


def test_an_imported_model_computes_what_the_published_one_did(tmp_path, monkeypatch):
    model, tensors = published()
    lines: list[str] = []
    import_checkpoint(write(tmp_path / "src", tensors), tmp_path / "run", log=lines.append)
    back = load_model(tmp_path / "run")
    want = without_stable_decay(monkeypatch, model)
    assert float((logits(back) - want).abs().max()) < 1e-5
    # Without the inverse the same weights are another model.
    assert float((logits(model) - want).abs().max()) > 1e-2
    for layer, decay in zip(back.layers, A, strict=True):
        real, imag = stable_decay(layer.A)
        assert torch.allclose(torch.complex(real, imag), torch.tensor(decay), rtol=2e-6)
    rest = {name: tensor for name, tensor in tensors.items() if not name.endswith(".A")}
    runs.assert_same_weights({name: back.state_dict()[name] for name in rest}, rest)
    assert back.lm_head.weight is back.embed.weight
    checkpoint = CheckpointManager(tmp_path / "run").load(None)
    assert checkpoint.opt_step == 4000 and len(checkpoint.meta["imported"]["sha256"]) == 64
    assert any("Re(A) at most -0.002" in line for line in lines)
    assert any("rms_norm_eps 1e-05 assumed" in line for line in lines)


def test_raw_decay_inverts_stable_decay():
    real = -torch.logspace(-3.99, 2, 500, dtype=torch.float64)
    decay = torch.complex(real, torch.linspace(-5, 5, 500, dtype=torch.float64))
    got = torch.complex(*stable_decay(raw_decay(decay)))
    assert float(((got.real - decay.real) / decay.real).abs().max()) < 1e-9
    assert torch.equal(got.imag, decay.imag)
    fast = decay[real <= -1]
    assert torch.equal(raw_decay(fast), fast), "the identity there, bit for bit"
    assert slowest_decay() == mamba_block._SLOWEST_DECAY
    beyond = torch.tensor([-1e-4, 0.0, 0.5], dtype=torch.complex64)
    assert bool(raw_decay(beyond).real.isnan().all())


def test_a_decay_out_of_reach_is_refused_by_layer_and_head(tmp_path):
    _, tensors = published()
    tensors["layers.1.A"] = torch.tensor([0.25 + 1j, -5e-5 + 0j])
    source = write(tmp_path / "src", tensors)
    with pytest.raises(UserError, match=r"Re\(A\) of 2 heads .* layer 1 head 0: \+0.25, layer 1 "):
        import_checkpoint(source, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    lines: list[str] = []
    import_checkpoint(source, tmp_path / "run", clamp=True, log=lines.append)
    assert any("Re(A) set to -0.0001001 in 2 heads: layer 1 head 0: +0.25" in s for s in lines)
    layer = load_model(tmp_path / "run").layers[1]
    real, imag = stable_decay(layer.A)
    assert torch.allclose(real, torch.full((2,), -1.001e-4), rtol=1e-4)
    assert imag.tolist() == [1.0, 0.0]


def in_pt(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir()
    torch.save(tensors, folder / "model_step_7.pt")
    return folder


def nested_compiled(folder: Path, tensors: Tensors) -> Path:
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in tensors.items()}
    return in_pt(folder, {"model": wrapped, "step": 7})


def compiled_blocks(folder: Path, tensors: Tensors) -> Path:
    renamed = {re.sub(r"(layers\.\d+)", r"\1._orig_mod", n): t for n, t in tensors.items()}
    return write(folder, renamed, step=7)


def a_beside(folder: Path, tensors: Tensors) -> Path:
    """Safetensors that could not hold complex numbers, and A in a file of its own."""
    write(folder, {n: t for n, t in tensors.items() if not t.is_complex()}, step=7)
    torch.save({n: t for n, t in tensors.items() if t.is_complex()}, folder / "model_step_7.pt")
    return folder


def pairs(folder: Path, tensors: Tensors) -> Path:
    real = {n: torch.view_as_real(t).clone() if t.is_complex() else t for n, t in tensors.items()}
    return write(folder, real, step=7)


def only_head(folder: Path, tensors: Tensors) -> Path:
    """What is left where a tied tensor was stored under one of its names."""
    return write(folder, {n: t for n, t in tensors.items() if n != "embed.weight"}, step=7)


def only_embedding(folder: Path, tensors: Tensors) -> Path:
    return write(folder, {n: t for n, t in tensors.items() if n != "lm_head.weight"}, step=7)


def no_meta(folder: Path, tensors: Tensors) -> Path:
    (write(folder, tensors, step=7) / "meta_step_7.json").unlink()
    return folder


def single_file(folder: Path, tensors: Tensors) -> Path:
    write(folder, tensors, step=7)
    (folder / "model_step_7.safetensors").rename(folder / "weights.safetensors")
    return folder / "weights.safetensors"


def newest_of_two(folder: Path, tensors: Tensors) -> Path:
    write(folder, {name: tensor * 2 for name, tensor in tensors.items()}, step=3)
    return write(folder, tensors, step=7)


@pytest.mark.parametrize(
    "layout",
    [
        in_pt, nested_compiled, compiled_blocks, a_beside, pairs, only_head, only_embedding,
        no_meta, single_file, newest_of_two,
    ],
    ids=lambda layout: layout.__name__,
)  # fmt: skip
def test_every_layout_gives_the_same_model(
    layout: Callable[[Path, Tensors], Path], tmp_path: Path
) -> None:
    _, tensors = published()
    import_checkpoint(write(tmp_path / "plain", tensors), tmp_path / "want")
    import_checkpoint(layout(tmp_path / "src", tensors), tmp_path / "run")
    want = load_model(tmp_path / "want").state_dict()
    runs.assert_same_weights(load_model(tmp_path / "run").state_dict(), want)


def test_what_tensors_do_not_tell_comes_from_the_metadata(tmp_path):
    _, tensors = published(weight_tying=False)
    meta = {
        "args": {"model": {"d_model": 16, "rms_norm_eps": 1e-3, "chunk_size": 4, "n_layers": 2}}
    }
    import_checkpoint(write(tmp_path / "src", tensors, meta=meta), tmp_path / "run")
    cfg = load_model(tmp_path / "run").cfg
    assert (cfg.rms_norm_eps, cfg.chunk_size, cfg.weight_tying) == (1e-3, 4, False)
    shape = {name: getattr(cfg, name) for name in runs.MODEL}
    assert shape == {**runs.MODEL, "chunk_size": 4, "max_seq_len": 2048}


def changed(name: str, tensor: Tensor | None) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        rest = {key: value for key, value in tensors.items() if key != name}
        return rest if tensor is None else {**rest, name: tensor}

    return change


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (changed("layers.1.norm2.weight", None), "1 missing: layers.1.norm2.weight"),
        (changed("layers.0.A", None), "1 keys missing that tell the model's sizes: layers.0.A"),
        (changed("layers.1.A", None), "1 missing: layers.1.A"),
        (changed("conv.weight", torch.zeros(2)), "1 unexpected: conv.weight"),
        (
            changed("layers.0.mimo.mix.weight", torch.zeros(3, 3)),
            r"1 of another shape or dtype: layers.0.mimo.mix.weight \(model \(16, 16\) .*\(3, 3\)",
        ),
        (changed("layers.0.A", torch.zeros(2)), "layers.0.A is real .* imaginary part in a cast"),
        (changed("layers.0.A", torch.zeros(2, 3)), r"no Mamba-3-Lite .*: layers.0.A \(2, 3\)"),
        (changed("layers.1.A", torch.zeros(2)), r"layers.1.A \(model \(2,\) torch.complex64, chec"),
        (changed("norm_f.weight", torch.full((16,), torch.nan)), "NaN or Inf: norm_f.weight"),
        (lambda tensors: {"wte.weight": torch.zeros(2, 2)}, "it holds 1 keys: wte.weight"),
    ],
)
def test_wrong_keys_are_named_with_the_file(change, line, tmp_path):
    _, tensors = published()
    source = write(tmp_path / "src", change(tensors))
    with pytest.raises(UserError, match=f"model_step_4000.safetensors: .*{line}"):
        import_checkpoint(source, tmp_path / "new" / "run")
    assert {path.name for path in tmp_path.iterdir()} == {"src"}


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def bad_source(folder: Path, what: str) -> Path:
    _, tensors = published()
    source = write(folder, tensors)
    model, meta = source / "model_step_4000.safetensors", source / "meta_step_4000.json"
    if what == "pickle":
        model.unlink()
        torch.save({"model": tensors, "extra": Bomb(folder / "boom")}, source / "model_step_1.pt")
    elif what == "plain pickle":
        model.unlink()
        (source / "model_step_1.pt").write_bytes(pickle.dumps(Bomb(folder / "boom"), protocol=2))
    elif what == "no tensors":
        model.unlink()
        torch.save({**tensors, "epoch": 3}, source / "model_step_1.pt")
    elif what == "cut":
        model.write_bytes(model.read_bytes()[:-9])
    elif what == "cut pt":
        torch.save(tensors, source / "model_step_9000.pt")
        whole = (source / "model_step_9000.pt").read_bytes()
        (source / "model_step_9000.pt").write_bytes(whole[: len(whole) // 2])
    elif what == "meta":
        meta.write_text("{")
    elif what == "disagree":
        meta.write_text(json.dumps({"model": {"d_model": 32, "n_heads": 2}}))
    elif what == "twice":
        changes = {name: tensor + 1 for name, tensor in tensors.items()}
        torch.save(changes, source / "model_step_4000.pt")
    elif what == "ours":
        (source / "meta_step_4000.json").unlink()
        meta_of_ours = {"model": runs.MODEL}
        CheckpointManager(source).save(4000, published()[0].state_dict(), {}, meta_of_ours)
    elif what == "empty":
        model.unlink()
    return source


BAD_SOURCES = {
    "pickle": "model_step_1.pt holds objects other than tensors and is not opened",
    "plain pickle": "model_step_1.pt holds objects other than tensors and is not opened",
    "no tensors": r"no state dict: epoch \(1 of 20 entries\) are no tensors",
    "cut": "model_step_4000.safetensors is damaged .*; fetch it again",
    "cut pt": "model_step_9000.pt is damaged .*; fetch it again",
    "meta": r"meta_step_4000.json is damaged \(not JSON\)",
    "disagree": "tensors and metadata disagree: d_model: 16 by the tensors, 32 by the metadata",
    "twice": "is there twice with different values",
    "ours": "is a run folder of this project already",
    "empty": "holds no model_step_N.safetensors or model_step_N.pt",
}


@pytest.mark.parametrize("what", BAD_SOURCES)
def test_a_bad_source_is_one_line_and_leaves_nothing(what, tmp_path, capsys):
    source = bad_source(tmp_path / "src", what)
    before = {path.name for path in source.iterdir()}
    with pytest.raises(SystemExit) as stop:
        cli.main(["import", str(source), "--out", str(tmp_path / "new" / "run")])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and "Traceback" not in said
    assert re.search(BAD_SOURCES[what], said)
    assert {path.name for path in tmp_path.iterdir()} == {"src"}
    assert {path.name for path in source.iterdir()} == before, "nothing of a pickle was run"


def test_the_target_and_the_step_are_checked(tmp_path):
    _, tensors = published()
    source = write(tmp_path / "src", tensors)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="full: exists and is not empty"):
        import_checkpoint(source, tmp_path / "full")
    with pytest.raises(UserError, match="has no step 5, only 4000"):
        import_checkpoint(source, tmp_path / "run", opt_step=5)
    with pytest.raises(UserError, match="nowhere does not exist"):
        import_checkpoint(tmp_path / "nowhere", tmp_path / "run")
    assert {path.name for path in tmp_path.iterdir()} == {"src", "full"}


def test_a_published_folder_leads_to_the_import_and_an_imported_one_to_init_from(tmp_path, capsys):
    _, tensors = published()
    source = write(tmp_path / "src", tensors)
    with pytest.raises(UserError, match="mamba3-lite import .*src --out RUN_DIR"):
        load_model(source)
    with pytest.raises(SystemExit) as stop:
        cli.main(["import", str(source), "--out", str(tmp_path / "run")])
    assert not stop.value.code and "next: mamba3-lite generate" in capsys.readouterr().out
    with pytest.raises(UserError, match="holds imported weights and no run .*--init-from"):
        Pretrainer(runs.config(tmp_path))
    # Its own weights are what a run from them starts with.
    settings = runs.config(tmp_path, checkpoint_dir=str(tmp_path / "tuned"), max_steps=4)
    settings.init_from = str(tmp_path / "run")
    trainer = Pretrainer(settings)
    runs.assert_same_weights(trainer.model.state_dict(), load_model(tmp_path / "run").state_dict())
    assert trainer.train() == 0


def test_one_constant_bounds_what_can_be_reached():
    """The import clamps just inside; a float32 round trip must not fall out again."""
    nearest = torch.tensor([complex(-1.001 * foreign.slowest_decay(), 0)], dtype=torch.complex64)
    real, _ = stable_decay(raw_decay(nearest))
    assert float(real) == pytest.approx(float(nearest.real), rel=1e-5)

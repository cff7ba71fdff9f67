"""Exported folders: equal bit for bit where this package is not, read back, whole or not there."""

import ast
import errno
import inspect
import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from mamba3_lite import cli
from mamba3_lite.data.tokenizer import EOS_TEXT, GPT2_EOS_ID, load_tokenizer
from mamba3_lite.errors import UserError
from mamba3_lite.export import hf
from mamba3_lite.export.hf import export_hf
from mamba3_lite.export.tokenizer_files import tokenizer_files
from mamba3_lite.inference.generate import generate, load_model
from mamba3_lite.models.pretrained import EXPORTED_FIELDS, read_weights
from mamba3_lite.models.transformer import Mamba3Transformer, ModelConfig
from mamba3_lite.training.pretrain import Pretrainer
from mamba3_lite.utils.checkpoint import CheckpointManager
from tests import runs
from tests.export_checks import use_elsewhere

ROOT = Path(__file__).resolve().parent.parent
REMOTE = ROOT / "mamba3_lite" / "export" / "remote" / "modeling_mamba3_lite.py"
LENGTHS = (1, 7, 8, 9, 50)  # chunks of 8
IDS = [runs.tokens(n, seed=n).tolist() for n in LENGTHS]
TEXTS = [
    "Hello, world!",
    f"a text that spells {EOS_TEXT} and goes on",
    "  blanks\n\n\tand 'll we're 1234567 x\u00b2 \u65e5\u672c\u8a9e \U0001f600\u00a0\u2003.",
    "",
    " ",
    Path(__file__).read_text(encoding="utf-8"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run that has learnt something and was validated at its end."""
    folder = tmp_path_factory.mktemp("run")
    val = runs.write_tokens(folder / "val.bin", 24 * 5 + 1, seed=2)
    settings = runs.config(folder, max_steps=40, lr=1e-2, save_every=20, val_data_path=val)
    assert Pretrainer(settings).train() == 0
    return folder / "run"


def save(folder: Path, model: Mamba3Transformer, opt_step: int = 1) -> Path:
    """A run folder with one checkpoint of ``model``."""
    meta = {"model": vars(model.cfg)}
    CheckpointManager(folder).save(opt_step, model.state_dict(), {}, meta)
    return folder


def stirred(seed: int = 0, **changes) -> Mamba3Transformer:
    """A model whose mixers are no identity and whose decays differ from head to head."""
    torch.manual_seed(seed)
    model = Mamba3Transformer(ModelConfig(**{**runs.MODEL, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.5 if name.endswith("A") else 0.1))
    return model.eval()


def ours(model: Mamba3Transformer) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(torch.tensor([ids])) for ids in IDS]


def assert_used_alike(found: dict, model: Mamba3Transformer) -> None:
    """Bit for bit where the shapes are the same, to rounding where a batch changes them."""
    for got, want in zip(found["logits"], ours(model), strict=True):
        assert torch.equal(got, want)
    with torch.no_grad():
        last = torch.tensor([IDS[-1]])
        _, state = model(last[:, :-3], return_state=True)
        for t in range(3):
            logits, state = model.step(last[:, t - 3], state)
            assert torch.equal(found["steps"][:, t], logits)
        assert all(map(torch.equal, found["state"], state))
        _, short = model(last[:, :6], return_state=True)
    greedy = [generate(model, [ids], max_new_tokens=20, temperature=0)[0] for ids in IDS]
    assert [ids.tolist() for ids in found["greedy"]] == greedy
    assert len({tuple(ids) for ids in greedy}) > 1, "a model without opinions proves nothing"
    # case D02
    assert found["batch"].tolist() == greedy
    for got, want in zip(found["batch_logits"], ours(model), strict=True):
        assert float((got - want[0, -1]).abs().max()) < 1e-5
    for got, want in zip(found["right"], short, strict=True):
        assert float((got - want).norm()) < 1e-5 * float(want.norm())
    assert torch.equal(found["beams"], found["beams_without_state"])
    assert torch.equal(found["gone_on"], found["from_start"])


# case D07
def test_d07_transformers_gives_the_same_without_the_package(run, tmp_path):
    pytest.importorskip("transformers")
    folder = export_hf(run, tmp_path / "out", tokenizer="none")
    job = {"ids": IDS, "new_tokens": 20, "saved": str(tmp_path / "saved")}
    found = use_elsewhere(folder, tmp_path / "there", **job)
    model = load_model(run)
    assert_used_alike(found, model)
    assert found["tied"] and found["dtype"] == "torch.float32"
    # What transformers writes, for instance after a fine-tuning, is read here, too.
    runs.assert_same_weights(load_model(tmp_path / "saved").state_dict(), model.state_dict())


def test_d07_with_tokenizer_untied_and_folded(tmp_path):
    pytest.importorskip("transformers")
    model = stirred(vocab_size=50257, weight_tying=False)
    folder = export_hf(save(tmp_path / "run", model), tmp_path / "out", fold_mimo=True)
    found = use_elsewhere(folder, tmp_path / "there", ids=IDS, new_tokens=20, texts=TEXTS)
    assert_used_alike(found, load_model(folder))
    gpt2 = load_tokenizer("gpt2")
    assert found["encoded"] == [gpt2.encode(text) for text in TEXTS]
    assert found["decoded"] == TEXTS
    assert found["special"] == [50257, GPT2_EOS_ID, GPT2_EOS_ID]
    assert found["padded"][1, 0] == 0 and found["padded"][1, -1] == 1, "padding is on the left"
    assert not found["tied"]
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings == {"eos_token_id": GPT2_EOS_ID, "pad_token_id": GPT2_EOS_ID}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_export_computes_in_its_dtype_with_a_whole_decay(dtype, tmp_path):
    pytest.importorskip("transformers")
    model = stirred()
    folder = export_hf(
        save(tmp_path / "run", model), tmp_path / "out", dtype=dtype, tokenizer="none"
    )
    found = use_elsewhere(folder, tmp_path / "there", ids=IDS, new_tokens=2)
    assert found["dtype"] == f"torch.{dtype}"
    for layer, A in zip(model.layers, found["A"], strict=True):
        assert torch.equal(torch.view_as_complex(A), layer.A)
    back = load_model(folder)
    for name, tensor in back.state_dict().items():
        want = model.state_dict()[name]
        want = want if want.is_complex() else want.to(getattr(torch, dtype)).float()
        assert torch.equal(tensor, want), name
    narrow = back.bfloat16() if dtype == "bfloat16" else back.half()
    for got, want in zip(found["logits"], ours(narrow), strict=True):
        assert torch.equal(got, want)


def test_the_loader_reads_an_export_back_bit_for_bit(run, tmp_path):
    folder = export_hf(run, tmp_path / "out", tokenizer="none", opt_step=20)
    model, want = load_model(folder), load_model(run, 20)
    runs.assert_same_weights(model.state_dict(), want.state_dict())
    assert model.lm_head.weight is model.embed.weight
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    with pytest.raises(UserError, match="one set of weights, not opt_step 20"):
        load_model(folder, 20)
    # And out again: nothing changes on the way.
    again = export_hf(folder, tmp_path / "again", tokenizer="none")
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_folding_is_exact_and_is_read_back_as_the_identity(tmp_path):
    model = stirred()
    folder = export_hf(
        save(tmp_path / "run", model), tmp_path / "out", fold_mimo=True, tokenizer="none"
    )
    back = load_model(folder)
    assert json.loads((folder / "config.json").read_text())["mimo_folded"] is True
    wide, folded = stirred().double(), stirred().double()
    for before, after, layer in zip(wide.layers, folded.layers, back.layers, strict=True):
        product = before.out_proj.weight.detach() @ before.mimo.mix.weight.detach()
        assert torch.equal(layer.out_proj.weight, product.float())
        after.out_proj.weight.data, identity = product, torch.eye(16, dtype=torch.float64)
        after.mimo.mix.weight.data = identity
        assert torch.equal(layer.mimo.mix.weight, identity.float())
    for got, exact, want in zip(ours(back), ours(folded), ours(wide), strict=True):
        assert float((exact - want).abs().max()) < 1e-12 * float(want.abs().max())
        assert float((got - want).abs().max()) < 1e-5 * float(want.abs().max())


def test_a_tokenizer_file_keeps_its_ids(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    own = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"])
    own.train_from_iterator(TEXTS, trainer)
    # What prepare never adds must not come back with the library's defaults.
    own.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", own.token_to_id("</s>"))]
    )
    own.enable_truncation(5)
    own.save(str(tmp_path / "tokenizer.json"))
    kept = load_tokenizer(str(tmp_path / "tokenizer.json"))
    source = save(tmp_path / "run", stirred(vocab_size=kept.vocab_size))
    folder = export_hf(source, tmp_path / "out", tokenizer=kept.name)
    loaded = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    texts = [*TEXTS, "one </s> two"]
    assert [loaded(text)["input_ids"] for text in texts] == [kept.encode(text) for text in texts]
    assert loaded.eos_token_id == kept.eos_id == own.token_to_id("</s>")
    # An export that is exported again keeps its tokenizer.
    again = export_hf(folder, tmp_path / "again")
    assert (again / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_every_gpt2_token_is_built_by_its_merges():
    tokenizers = pytest.importorskip("tokenizers")
    whole = tokenizer_files(load_tokenizer("gpt2"))["tokenizer.json"]
    library, gpt2 = tokenizers.Tokenizer.from_str(json.dumps(whole)), load_tokenizer("gpt2")
    assert library.get_vocab_size() == 50257 and len(whole["model"]["merges"]) == 50000
    texts = [gpt2.decode([i]) for i in range(GPT2_EOS_ID)]
    texts = [text for text in texts if "\N{REPLACEMENT CHARACTER}" not in text]
    assert len(texts) > 49_000
    got = [e.ids for e in library.encode_batch(texts, add_special_tokens=False)]
    assert got == gpt2.encode_batch(texts)


def test_the_card_says_what_the_run_says_and_nothing_else(run, tmp_path):
    def card(source: Path, name: str, **options) -> str:
        folder = export_hf(source, tmp_path / name, tokenizer="none", **options)
        return (folder / "README.md").read_text()

    said = card(run, "out")
    rows = dict(re.findall(r"^\| (\S.*?) \| (.*?) \|$", said, flags=re.MULTILINE))
    checkpoint = CheckpointManager(run).load(40)
    assert rows["optimizer steps"] == "40" and rows["tokens seen"] == f"{40 * 6 * 24:,}"
    assert rows["data fingerprint"] == checkpoint.meta["data_fingerprint"]
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (loss,) = [row["val_loss"] for row in logged if row["kind"] == "val"]
    assert rows["validation loss"].startswith(f"{loss:.4f} nat")
    assert torch.__version__ in rows["trained with"]
    assert rows["SHA-256 of the weights it was made from"] == read_weights(run).sha256()
    assert "AutoTokenizer" not in said and "license:" not in said and str(run) not in said
    # No validation at step 20; nothing at all is known of a bare checkpoint.
    early = card(run, "early", opt_step=20)
    assert "| optimizer steps | 20 |" in early and "validation loss" not in early
    said = card(save(tmp_path / "bare", stirred()), "of bare")
    assert "tokens seen" not in said and "trained with" not in said and "None" not in said


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_target_is_replaced_only_when_it_is_an_export(run, tmp_path):
    target = tmp_path / "out"
    export_hf(run, target, tokenizer="none", opt_step=20)
    old = (target / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="is not empty; choose another folder, or .*--force"):
        export_hf(run, target, tokenizer="none")
    export_hf(run, target, tokenizer="none", force=True)
    assert (target / "model.safetensors").read_bytes() != old
    assert listing(tmp_path) == {"out", *(f"out/{path.name}" for path in target.iterdir())}
    before = listing(run)
    with pytest.raises(UserError, match="something other than an export, which --force does not"):
        export_hf(target, run, tokenizer="none", force=True)
    assert listing(run) == before
    (tmp_path / "empty").mkdir()
    assert export_hf(run, tmp_path / "empty", tokenizer="none").is_dir()


@pytest.mark.parametrize(
    "problem",
    [
        SafetensorError("Error while serializing: I/O error: No space left on device"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
)
def test_a_failed_write_leaves_the_earlier_export(run, tmp_path, monkeypatch, problem):
    target = export_hf(run, tmp_path / "out", tokenizer="none", opt_step=20)
    old = {path.name: path.read_bytes() for path in target.iterdir()}

    def fail(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise problem

    monkeypatch.setattr(hf, "save_file", fail)
    for folder, force in ((target, True), (tmp_path / "new" / "deep", False)):
        with pytest.raises(UserError, match="nothing was kept"):
            export_hf(run, folder, tokenizer="none", force=force)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == old
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def overflowing(folder: Path) -> Path:
    model = stirred()
    with torch.no_grad():
        model.layers[1].ffn_down.weight[0, 0] = 1e5
    return save(folder, model)


def damaged(folder: Path, run: Path, what: str) -> Path:
    export_hf(run, folder, tokenizer="none")
    config = json.loads((folder / "config.json").read_text())
    if what == "cut":
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[:-100])
    elif what == "gone":
        (folder / "model.safetensors").unlink()
    elif what == "not json":
        (folder / "config.json").write_text("{")
    elif what == "gpt2":
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    elif what == "bigger":
        (folder / "config.json").write_text(json.dumps(config | {"n_layers": 3}))
    elif what == "text":
        (folder / "config.json").write_text(json.dumps(config | {"d_model": "16"}))
    return folder


BAD_EXPORTS = {
    "cut": "model.safetensors is damaged",
    "gone": "model.safetensors is missing: the export is not whole",
    "not json": "config.json is damaged",
    "gpt2": "describes a model of type 'gpt2'",
    "bigger": r"model.safetensors: weights do not fit the model: 8 missing: layers.2.A, layers.2.f",
    "text": "config.json does not describe a model of this version",
}


@pytest.mark.parametrize("what", BAD_EXPORTS)
def test_a_bad_export_is_one_clear_line(what, run, tmp_path):
    folder = damaged(tmp_path / "bad", run, what)
    with pytest.raises(UserError, match=BAD_EXPORTS[what]):
        load_model(folder)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["{tmp}/nowhere"], "nowhere is not a folder; name a run folder or an exported folder"),
        (["{tmp}"], "holds no checkpoint; name a folder that a training run saved to"),
        (["{run}", "--opt-step", "7"], "checkpoint of step 7 .* steps available: 20, 40"),
        (["{run}/train.log"], "train.log is no file of a checkpoint"),
        (["{run}/model_step_20.safetensors", "--opt-step", "40"], "is of another step"),
        (["{run}", "--dtype", "int8"], "--dtype must be one of float32, bfloat16, float16, got"),
        (["{run}", "--tokenizer", "gpt2"], "50,257 ids and the model 97; .*--tokenizer none"),
        (["{run}", "--tokenizer", "{tmp}/no.json"], "cannot read .*no.json"),
        (["{over}", "--dtype", "float16"], r"layers.1.ffn_down.weight is not finite in float16"),
    ],
)
def test_a_users_mistake_is_one_line_and_leaves_nothing(arguments, line, run, tmp_path, capsys):
    places = {"tmp": tmp_path / "empty", "run": run, "over": overflowing(tmp_path / "over")}
    places["tmp"].mkdir()
    argv = [argument.format(**places) for argument in arguments]
    if "--tokenizer" not in argv:
        argv += ["--tokenizer", "none"]
    before = listing(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(["export", *argv, "--hf", str(tmp_path / "out" / "deep")])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and "Traceback" not in said
    assert re.search(line, said)
    assert listing(tmp_path) == before


def test_the_command_says_what_it_wrote(run, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["export", str(run), "--hf", str(tmp_path / "out"), "--tokenizer", "none"])
    assert not stop.value.code
    assert "MiB of float32 weights" in capsys.readouterr().out


def test_the_modeling_file_needs_torch_and_transformers_only():
    tree = ast.parse(REMOTE.read_text(encoding="utf-8"))
    names = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or node.names[0].name]
    }
    assert names - sys.stdlib_module_names == {"torch", "transformers"}
    (init,) = [
        node
        for cls in tree.body
        if isinstance(cls, ast.ClassDef) and cls.name == "Mamba3LiteConfig"
        for node in cls.body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    ]
    taken = {argument.arg for argument in init.args.args}
    # A field that an export writes and its model does not read would change the model silently.
    assert set(EXPORTED_FIELDS) | {"tie_word_embeddings", "mimo_folded"} <= taken
    known = dict(inspect.signature(ModelConfig).parameters)
    defaults = [ast.literal_eval(node) for node in init.args.defaults]
    for argument, default in zip(init.args.args[1:], defaults, strict=True):
        if argument.arg in known:
            assert default == known[argument.arg].default, argument.arg


@pytest.mark.campaign
def test_d07_in_a_fresh_environment(run, tmp_path):
    """A virtual environment with transformers, of which this package is no part."""
    folder = export_hf(run, tmp_path / "out", tokenizer="none")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [pin for pin in constraints if pin.startswith(("torch==", "transformers==", "numpy=="))]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *pins], check=True, timeout=3000)
    look = [python, "-I", "-c", "import transformers, mamba3_lite"]
    missing = subprocess.run(look, capture_output=True, check=False)
    assert b"No module named 'mamba3_lite'" in missing.stderr
    found = use_elsewhere(folder, tmp_path / "there", str(python), ids=IDS, new_tokens=20)
    assert_used_alike(found, load_model(run))
    shutil.rmtree(tmp_path / "venv")

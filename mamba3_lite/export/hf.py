"""The command ``export``: a folder that transformers loads without this package."""

import os
from contextlib import contextmanager
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mamba3_lite import __version__
from mamba3_lite.data.files import atomic_folder, write_json
from mamba3_lite.data.tokenizer import Tokenizer, load_tokenizer
from mamba3_lite.errors import UserError
from mamba3_lite.export.card import model_card
from mamba3_lite.export.tokenizer_files import TOKENIZER_FILES, tokenizer_files
from mamba3_lite.models.pretrained import (
    CONFIG_FILE,
    EXPORTED_FIELDS,
    MODEL_TYPE,
    WEIGHTS_FILE,
    Weights,
    build_model,
    read_weights,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODELING = "modeling_mamba3_lite"
NO_TOKENIZER = "none"


def export_hf(
    source: str | Path,
    folder: str | Path,
    *,
    opt_step: int | None = None,
    dtype: str = "float32",
    fold_mimo: bool = False,
    tokenizer: str | None = None,
    force: bool = False,
) -> Path:
    """Writes an exported folder, whole or not at all.

    Args:
        source: a run folder, a file of one of its checkpoints, or an exported folder.
        opt_step: exactly this checkpoint; None takes the newest intact one.
        dtype: of the stored weights: float32, bfloat16 or float16; A is float32 in any case.
        fold_mimo: multiply each head mixer into ``out_proj`` behind it, in float64.
        tokenizer: ``gpt2``, the path of a ``tokenizer.json``, or ``none``; None takes what the run
            was trained with.
        force: replace an earlier export at ``folder``.

    Raises:
        UserError: nothing to read at ``source``, a target that is not empty, weights that the
            dtype cannot hold, a tokenizer that does not fit.
    """
    folder = Path(folder)
    if dtype not in DTYPES:
        raise UserError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    _check_target(folder, force)
    weights = read_weights(source, opt_step)
    text = _tokenizer_of(weights, tokenizer)
    tensors = _stored_tensors(weights, DTYPES[dtype], fold_mimo)
    sha256 = weights.sha256()
    config = _config(weights, dtype, fold_mimo, sha256)
    generation = {} if text is None else {"eos_token_id": text.eos_id, "pad_token_id": text.eos_id}
    card = model_card(
        weights, name=folder.resolve().name, dtype=dtype, folded=fold_mimo,
        tokenizer=None if text is None else Path(text.name).name, sha256=sha256,
    )  # fmt: skip
    with atomic_folder(folder, replace=force) as partial, _one_line_for(folder):
        save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        write_json(partial / CONFIG_FILE, config)
        write_json(partial / "generation_config.json", generation)
        for name, content in ({} if text is None else tokenizer_files(text)).items():
            write_json(partial / name, content)
        for name, resource in _copied_files(text).items():
            (partial / name).write_bytes(resource.read_bytes())
        (partial / "README.md").write_text(card, encoding="utf-8")
        # The library keeps its file to the owner; an export is there to be passed on.
        (partial / WEIGHTS_FILE).chmod((partial / CONFIG_FILE).stat().st_mode)
        for path in partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    return folder


def _copied_files(text: Tokenizer | None) -> dict[str, Traversable]:
    package = resources.files("mamba3_lite")
    files = {f"{MODELING}.py": package / "export" / "remote" / f"{MODELING}.py"}
    if text is not None and text.name == "gpt2":
        files["tokenizer.LICENSE"] = package / "data" / "assets" / "gpt2.tiktoken.LICENSE"
    return files


@contextmanager
def _one_line_for(folder: Path):
    """The library's own error, for a full disk above all, names neither folder nor way out."""
    try:
        yield
    except SafetensorError as problem:
        raise UserError(
            f"{folder}: the weights could not be written ({problem}); nothing was kept. Make room "
            "or choose another folder."
        ) from problem


def _check_target(folder: Path, force: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder that is empty or does not exist.")
    if not any(folder.iterdir()):
        return
    if not force:
        raise UserError(
            f"{folder} is not empty; choose another folder, or replace the export there: --force."
        )
    # Whatever else lies there may be all that somebody has of it.
    if not (folder / CONFIG_FILE).is_file() or not (folder / f"{MODELING}.py").is_file():
        raise UserError(
            f"{folder} holds something other than an export, which --force does not replace; "
            "choose another folder."
        )


def _tokenizer_of(weights: Weights, asked: str | None) -> Tokenizer | None:
    beside = weights.file.parent / TOKENIZER_FILES[0]  # of an export that is exported again
    recorded = weights.meta.get("config", {}).get("data", {}).get("tokenizer", "gpt2")
    name = asked or (str(beside) if beside.is_file() else recorded)
    if name == NO_TOKENIZER:
        return None
    tokenizer = load_tokenizer(name)
    if tokenizer.vocab_size > weights.model.vocab_size:
        raise UserError(
            f"tokenizer {name} has {tokenizer.vocab_size:,} ids and the model "
            f"{weights.model.vocab_size:,}; name the one it was trained with: --tokenizer FILE, or "
            f"--tokenizer {NO_TOKENIZER} to leave it out."
        )
    return tokenizer


def _stored_tensors(weights: Weights, dtype: torch.dtype, fold_mimo: bool) -> dict[str, Tensor]:
    """What goes into the file: a tied head once, A as float32 pairs (H, 2), the rest in dtype."""
    # Through a model, so that a weight that is missing or of a wrong shape is named before.
    tensors = dict(build_model(weights).state_dict())
    if weights.model.weight_tying:
        del tensors["lm_head.weight"]
    if fold_mimo:
        for i in range(weights.model.n_layers):
            mix = tensors.pop(f"layers.{i}.mimo.mix.weight")
            out = f"layers.{i}.out_proj.weight"
            tensors[out] = (tensors[out].double() @ mix.double()).float()
    stored = {}
    for name, tensor in tensors.items():
        pair = tensor.is_complex()
        narrow = torch.view_as_real(tensor) if pair else tensor.to(dtype)
        if not bool(torch.isfinite(narrow).all()):
            raise UserError(
                f"{weights.file}: {name} is not finite in {str(dtype).removeprefix('torch.')}; "
                "choose a --dtype with a wider range, or another checkpoint."
            )
        stored[name] = narrow.contiguous()
    return stored


def _config(weights: Weights, dtype: str, folded: bool, sha256: str) -> dict[str, Any]:
    return {
        "architectures": ["Mamba3LiteForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{MODELING}.Mamba3LiteConfig",
            "AutoModelForCausalLM": f"{MODELING}.Mamba3LiteForCausalLM",
        },
        "model_type": MODEL_TYPE,
        "dtype": dtype,
        **{name: getattr(weights.model, name) for name in EXPORTED_FIELDS},
        "tie_word_embeddings": weights.model.weight_tying,
        "mimo_folded": folded,
        MODEL_TYPE: {
            "version": __version__,
            "opt_step": weights.opt_step,
            "source_sha256": sha256,
        },
    }


def export_command(
    source: Annotated[str, typer.Argument(help="Run folder, checkpoint file or exported folder.")],
    hf: Annotated[str, typer.Option(help="Folder to write for transformers.")],
    opt_step: Annotated[int | None, typer.Option(help="Checkpoint; default: the newest.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    fold_mimo: Annotated[
        bool, typer.Option("--fold-mimo", help="Multiply the head mixers into out_proj.")
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="gpt2, a tokenizer.json, or none; default: what the run names."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
) -> None:
    """Write a folder that transformers loads without this package.

    Examples:

    mamba3-lite export runs/quickstart --hf exported

    mamba3-lite export runs/quickstart --hf exported --dtype bfloat16 --fold-mimo --force
    """
    folder = export_hf(
        source, hf, opt_step=opt_step, dtype=dtype, fold_mimo=fold_mimo, tokenizer=tokenizer,
        force=force,
    )  # fmt: skip
    size = (folder / WEIGHTS_FILE).stat().st_size
    print(f"{folder}: {size / 2**20:,.1f} MiB of {dtype} weights")
    print(f"next: AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)")

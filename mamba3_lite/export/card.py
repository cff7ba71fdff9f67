"""The model card of an export: what the run says of itself, and nothing else."""

import json
import math
from typing import Any

from mamba3_lite import __version__
from mamba3_lite.models.arithmetic import parameter_counts
from mamba3_lite.models.pretrained import Weights
from mamba3_lite.utils.logging import read_metrics

_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({name!r}, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained({name!r}, trust_remote_code=True)
inputs = tokenizer(["Once upon"], return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=40))[0])
```"""
_USE_WITHOUT_TOKENIZER = """\
```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({name!r}, trust_remote_code=True)
```

No tokenizer is included: the model reads the ids that it was trained on."""

_LICENSE = (
    "`modeling_mamba3_lite.py` comes from Mamba-3-Lite and is licensed under the Apache License "
    "2.0 (https://www.apache.org/licenses/LICENSE-2.0). That says nothing about the weights: their "
    "terms are for whoever publishes them to state."
)
_GPT2_LICENSE = (
    " The vocabulary in `tokenizer.json` is GPT-2's; its license is `tokenizer.LICENSE`."
)


def model_card(
    weights: Weights, *, name: str, dtype: str, folded: bool, tokenizer: str | None, sha256: str
) -> str:
    """README.md of an export called ``name``; a fact that the run does not state is left out."""
    use = (_USE if tokenizer else _USE_WITHOUT_TOKENIZER).format(name=name)
    tables = {"Model": _model_facts(weights, dtype, folded, tokenizer), "Training": _run(weights)}
    tables["Origin"] = {"SHA-256 of the weights it was made from": sha256} | _versions(weights)
    sections = [f"## {title}\n\n{_table(facts)}" for title, facts in tables.items() if facts]
    return "\n\n".join(
        [
            "---\nlibrary_name: transformers\npipeline_tag: text-generation\n"
            "tags:\n- mamba3_lite\n- state-space\n---",
            f"# {name}",
            "A causal language model of the Mamba-3-Lite architecture: blocks of a complex-valued "
            "state-space dual (SSD) mixer and a SwiGLU feed-forward, without attention and without "
            "positional embedding. Its recurrent state has the same size at any length of text.",
            f"## Use\n\n{use}",
            *sections,
            f"## License\n\n{_LICENSE}{_GPT2_LICENSE if tokenizer == 'gpt2' else ''}\n",
        ]
    )


def _table(facts: dict[str, Any]) -> str:
    rows = [f"| {key} | {_shown(value)} |" for key, value in facts.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _shown(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int):
        return str(value)
    return f"{value:,}"


def _model_facts(
    weights: Weights, dtype: str, folded: bool, tokenizer: str | None
) -> dict[str, Any]:
    model = weights.model
    counts = parameter_counts(model) | ({"mimo": 0} if folded else {})
    mixer = "multiplied into out_proj" if folded else "a layer of its own"
    facts = {
        "parameters": sum(counts.values()),
        "layers": model.n_layers,
        "d_model": model.d_model,
        "heads × channels": f"{model.n_heads} × {model.head_dim}",
        "complex state slots a head": model.state_dim,
        "ffn_dim": model.ffn_dim,
        "vocabulary": model.vocab_size,
        "training window": f"{model.max_seq_len:,} tokens (no limit on use)",
        "head and embedding": "one matrix" if model.weight_tying else "two matrices",
        "head mixer": mixer,
        "stored as": f"{dtype} (A always float32)",
    }
    return facts | ({"tokenizer": tokenizer} if tokenizer else {})


def _run(weights: Weights) -> dict[str, Any]:
    """Of a checkpoint: where the run stood, and what it had read."""
    facts: dict[str, Any] = {}
    if weights.opt_step is not None:
        facts["optimizer steps"] = weights.opt_step
    state, config = weights.meta.get("state"), weights.meta.get("config")
    if state is not None:
        facts["tokens seen"] = state["tokens_seen"]
    if (loss := _validation_loss(weights)) is not None:
        facts["validation loss"] = f"{loss:.4f} nat a token (perplexity {math.exp(loss):.2f})"
    if config is not None:
        rows, pieces = config["batch_size"], config["gradient_accumulation_steps"]
        facts |= {
            "sequences an optimizer step": rows * pieces,
            "peak learning rate": config["lr"],
            "optimizer steps planned": config["max_steps"],
        }
    if "data_fingerprint" in weights.meta:
        facts["data fingerprint"] = weights.meta["data_fingerprint"]
    for key, text in (("init_from", "started from"), ("imported", "imported from")):
        if origin := weights.meta.get(key):
            facts[f"{text} weights with SHA-256"] = origin["sha256"]
    return facts


def _validation_loss(weights: Weights) -> float | None:
    """The one that the run logged at exactly this step."""
    path = weights.file.parent / "metrics.jsonl"
    if weights.opt_step is None or not path.is_file():
        return None
    rows = [
        row
        for row in read_metrics(path)
        if row.get("kind") == "val" and row.get("opt_step") == weights.opt_step
    ]
    return rows[-1].get("val_loss") if rows else None


def _versions(weights: Weights) -> dict[str, Any]:
    facts: dict[str, Any] = {"exported by": f"mamba3-lite {__version__}"}
    path = weights.file.parent / "env.json"
    if path.is_file():
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            return facts
        gpus = [gpu["name"] for gpu in run["gpus"]]
        device = ", ".join(f"{gpus.count(gpu)} × {gpu}" for gpu in dict.fromkeys(gpus)) or "CPU"
        facts["trained with"] = f"torch {run['torch']}, Python {run['python']}, on {device}"
    return facts

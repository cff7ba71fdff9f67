"""What is evaluated: a trained model with its tokenizer, and where both came from."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mamba3_lite.data.tokenizer import Tokenizer, load_tokenizer
from mamba3_lite.errors import UserError
from mamba3_lite.evaluation.scoring import Passage, Scorer
from mamba3_lite.inference.generate import choose_dispatch
from mamba3_lite.models.pretrained import build_model, read_weights

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# What an exported folder keeps its tokenizer in.
_TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class Subject:
    """A model ready to be evaluated.

    Attributes:
        checkpoint: folder, file, opt_step and the file's SHA-256, ready for JSON.
        tokenizer_name: what ``load_tokenizer`` takes.
        training: the resolved configuration of the run; empty where nobody kept it.
        settings: device, dtype and batch, ready for JSON.
    """

    scorer: Scorer
    checkpoint: dict[str, Any]
    tokenizer_name: str
    training: dict[str, Any]
    settings: dict[str, Any]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Loaded when text is needed: shards may be scored without it.

        Raises:
            UserError: no such tokenizer, or one with more ids than the model.
        """
        tokenizer = load_tokenizer(self.tokenizer_name)
        known = self.scorer.model.cfg.vocab_size
        if tokenizer.vocab_size > known:
            raise UserError(
                f"tokenizer {self.tokenizer_name!r} has {tokenizer.vocab_size:,} ids, more than "
                f"the model's {known:,}; name the one it was trained with (--tokenizer)."
            )
        return tokenizer

    def text(self, text: str) -> Passage:
        """All of a text, its first token predicted from an EOS as that of any document."""
        ids = [self.tokenizer.eos_id, *self.tokenizer.encode(text)]
        return Passage(np.array(ids, np.int64), 1)

    def pair(self, context: str, continuation: str) -> Passage:
        """A continuation behind its context, split as lm-evaluation-harness splits them.

        Both are encoded as one text. White space between them belongs to the continuation, where
        tokenizers put it.
        """
        bare = context.rstrip()
        continuation, context = context[len(bare) :] + continuation, bare
        if not context:
            return self.text(continuation)
        before = self.tokenizer.encode(context)
        whole = self.tokenizer.encode(context + continuation)
        return Passage(np.array(whole, np.int64), len(before))


def load_subject(
    source: str | Path,
    *,
    opt_step: int | None = None,
    tokenizer: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    batch_tokens: int | None = None,
    batch_size: int | None = None,
) -> Subject:
    """Reads a trained model.

    Args:
        source: a run folder, a file of one of its checkpoints, or an exported folder.
        opt_step: exactly this checkpoint; None takes the newest intact one.
        tokenizer: gpt2 or a tokenizer.json; None takes the export's or the run's own.
        device: cpu, cuda, or auto: cuda where there is one.
        dtype: float32, bfloat16 (autocast), or auto: bfloat16 on a GPU.
        batch_tokens: tokens of a forward pass; None: by the device.
        batch_size: texts that are read together; None: as many as fit.

    Raises:
        UserError: nothing usable at ``source``, or an option that means nothing.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device {device!r} is unknown; use cpu, cuda or auto.")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda: there is no CUDA device here; use cpu or auto.")
    if dtype not in ("auto", *_DTYPES):
        raise UserError(f"dtype {dtype!r} is unknown; use float32, bfloat16 or auto.")
    for name, value in (("batch-tokens", batch_tokens), ("batch-size", batch_size)):
        if value is not None and value < 1:
            raise UserError(f"--{name} must be 1 or more, got {value}.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    weights = read_weights(source, opt_step)
    model = build_model(weights)
    choose_dispatch(model, torch.device(device))
    scorer = Scorer(
        model.to(device).eval(), dtype=_DTYPES[dtype], batch_tokens=batch_tokens,
        batch_size=batch_size,
    )  # fmt: skip
    beside = weights.file.parent / _TOKENIZER_FILE
    training = weights.meta.get("config") or {}
    recorded = training.get("data", {}).get("tokenizer", "gpt2")
    return Subject(
        scorer=scorer,
        checkpoint={
            "folder": str(weights.file.parent), "file": weights.file.name,
            "opt_step": weights.opt_step, "sha256": weights.sha256(),
        },
        tokenizer_name=tokenizer or (str(beside) if beside.is_file() else recorded),
        training=training,
        settings={
            "device": device,
            "dtype": "bfloat16 autocast, float32 logits" if dtype == "bfloat16" else dtype,
            "batch_tokens": scorer.batch_tokens, "batch_size": batch_size,
        },
    )  # fmt: skip

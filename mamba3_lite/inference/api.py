"""A trained model with its tokenizer: text in, text out.

from mamba3_lite import load

model = load("runs/quickstart")
print(model.generate("import "))
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mamba3_lite.data.tokenizer import Tokenizer, load_tokenizer
from mamba3_lite.errors import UserError
from mamba3_lite.inference.generate import choose_dispatch, read, stream
from mamba3_lite.inference.state import State
from mamba3_lite.models.pretrained import build_model, read_weights
from mamba3_lite.models.transformer import Mamba3Transformer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# What an exported folder keeps its tokenizer in.
_TOKENIZER_FILE = "tokenizer.json"
# A character of UTF-8 is at most four bytes, so at most four tokens.
_MOST_TOKENS_OF_A_CHARACTER = 4


class TextStream:
    """Turns ids into text as they come; a token that ends inside a character waits for the next."""

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._ids: list[int] = []
        # What lies before a token decides how it is spelt, so a few shown ones stay.
        self._first = self._shown = 0

    def push(self, token: int) -> str:
        """The text that this token completes."""
        self._ids.append(token)
        return self._take(final=len(self._ids) - self._shown >= _MOST_TOKENS_OF_A_CHARACTER)

    def finish(self) -> str:
        """What is left."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._decode(self._ids[self._first : self._shown])
        whole = self._decode(self._ids[self._first :])
        if whole.endswith("\N{REPLACEMENT CHARACTER}") and not final:
            return ""
        self._first, self._shown = self._shown, len(self._ids)
        return whole[len(before) :]


class LanguageModel:
    """A model and its tokenizer.

    Sampling options of ``generate`` and ``stream``: max_new_tokens (128), temperature (0.8; 0 is
    greedy), top_k (50; 0 is off), top_p (1), repetition_penalty (1), seed (0), stop_at_eos (True),
    state (see ``read``), bf16_state (False).
    """

    def __init__(self, model: Mamba3Transformer, tokenizer: Tokenizer):
        self.model, self.tokenizer = model, tokenizer

    def generate(self, prompt: str | Sequence[str], **options: Any) -> str | list[str]:
        """The continuation of a prompt, or those of several prompts, decoded together."""
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        texts = self.collect(self.tokens(prompts, **options), len(prompts))
        return texts[0] if isinstance(prompt, str) else texts

    def collect(self, tokens: Iterator[list[int | None]], rows: int) -> list[str]:
        """The texts of ``tokens``, once it has ended."""
        ids: list[list[int]] = [[] for _ in range(rows)]
        for drawn in tokens:
            for row, token in zip(ids, drawn, strict=True):
                if token is not None:
                    row.append(token)
        return [self.tokenizer.decode(row) for row in ids]

    def stream(self, prompt: str, **options: Any) -> Iterator[str]:
        """The continuation piece by piece, each as soon as its characters are whole."""
        return self._pieces(self.tokens([prompt], **options))

    def _pieces(self, tokens: Iterator[list[int | None]]) -> Iterator[str]:
        text = TextStream(self.tokenizer.decode)
        for (token,) in tokens:
            if token is not None and (piece := text.push(token)):
                yield piece
        if rest := text.finish():
            yield rest

    def read(self, prompt: str | Sequence[str], *, state: State | None = None) -> State:
        """The state after a prompt, to continue many times: ``generate(..., state=...)``.

        ``State.save`` and ``load_state`` keep it in a file; its size does not depend on the text's.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        return read(self.model, [self.tokenizer.encode(text) for text in prompts], state=state)

    def load_state(self, path: str | Path) -> State:
        """What ``State.save`` has written."""
        return State.load(path, self.model)

    def tokens(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.8,
        top_k: int = 50,
        stop_at_eos: bool = True,
        bf16_state: bool = False,
        **how: Any,
    ) -> Iterator[list[int | None]]:
        """Every step's ids, one a row, as :func:`mamba3_lite.inference.generate.stream`."""
        return stream(
            self.model, [self.tokenizer.encode(text) for text in prompts],
            max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k,
            eos_id=self.tokenizer.eos_id if stop_at_eos else None,
            vocab_size=self.tokenizer.vocab_size,
            state_dtype=torch.bfloat16 if bf16_state else torch.float32, **how,
        )  # fmt: skip


def load(
    path: str | Path,
    *,
    opt_step: int | None = None,
    tokenizer: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
) -> LanguageModel:
    """A trained model, ready to generate.

    Args:
        path: a run folder, a file of one of its checkpoints, or an exported folder.
        opt_step: exactly this checkpoint; None takes the newest intact one.
        tokenizer: gpt2, or the path of a tokenizer.json; None takes the export's or the run's own.
        device: cpu, cuda, or auto: cuda where there is one.
        dtype: of the weights: float32, bfloat16, or auto: bfloat16 on a GPU. The recurrent state
            stays float32.

    Raises:
        UserError: no usable weights or tokenizer, or a device or dtype that is not there.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device {device!r} is unknown; use cpu, cuda or auto.")
    if dtype not in ("auto", *_DTYPES):
        raise UserError(f"dtype {dtype!r} is unknown; use float32, bfloat16 or auto.")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda: there is no CUDA device here; use cpu or auto.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    weights = read_weights(path, opt_step)
    beside = weights.file.parent / _TOKENIZER_FILE
    recorded = (weights.meta.get("config") or {}).get("data", {}).get("tokenizer", "gpt2")
    text = load_tokenizer(tokenizer or (str(beside) if beside.is_file() else recorded))
    model = build_model(weights)
    choose_dispatch(model, torch.device(device))
    model = model.to(device).eval()
    # Not `.to(dtype)`: the decay is complex and stays so.
    return LanguageModel(model.bfloat16() if dtype == "bfloat16" else model, text)

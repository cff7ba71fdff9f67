"""The command ``generate`` at a terminal: where prompts come from, and text as it comes."""

import contextlib
import io
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from mamba3_lite.errors import UserError, reading
from mamba3_lite.inference.api import LanguageModel, TextStream, load
from mamba3_lite.inference.sampling import check_sampling
from mamba3_lite.inference.state import State

_DEFAULT_PROMPT = "import "
_INTERRUPTED = 130


def run(
    run_dir: str,
    *,
    prompt: str | None,
    prompt_file: str | None,
    interactive: bool,
    num_samples: int,
    how: dict[str, Any],
    load_options: dict[str, Any],
) -> None:
    """Continues what the user gives, on standard output; everything else goes to standard error.

    Args:
        how: sampling options of :meth:`mamba3_lite.inference.api.LanguageModel.generate`.
        load_options: those of :func:`mamba3_lite.inference.api.load`.
    """
    sampling = ("temperature", "top_k", "top_p", "repetition_penalty")
    check_sampling(*(how[name] for name in sampling))
    for name, value, least in (
        ("max-new-tokens", how["max_new_tokens"], 0), ("num-samples", num_samples, 1),
    ):  # fmt: skip
        if value < least:
            raise UserError(f"--{name} must be {least} or more, got {value}.")
    _check_prompt(prompt, prompt_file, interactive)
    # Nothing but an error's one line may reach standard error before all is known to be well.
    with contextlib.redirect_stdout(io.StringIO()) as notes:
        model = load(run_dir, **load_options)
        text = _prompt(prompt, prompt_file, interactive)
        if interactive:
            state = model.read(text) if text else None
        else:
            tokens = model.tokens([text] * num_samples, **how)
    print(notes.getvalue(), end="", file=sys.stderr)
    if interactive:
        _converse(model, state, how)
        return
    try:
        if num_samples == 1:
            print(text, end="", flush=True)
            _show(model, tokens)
            print()
        else:
            _print_samples(model, text, tokens, num_samples)
    except KeyboardInterrupt:
        print(flush=True)
        raise typer.Exit(_INTERRUPTED) from None


def _check_prompt(prompt: str | None, prompt_file: str | None, interactive: bool) -> None:
    if prompt is not None and prompt_file is not None:
        raise UserError("--prompt and --prompt-file are both given: leave one out.")
    if prompt == "":
        raise UserError("--prompt is empty: give at least one character.")
    if prompt == "-" and interactive:
        raise UserError("--prompt - and --interactive both read standard input: leave one out.")


def _prompt(prompt: str | None, prompt_file: str | None, interactive: bool) -> str:
    """The text to continue; with ``interactive`` it may be empty."""
    if prompt_file is not None:
        with reading(prompt_file, "check --prompt-file"):
            content = Path(prompt_file).read_bytes()
        return _decoded(content, prompt_file)
    if prompt == "-" or (prompt is None and not interactive and not sys.stdin.isatty()):
        return _decoded(sys.stdin.buffer.read(), "standard input")
    if prompt is None:
        return "" if interactive else _DEFAULT_PROMPT
    return prompt


def _decoded(content: bytes, where: str) -> str:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise UserError(f"{where}: not UTF-8 at byte {problem.start}; convert it first.") from None
    if not text:
        raise UserError(f"{where} is empty: give at least one character (--prompt TEXT).")
    return text


def _show(model: LanguageModel, tokens: Iterator[list[int | None]]) -> int:
    """Prints one continuation as it comes, even when it is stopped; the number of its tokens."""
    count, text, out = 0, TextStream(model.tokenizer.decode), sys.stdout
    # What is said about kernels on the way is no part of the text.
    with contextlib.redirect_stdout(sys.stderr):
        for (token,) in tokens:
            assert token is not None
            count += 1
            print(text.push(token), end="", file=out, flush=True)
        print(text.finish(), end="", file=out, flush=True)
    return count


def _print_samples(
    model: LanguageModel, prompt: str, tokens: Iterator[list[int | None]], count: int
) -> None:
    """All continuations, one after the other, once they are whole."""
    with contextlib.redirect_stdout(sys.stderr):
        texts = model.collect(tokens, count)
    for number, text in enumerate(texts, 1):
        print(f"--- sample {number} of {count} ---\n{prompt}{text}")


def _converse(model: LanguageModel, state: State | None, how: dict[str, Any]) -> None:
    """Continues one line after the other, each behind the text of ``state``."""
    print(
        "Enter a prompt and it is continued; Ctrl-C stops a text, Ctrl-D or Ctrl-C here ends.",
        file=sys.stderr,
    )
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line:
            continue
        start, count = time.perf_counter(), 0
        try:
            count = _show(model, model.tokens([line], state=state, **how))
        except KeyboardInterrupt:
            print("\n[stopped]", file=sys.stderr)
            continue
        except UserError as problem:
            print(f"error: {problem}", file=sys.stderr)
            continue
        rate = count / (time.perf_counter() - start)
        print(f"\n[{count} tokens, {rate:,.0f} tok/s]", file=sys.stderr)

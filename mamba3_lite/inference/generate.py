"""Text from a trained model: prefill by chunks, then one recurrent step a token.

The state has a constant size.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from mamba3_lite.data.tokenizer import load_tokenizer
from mamba3_lite.errors import UserError
from mamba3_lite.inference.sampling import check_sampling, sample
from mamba3_lite.models.transformer import Mamba3Transformer, ModelConfig
from mamba3_lite.utils.checkpoint import CheckpointManager, load_weights

PREFILL_TOKENS = 4096


def load_model(
    run_dir: str | Path, opt_step: int | None = None, device: torch.device | str = "cpu"
) -> Mamba3Transformer:
    """The model of a run folder, in evaluation mode.

    Args:
        opt_step: exactly this checkpoint; None takes the newest intact one.
    """
    checkpoint = CheckpointManager(run_dir).load(opt_step)
    if checkpoint is None:
        problem = "holds no checkpoint" if Path(run_dir).is_dir() else "is not a folder"
        raise UserError(f"{run_dir} {problem}; name a folder that a training run saved to.")
    model = Mamba3Transformer(ModelConfig(**checkpoint.meta["model"]))
    load_weights(model, checkpoint.model)
    return model.to(device).eval()


@torch.no_grad()
def prefill(
    model: Mamba3Transformer, prompts: Sequence[Sequence[int]], *, padding_side: str = "left"
) -> tuple[Tensor, list[Tensor]]:
    """Reads prompts of any lengths.

    Padding never enters a state. Long prompts go through in pieces, with the state carried, so
    memory does not grow.

    Returns:
        The logits after each prompt's last token (B, V), and one state a layer.
    """
    device = model.embed.weight.device
    lengths = torch.tensor([len(p) for p in prompts])
    if not len(prompts) or int(lengths.min()) < 1:
        raise UserError("A prompt needs at least one token.")
    longest = int(lengths.max())
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        start = longest - len(prompt) if padding_side == "left" else 0
        ids[row, start : start + len(prompt)] = torch.tensor(prompt)
        mask[row, start : start + len(prompt)] = True
    if int(ids.max()) >= model.cfg.vocab_size or int(ids.min()) < 0:
        raise UserError(
            f"A prompt holds a token id outside 0 to {model.cfg.vocab_size - 1}; use the tokenizer "
            "that the model was trained with (--tokenizer)."
        )
    last = torch.full_like(lengths, longest - 1) if padding_side == "left" else lengths - 1
    hidden = torch.zeros(len(prompts), model.cfg.d_model, device=device)
    state = None
    for start in range(0, longest, PREFILL_TOKENS):
        piece = slice(start, start + PREFILL_TOKENS)
        out, state = model.hidden(
            ids[:, piece].to(device),
            state=state,
            return_state=True,
            token_mask=None if bool(mask.all()) else mask[:, piece].to(device),
        )
        here = ((last >= start) & (last < start + PREFILL_TOKENS)).nonzero().squeeze(1)
        hidden = hidden.to(out.dtype)
        hidden[here] = out[here, (last[here] - start)]
    assert state is not None
    return model.lm_head(hidden), state


@torch.no_grad()
def generate(
    model: Mamba3Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    eos_id: int | None = None,
    on_tokens: Callable[[Tensor], None] | None = None,
) -> list[list[int]]:
    """Continues each prompt by up to ``max_new_tokens`` tokens.

    A row ends at its own EOS (which is not returned).

    Args:
        temperature: 0 is greedy.
        on_tokens: called with each step's ids (B,), for streaming.

    Raises:
        UserError: an empty prompt, an id out of range, or sampling values that mean nothing.
    """
    check_sampling(temperature, top_k, top_p)
    was_training = model.training
    model.eval()
    try:
        return _decode(
            model, prompts, max_new_tokens=max_new_tokens, seed=seed, eos_id=eos_id,
            on_tokens=on_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        )  # fmt: skip
    finally:
        model.train(was_training)


def _decode(
    model: Mamba3Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    seed: int,
    eos_id: int | None,
    on_tokens: Callable[[Tensor], None] | None,
    **sampling: Any,
) -> list[list[int]]:
    logits, state = prefill(model, prompts)
    generator = torch.Generator(logits.device).manual_seed(seed)
    outputs: list[list[int]] = [[] for _ in prompts]
    running = [True] * len(prompts)
    for _ in range(max_new_tokens):
        ids = sample(logits, generator=generator, **sampling)
        for row, token in enumerate(ids.tolist()):
            running[row] = running[row] and token != eos_id
            if running[row]:
                outputs[row].append(token)
        if not any(running):
            break
        if on_tokens is not None:
            on_tokens(ids)
        logits, state = model.step(ids, state)
    return outputs


def generate_command(
    run_dir: Annotated[str, typer.Argument(help="Run folder with checkpoints.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "import ",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0: all.")] = 50,
    top_p: Annotated[
        float, typer.Option(help="Keep the likeliest tokens up to this probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    opt_step: Annotated[int | None, typer.Option(help="Checkpoint; default: the newest.")] = None,
    tokenizer: Annotated[str, typer.Option(help="gpt2, or a tokenizer.json.")] = "gpt2",
) -> None:
    """Continue a prompt with a trained model.

    Examples:

    mamba3-lite generate runs/quickstart --prompt "def main("

    mamba3-lite generate runs/quickstart --temperature 0
    """
    check_sampling(temperature, top_k, top_p)
    if not prompt:
        raise UserError("--prompt is empty: give at least one character.")
    if max_new_tokens < 0:
        raise UserError(f"--max-new-tokens must be 0 or more, got {max_new_tokens}.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, text = load_model(run_dir, opt_step, device), load_tokenizer(tokenizer)
    print(prompt, end="", flush=True)
    shown, ids = "", []

    def show(token: Tensor) -> None:
        # A token may end inside a character: what is printed is what the text gained.
        nonlocal shown
        ids.append(int(token[0]))
        whole = text.decode(ids)
        if not whole.endswith("\N{REPLACEMENT CHARACTER}"):
            print(whole[len(shown) :], end="", flush=True)
            shown = whole

    generate(
        model, [text.encode(prompt)], max_new_tokens=max_new_tokens, temperature=temperature,
        top_k=top_k, top_p=top_p, seed=seed, eos_id=text.eos_id, on_tokens=show,
    )  # fmt: skip
    print()

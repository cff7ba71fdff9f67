"""Text from a trained model: prefill by chunks, then one recurrent step a token.

The state has a constant size.

Legend: B batch (one prompt a row), V vocabulary.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from mamba3_lite.errors import UserError
from mamba3_lite.inference.decoder import StepDecoder, decoder_for
from mamba3_lite.inference.sampling import check_sampling, choose, not_finite, penalize
from mamba3_lite.inference.state import State, fingerprint
from mamba3_lite.models.mamba_block import Mamba3Block
from mamba3_lite.models.pretrained import build_model, read_weights
from mamba3_lite.models.ssd_backends import BACKENDS, Shape
from mamba3_lite.models.transformer import Mamba3Transformer

# Tokens of a piece of prefill, over all rows: enough to fill the device, and a bound on memory.
PREFILL_TOKENS = {"cpu": 4096, "cuda": 16384}

Ids = Sequence[int] | Tensor


def load_model(
    run_dir: str | Path, opt_step: int | None = None, device: torch.device | str = "cpu"
) -> Mamba3Transformer:
    """The model of a run folder, a file of one of its checkpoints, or an exported folder.

    In evaluation mode, in float32.

    Args:
        opt_step: exactly this checkpoint; None takes the newest intact one.
    """
    model = build_model(read_weights(run_dir, opt_step))
    choose_dispatch(model, torch.device(device))
    return model.to(device).eval()


def choose_dispatch(model: Mamba3Transformer, device: torch.device) -> None:
    """Lets the blocks read prompts by an SSD path that runs on ``device``.

    What the run was trained with may not: on a GPU the fastest path is taken, elsewhere another
    only if it has to be.
    """
    cfg = model.cfg
    shape = Shape(cfg.head_dim, cfg.state_dim, cfg.chunk_size, device, cfg.n_heads)
    trained_with = BACKENDS.get(cfg.ssd_dispatch)
    if device.type == "cuda":
        dispatch = "auto"
    elif trained_with is not None and trained_with.refuse(shape) is not None:
        dispatch = "rotated"
    else:
        return
    for block in model.layers:
        assert isinstance(block, Mamba3Block)
        block.ssd_dispatch = dispatch


def _as_rows(model: Mamba3Transformer, prompts: Sequence[Ids]) -> list[Tensor]:
    """The prompts as tensors on the CPU; ``UserError`` for an empty one or an id out of range."""
    rows = [torch.as_tensor(prompt, dtype=torch.int64).cpu() for prompt in prompts]
    if not rows or min(len(row) for row in rows) < 1:
        raise UserError("A prompt needs at least one token.")
    if any(int(row.max()) >= model.cfg.vocab_size or int(row.min()) < 0 for row in rows):
        raise UserError(
            f"A prompt holds a token id outside 0 to {model.cfg.vocab_size - 1}; use the tokenizer "
            "that the model was trained with (--tokenizer)."
        )
    return rows


def _piece(
    rows: Sequence[Tensor], offsets: Sequence[int], start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Columns start to stop of the padded batch: ids and which of them are real, (B, stop - start).

    Row i lies in the columns from ``offsets[i]`` on.
    """
    ids = torch.zeros(len(rows), stop - start, dtype=torch.int64)
    real = torch.zeros(len(rows), stop - start, dtype=torch.bool)
    for i, (row, offset) in enumerate(zip(rows, offsets, strict=True)):
        first, end = max(start, offset), min(stop, offset + len(row))
        if first < end:
            ids[i, first - start : end - start] = row[first - offset : end - offset]
            real[i, first - start : end - start] = True
    return ids, real


@torch.no_grad()
def prefill(
    model: Mamba3Transformer,
    prompts: Sequence[Ids],
    *,
    padding_side: str = "left",
    state: Sequence[Tensor] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Reads prompts of any lengths.

    Padding never enters a state. Long prompts go through in pieces, with the state carried, so
    memory does not grow.

    Args:
        state: go on from here, one (B, H, 2N, D) a layer.

    Returns:
        The logits after each prompt's last token (B, V), and one state a layer.
    """
    rows = _as_rows(model, prompts)
    device, longest = model.embed.weight.device, max(map(len, rows))
    left = padding_side == "left"
    offsets = [longest - len(row) if left else 0 for row in rows]
    last = torch.tensor([offset + len(row) - 1 for offset, row in zip(offsets, rows, strict=True)])
    hidden = torch.zeros(len(rows), model.cfg.d_model, device=device)
    carried = None if state is None else list(state)
    size = max(1, PREFILL_TOKENS["cuda" if device.type == "cuda" else "cpu"] // len(rows))
    for start in range(0, longest, size):
        stop = min(start + size, longest)
        ids, real = _piece(rows, offsets, start, stop)
        # Without a mask the fused kernels read the projection in place.
        mask = None if bool(real.all()) else real.to(device)
        out, carried = model.hidden(
            ids.to(device), state=carried, return_state=True, token_mask=mask
        )
        here = ((last >= start) & (last < stop)).nonzero().squeeze(1)
        hidden = hidden.to(out.dtype)
        hidden[here.to(device)] = out[here.to(device), (last[here] - start).to(device)]
    assert carried is not None
    return model.lm_head(hidden), carried


def read(model: Mamba3Transformer, prompts: Sequence[Ids], *, state: State | None = None) -> State:
    """The state after the prompts, one row each, to continue once or many times.

    Args:
        state: what was read before, of one row or as many as there are prompts. Where every
            prompt is empty it is returned, a row for each prompt.

    Raises:
        UserError: an empty prompt, an id out of range, or a state that does not fit.
    """
    before = None
    if state is not None:
        state.check(model)
        if state.batch_size not in (1, len(prompts)):
            raise UserError(
                f"The state holds {state.batch_size} rows and there are {len(prompts)} prompts; "
                "give one prompt a row, or a state of one row."
            )
        if state.batch_size == 1:
            state = state.repeat(len(prompts))
        if not any(len(prompt) for prompt in prompts):
            return state
        before = state.layers
    elif all(list(prompt) == list(prompts[0]) for prompt in prompts[1:]):
        # Several continuations of one text: it is read once.
        logits, layers = prefill(model, prompts[:1])
        return State(layers, logits, fingerprint(model)).repeat(len(prompts))
    logits, layers = prefill(model, prompts, state=before)
    return State(layers, logits, fingerprint(model))


class _Draw:
    """Draws a batch's next tokens on the model's device, without waiting for it."""

    def __init__(
        self,
        device: torch.device,
        prompts: Sequence[Ids],
        *,
        vocab_size: int,
        seed: int,
        repetition_penalty: float,
        **sampling: Any,
    ):
        self.vocab_size, self.penalty, self.sampling = vocab_size, repetition_penalty, sampling
        self.generator = torch.Generator(device).manual_seed(seed)
        self.seen = None
        if repetition_penalty != 1:
            seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
            for row, prompt in enumerate(prompts):
                ids = torch.as_tensor(prompt, dtype=torch.int64).cpu()
                seen[row, ids[ids < vocab_size]] = True
            self.seen = seen.to(device)

    def greedy_among(self, width: int) -> bool:
        """Whether the largest of so many logits is always drawn."""
        return self.sampling["temperature"] == 0 and self.seen is None and self.vocab_size == width

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Ids (B,), and the largest logits (B,) that they were drawn from."""
        logits = logits[:, : self.vocab_size]
        if self.seen is not None:
            logits = penalize(logits.float(), self.seen, self.penalty)
        ids, largest = choose(logits, generator=self.generator, **self.sampling)
        if self.seen is not None:
            self.seen.scatter_(1, ids[:, None], True)
        return ids, largest


class _ToHost:
    """What T steps drew, on its way to the host, and waited for when it is read."""

    def __init__(self, *tensors: Tensor):
        """Ids and largest logits (T, B), as two tensors or as the last dimension of one."""
        self.event, self.steps = None, len(tensors[0])
        self.copies = [t.to("cpu", non_blocking=True) for t in tensors]
        if tensors[0].is_cuda:
            self.event = torch.cuda.Event()
            self.event.record()

    def read(self) -> Iterator[tuple[list[int], list[float]]]:
        """Each step's ids and largest logits, one a row."""
        if self.event is not None:
            self.event.synchronize()
        ids, largest = self.copies if len(self.copies) == 2 else self.copies[0].unbind(-1)
        return zip(ids.long().tolist(), largest.tolist(), strict=True)


def stream(
    model: Mamba3Transformer,
    prompts: Sequence[Ids],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    eos_id: int | None = None,
    vocab_size: int | None = None,
    state: State | None = None,
    state_dtype: torch.dtype = torch.float32,
) -> Iterator[list[int | None]]:
    """Continues each prompt, and yields every step's ids, one a row; None where a row has ended.

    A row ends at its own EOS (which is not yielded), all of them after ``max_new_tokens``.

    Args:
        temperature: 0 is greedy.
        repetition_penalty: above 1, tokens of the prompt and of the text so far become less likely.
        vocab_size: only ids below it are drawn; for a tokenizer that knows fewer than the model.
        state: what was read before, as in :func:`read`.
        state_dtype: what the recurrent state is kept in between two tokens.

    Raises:
        UserError: an empty prompt, an id out of range, sampling values that mean nothing, a state
            of another model, or logits that are not finite.
    """
    check_sampling(temperature, top_k, top_p, repetition_penalty)
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens must be 0 or more, got {max_new_tokens}.")
    if state is None or any(len(prompt) for prompt in prompts):
        _as_rows(model, prompts)
    draw = _Draw(
        model.embed.weight.device, prompts, seed=seed, repetition_penalty=repetition_penalty,
        vocab_size=min(vocab_size or model.cfg.vocab_size, model.cfg.vocab_size),
        temperature=temperature, top_k=top_k, top_p=top_p,
    )  # fmt: skip
    return _decode(model, prompts, state, draw, max_new_tokens, eos_id, state_dtype)


@contextlib.contextmanager
def _evaluating(model: Mamba3Transformer) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _draws(
    decoder: StepDecoder, draw: _Draw, logits: Tensor, count: int
) -> Iterator[tuple[list[int], list[float]]]:
    """Ids of ``count`` >= 1 steps, one a row, and the largest logits that they were drawn from.

    A GPU is given the next steps before ids are read, so that it never waits for the host; those
    behind the last EOS are then thrown away.
    """
    greedy = draw.greedy_among(logits.shape[1])

    def more(ids: Tensor, most: int) -> tuple[Tensor, _ToHost]:
        best = decoder.greedy(ids, most) if greedy else None
        if best is not None:
            return best[0], _ToHost(best[1])
        ids, largest = draw(decoder.step(ids))
        return ids, _ToHost(ids[None], largest[None])

    ids, largest = draw(logits)
    drawn = _ToHost(ids[None], largest[None])
    while True:
        count -= drawn.steps
        following = more(ids, count) if count and ids.is_cuda else None
        yield from drawn.read()
        if not count:
            return
        ids, drawn = following or more(ids, count)


def _decode(
    model: Mamba3Transformer,
    prompts: Sequence[Ids],
    state: State | None,
    draw: _Draw,
    max_new_tokens: int,
    eos_id: int | None,
    state_dtype: torch.dtype,
) -> Iterator[list[int | None]]:
    with _evaluating(model), contextlib.ExitStack() as stack:
        after = read(model, prompts, state=state)
        if not max_new_tokens:
            return
        decoder = stack.enter_context(decoder_for(model, len(prompts), state_dtype=state_dtype))
        decoder.load(after.layers)
        running = [True] * len(prompts)
        for tokens, peaks in _draws(decoder, draw, after.logits, max_new_tokens):
            if not all(map(math.isfinite, peaks)):
                raise not_finite()
            running = [on and token != eos_id for on, token in zip(running, tokens, strict=True)]
            if not any(running):
                return
            yield [token if on else None for on, token in zip(running, tokens, strict=True)]


def generate(
    model: Mamba3Transformer,
    prompts: Sequence[Ids],
    *,
    max_new_tokens: int,
    on_tokens: Callable[[Tensor], None] | None = None,
    **how: Any,
) -> list[list[int]]:
    """Continues each prompt by up to ``max_new_tokens`` tokens, its EOS not among them.

    Args:
        on_tokens: called with each step's ids (B,) on the CPU, -1 in a row that has ended.
        how: sampling, ``eos_id``, ``state`` and the rest of :func:`stream`.

    Raises:
        UserError: as :func:`stream`.
    """
    outputs: list[list[int]] = [[] for _ in prompts]
    for ids in stream(model, prompts, max_new_tokens=max_new_tokens, **how):
        for output, token in zip(outputs, ids, strict=True):
            if token is not None:
                output.append(token)
        if on_tokens is not None:
            on_tokens(torch.tensor([-1 if token is None else token for token in ids]))
    return outputs


def generate_command(
    run_dir: Annotated[str, typer.Argument(help="Run folder, or exported folder.")],
    prompt: Annotated[
        str | None, typer.Option(help='Text to continue; "-" reads standard input.')
    ] = None,
    prompt_file: Annotated[str | None, typer.Option(help="File with the text to continue.")] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", help="Ask for one prompt after the other.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0: all.")] = 50,
    top_p: Annotated[
        float, typer.Option(help="Keep the likeliest tokens up to this probability.")
    ] = 1.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: what was said becomes less likely.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    num_samples: Annotated[int, typer.Option(help="Continuations of the prompt.")] = 1,
    stop_at_eos: Annotated[bool, typer.Option(help="End where the model ends the text.")] = True,
    opt_step: Annotated[int | None, typer.Option(help="Checkpoint; default: the newest.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="gpt2, or a tokenizer.json; default: what the run names.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, or auto: bfloat16 on a GPU.")
    ] = "auto",
    bf16_state: Annotated[
        bool, typer.Option("--bf16-state", help="Keep the recurrent state in bfloat16.")
    ] = False,
) -> None:
    """Continue a prompt with a trained model.

    Without a prompt, what is piped in is continued.

    Examples:

    mamba3-lite generate runs/quickstart --prompt "def main("

    mamba3-lite generate runs/quickstart --prompt-file notes.txt --num-samples 3

    mamba3-lite generate runs/quickstart --interactive --temperature 0.6
    """
    from mamba3_lite.inference import console

    how = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k,
        "top_p": top_p, "repetition_penalty": repetition_penalty, "seed": seed,
        "stop_at_eos": stop_at_eos, "bf16_state": bf16_state,
    }  # fmt: skip
    where = {"opt_step": opt_step, "tokenizer": tokenizer, "device": device, "dtype": dtype}
    console.run(
        run_dir, prompt=prompt, prompt_file=prompt_file, interactive=interactive,
        num_samples=num_samples, how=how, load_options=where,
    )  # fmt: skip

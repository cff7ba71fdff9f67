"""Times decoding of the production model on a GPU, one row a batch size, and what goes with it.

    python benchmarks/decode.py --peer benchmarks/peers/transformer_decode.py \\
        --out benchmarks/results/decode.jsonl

Weights are bfloat16, random unless --run names a trained model (a step costs the same; the drift of
a bfloat16 state does not), and the state is float32. Nothing is timed before
every kernel has passed its self-test and whole steps have followed the float32 plain path at least
as closely as the plain path in bfloat16 does. Tokens per second are those of `generate`, greedy,
the host included; graph_us is a step's CUDA graph alone, in_graph_us a step of the graph of several
that greedy decoding replays, kinds_us what each kind of kernel takes
if only that kind runs (they overlap in a step). --plans times every launch plan.
"""

import argparse
import copy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rows

from mamba3_lite.errors import UserError
from mamba3_lite.inference import decode_plans, decoder
from mamba3_lite.inference.decode_plans import Plan
from mamba3_lite.inference.decode_staged import ops_for
from mamba3_lite.inference.decode_step import run_steps
from mamba3_lite.inference.decode_weights import STEPS
from mamba3_lite.inference.decoder import Decoder, PlainDecoder, StepDecoder
from mamba3_lite.inference.generate import choose_dispatch, load_model, prefill, stream
from mamba3_lite.models.arithmetic import matmul_parameters, parameter_count
from mamba3_lite.models.transformer import Mamba3Transformer, ModelConfig

PROMPT_TOKENS = 16
PARITY_STEPS = 20
# How much worse than the plain path in the same precision the kernels may follow the truth.
PARITY_FACTOR = 1.25
STATED_BANDWIDTH = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12}


def make_model(run: str | None, device: torch.device) -> Mamba3Transformer:
    """A trained model, or the production one with random weights; float32."""
    if run is not None:
        return load_model(run, device=device)
    torch.manual_seed(0)
    model = Mamba3Transformer(ModelConfig()).eval()
    choose_dispatch(model, device)
    return model.to(device)


def prompts(cfg: ModelConfig, batch: int, length: int) -> Tensor:
    return torch.randint(
        cfg.vocab_size, (batch, length), generator=torch.Generator().manual_seed(batch + length)
    )


def follow(steps: StepDecoder, state: list[Tensor], ids: Tensor) -> Tensor:
    """Logits (T, B, V) float32 after the columns of ids (B, T)."""
    steps.load(state)
    return torch.stack([steps.step(column).float().clone() for column in ids.unbind(1)])


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def parity_or_exit(
    wide: Mamba3Transformer, narrow: Mamba3Transformer, fast: StepDecoder, batch: int
) -> dict[str, float]:
    """How far whole steps are from the float32 plain path; red parity ends the run."""
    device = wide.embed.weight.device
    ids = prompts(wide.cfg, batch, PROMPT_TOKENS + PARITY_STEPS)
    _, state = prefill(wide, list(ids[:, :PROMPT_TOKENS]))
    rest = ids[:, PROMPT_TOKENS:].to(device)
    truth = follow(PlainDecoder(wide), state, rest)
    found = {
        "decoder": relative(follow(fast, state, rest), truth),
        "plain_path": relative(follow(PlainDecoder(narrow), state, rest), truth),
    }
    if not found["decoder"] <= PARITY_FACTOR * found["plain_path"]:
        sys.exit(f"decode: parity failed at batch {batch} ({found}): nothing is timed")
    return found


def floor_us(cfg: ModelConfig, batch: int, device: str) -> float | None:
    """Microseconds to read every weight once and the state once each way, the mixer unfolded."""
    if device not in STATED_BANDWIDTH:
        return None
    state = 4 * batch * cfg.n_layers * cfg.n_heads * 2 * cfg.state_dim * cfg.head_dim
    n_bytes = 2 * matmul_parameters(cfg) + 2 * state
    return round(1e6 * n_bytes / STATED_BANDWIDTH[device], 1)


def tokens_per_sec(model: Mamba3Transformer, batch: int, count: int, repeats: int) -> list[float]:
    """Of `generate`'s own loop, from the first token to the last; sorted."""
    found = []
    given = list(prompts(model.cfg, batch, PROMPT_TOKENS))
    for _ in range(repeats + 1):
        steps = stream(model, given, max_new_tokens=count, temperature=0)
        next(steps)
        start = time.perf_counter()
        for _ in steps:
            pass
        found.append(batch * (count - 1) / (time.perf_counter() - start))
    return sorted(found[1:])


def first_token_ms(model: Mamba3Transformer, length: int, repeats: int) -> list[float]:
    """Milliseconds from a prompt on the host to the first id there; sorted."""
    found = []
    given = list(prompts(model.cfg, 1, length))
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        next(stream(model, given, max_new_tokens=2, temperature=0))
        found.append(1e3 * (time.perf_counter() - start))
    return sorted(found[1:])


def memory_mib(model: Mamba3Transformer, marks: tuple[int, int]) -> dict[str, float]:
    """Memory in use at two tokens of one text, and the most there ever was."""
    torch.cuda.reset_peak_memory_stats()
    found = {}
    steps = stream(
        model, list(prompts(model.cfg, 1, PROMPT_TOKENS)), max_new_tokens=marks[1], temperature=0
    )
    for count, _ in enumerate(steps, 1):
        if count in marks:
            found[f"at_token_{count}"] = round(torch.cuda.memory_allocated() / 2**20, 3)
    return found | {"peak": round(torch.cuda.max_memory_allocated() / 2**20, 3)}


def state_drift(model: Mamba3Transformer, count: int) -> dict[str, Any]:
    """Relative L2 distance of the logits with a bfloat16 state from those with a float32 one."""
    device = model.embed.weight.device
    ids = prompts(model.cfg, 1, count + PROMPT_TOKENS)
    _, state = prefill(model, list(ids[:, :PROMPT_TOKENS]))
    decoders = [Decoder(model, 1, state_dtype=d) for d in (torch.float32, torch.bfloat16)]
    for each in decoders:
        each.load(state)
    errors = []
    agree = 0
    for column in ids[:, PROMPT_TOKENS:].to(device).unbind(1):
        want, got = (each.step(column) for each in decoders)
        errors.append((got - want).norm() / want.norm())
        agree += int(torch.equal(got.argmax(-1), want.argmax(-1)))
    drift = torch.stack(errors).cpu()
    tenth = max(1, count // 10)
    return {
        "tokens": count, "mean": round(float(drift.mean()), 6),
        "first_tenth": round(float(drift[:tenth].mean()), 6),
        "last_tenth": round(float(drift[-tenth:].mean()), 6), "max": round(float(drift.max()), 6),
        "same_argmax": round(agree / count, 4),
    }  # fmt: skip


def plan_us(model: Mamba3Transformer, batch: int) -> dict[str, float | str]:
    """Microseconds of the graph under every plan, or why there are none."""
    dtype = model.embed.weight.dtype
    found: dict[str, float | str] = {}
    for plan in decode_plans.candidates(model.embed.weight.device, dtype, batch):
        name = "-".join(map(str, plan))
        try:
            found[name] = round(graph_us(Decoder(model, batch, plan=plan)), 1)
        except UserError as problem:
            found[name] = str(problem)
    return found


def part_us(fast: Decoder) -> dict[str, float]:
    """Microseconds that each kind of kernel takes in a step if only that kind runs.

    Empty where one kernel does all.
    """
    found: dict[str, float] = {}
    if fast.plan.resident:
        return found
    ops = ops_for(fast.plan)
    kinds = ("product", "ssd_step", "head")
    for kind in kinds:
        only = copy.copy(ops)
        for other in ("embed", *kinds):
            if other != kind:
                setattr(only, other, _nothing)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_steps(only, fast.weights, fast.buffers, 1)
        found[kind] = round(decoder._microseconds(graph), 1)
    return found


def _nothing(*operands: Tensor, **how: Any) -> None:
    """In the place of an operation."""


def graph_us(fast: Decoder, steps: int = 1) -> float:
    return decoder._microseconds(fast._graphs[steps]) / steps


def measure(
    wide: Mamba3Transformer, model: Mamba3Transformer, batch: int, args: argparse.Namespace
) -> dict[str, Any]:
    """One row of throughput."""
    fast = Decoder(model, batch)
    parity = parity_or_exit(wide, model, fast, batch)
    cfg, name = model.cfg, torch.cuda.get_device_name()
    speeds = tokens_per_sec(model, batch, args.tokens, args.repeats)
    row: dict[str, Any] = {
        "benchmark": "decode",
        "batch": batch,
        "dtype": "bfloat16",
        "state_dtype": "float32",
        "parameters": parameter_count(cfg),
        "tokens": args.tokens,
        "repeats": args.repeats,
        "tokens_per_sec": round(speeds[len(speeds) // 2]),
        "min": round(speeds[0]),
        "max": round(speeds[-1]),
        "graph_us": round(graph_us(fast), 1),
        "steps_in_graph": STEPS,
        "in_graph_us": round(graph_us(fast, STEPS), 1),
        "floor_us": floor_us(cfg, batch, name),
        "plan": dict(zip(Plan._fields, fast.plan, strict=True)),
        "parity_relative_l2": parity,
        "kinds_us": part_us(fast),
    }
    if args.plans:
        row["plans_us"] = plan_us(model, batch)
    return row


def run_peer(script: str) -> dict[str, Any]:
    """What another script prints, in a process of its own."""
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{script} failed:\n{done.stderr[-2000:]}")
    lines = done.stdout.strip().splitlines()
    return {"benchmark": "decode_peer", "script": Path(script).name, "printed": lines}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--batch", nargs="+", type=int, default=[1, 64])
    ap.add_argument("--tokens", type=int, default=1000, help="generated for each throughput")
    ap.add_argument("--repeats", type=int, default=5)
    ap.add_argument("--prompt", type=int, default=32_768, help="tokens before the first one timed")
    ap.add_argument("--far", type=int, default=100_000, help="token at which memory is read again")
    ap.add_argument("--drift", type=int, default=2000, help="steps of the bfloat16 state")
    ap.add_argument("--run", metavar="DIR", help="a trained model; default: random weights")
    ap.add_argument("--plans", action="store_true", help="time every launch plan")
    ap.add_argument("--peer", metavar="FILE", help="a script that prints its speeds, run first")
    ap.add_argument("--commit", help="when the machine has no git checkout")
    ap.add_argument("--out", type=Path, required=True)
    return ap.parse_args(argv)


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available():
        sys.exit("decode needs a CUDA device")
    device = torch.device("cuda")
    facts = rows.environment(args.commit)
    if args.peer:
        rows.append(args.out, run_peer(args.peer), facts)
    wide = make_model(args.run, device)
    model = copy.deepcopy(wide).bfloat16()
    for batch in args.batch:
        try:
            row = measure(wide, model, batch, args)
        except UserError as problem:
            sys.exit(f"decode: {problem} Nothing is timed.")
        rows.append(args.out, row, facts)
    del wide
    row = {"benchmark": "decode_first_token", "prompt_tokens": args.prompt, "repeats": args.repeats}
    times = first_token_ms(model, args.prompt, args.repeats)
    row |= {"median_ms": round(times[len(times) // 2], 2)}
    row |= {"min_ms": round(times[0], 2), "max_ms": round(times[-1], 2)}
    rows.append(args.out, row, facts)
    near = min(1000, args.far - 1)
    row = {"benchmark": "decode_memory", "mib": memory_mib(model, (near, args.far))}
    rows.append(args.out, row, facts)
    row = {"benchmark": "decode_state_drift", "drift": state_drift(model, args.drift)}
    rows.append(args.out, row, facts)


if __name__ == "__main__":
    main()

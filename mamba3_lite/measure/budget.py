"""What a run takes of a GPU and of a disk, by arithmetic and from recorded training steps.

Counts and bytes are arithmetic (:mod:`mamba3_lite.models.arithmetic`). Speed is not: it comes from
a recorded step or nowhere.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from mamba3_lite import env
from mamba3_lite.errors import UserError
from mamba3_lite.models import arithmetic, ssd_fused, ssd_triton
from mamba3_lite.models.transformer import ModelConfig
from mamba3_lite.training import losses
from mamba3_lite.training.config import TrainingConfig


class Measured(NamedTuple):
    """MFU of a recorded training step: ModelConfig's default model, 16 x 2,048 tokens."""

    gpu: str
    dispatch: str
    compiled: bool
    grad_checkpoint: bool | str
    mfu: float
    commit: str


# Rows of benchmarks/results/training_step.jsonl; a test compares.
MEASURED = (
    Measured("H200", "fused", True, False, 0.4713, "8fee53f"),
    Measured("H200", "fused", True, "selective", 0.4628, "8e459c8"),
    Measured("H200", "fused", True, True, 0.3551, "8e459c8"),
    Measured("H200", "fused", False, False, 0.3391, "8e459c8"),
    Measured("H200", "rotated", True, False, 0.1945, "8e459c8"),
    Measured("H200", "rotated", True, True, 0.1468, "8e459c8"),
    Measured("H200", "rotated", False, True, 0.0609, "f49351c"),
    Measured("H200", "pytorch", True, True, 0.0961, "8e459c8"),
    Measured("H200", "pytorch", False, True, 0.0896, "8e459c8"),
    Measured("H200", "triton", True, True, 0.0888, "8e459c8"),
    Measured("H200", "triton", False, True, 0.0806, "f49351c"),
)


class Speed(NamedTuple):
    """An MFU and where it comes from."""

    mfu: float
    basis: str


def planned_dispatch(model: ModelConfig) -> tuple[str, str | None]:
    """The SSD path of a run on a CUDA GPU with Triton, and a note where it is not the one named."""
    name, widest = model.ssd_dispatch, max(model.head_dim, model.state_dim)
    if name == "auto":
        fits = widest <= ssd_fused.LARGEST_DIM
        path = "fused" if fits else "rotated"
        return path, f"ssd_dispatch=auto is taken as {path}; doctor says what it is on a machine"
    if name == "fused" and widest > ssd_fused.LARGEST_DIM:
        raise UserError(
            f"ssd_dispatch='fused' cannot run: a head has {widest} channels or states, at most "
            f"{ssd_fused.LARGEST_DIM} are possible. Use ssd_dispatch='rotated'."
        )
    if name == "triton":
        if env.read("ENABLE_TRITON_KERNELS") != "1":
            return "pytorch", "ssd_dispatch=triton without ENABLE_TRITON_KERNELS=1 runs pytorch"
        problem = ssd_triton._block_dims_problem(model.head_dim, model.state_dim, model.chunk_size)
        if problem is not None:
            return "pytorch", f"ssd_dispatch=triton runs pytorch: {problem}"
    return name, None


def memory_moments(config: TrainingConfig, dispatch: str) -> dict[str, dict[str, int]]:
    """Bytes by part, at each moment of an optimizer step that can be the fullest.

    For one CUDA GPU with Triton, under bf16 autocast; what the allocator hands out, as the log's
    ``peak_mem_gib``. The context of the driver (some 0.5 GB) and fragmentation come on top.
    """
    model, compiled = config.model(), config.compile_model
    counts = arithmetic.parameter_counts(model)
    block = arithmetic.block_memory(model, dispatch=dispatch, compiled=compiled)
    tokens, layers = config.tokens_per_micro_step, model.n_layers
    recomputes = bool(model.grad_checkpoint)
    casts = 2 * sum(counts[part] for part in ("in_proj", "mimo", "out_proj", "ffn"))
    head_gradient, loss = _head_bytes(model, tokens)
    gradients = arithmetic.weight_bytes(model)
    resident = {
        "weights, float32": arithmetic.weight_bytes(model),
        "AdamW moments, float32": arithmetic.optimizer_bytes(model),
    }
    # They are freed at the start of an optimizer step, and there from its first backward pass on.
    before = gradients if config.gradient_accumulation_steps > 1 else 0

    def moment(blocks: int, *, gradients: int, casts: int, **more: int) -> dict[str, int]:
        parts = {
            **resident,
            "gradients, float32": gradients,
            f"{blocks} blocks: SSD": blocks * block.ssd * tokens,
            f"{blocks} blocks: the rest": blocks * block.rest * tokens,
            "bf16 copies of weights": casts,
            **{name.replace("_", " "): size for name, size in more.items()},
        }
        return {name: size for name, size in parts.items() if size}

    one = casts // layers
    # Autocast remembers every cast until the forward pass ends; a compiled block does not ask it.
    cast_forward = 0 if compiled and recomputes else casts
    cast_backward = one if recomputes else casts
    at_work = block.fullest * tokens
    return {
        "head and loss": moment(
            layers, gradients=before, casts=cast_forward, final_norm_head_and_loss=loss
        ),
        "backward of the last block": moment(
            layers - 1, gradients=before or head_gradient, casts=cast_backward,
            one_block_at_work=at_work,
        ),
        "backward of the first block": moment(
            0, gradients=gradients, casts=one, one_block_at_work=at_work
        ),
    }  # fmt: skip


def _head_bytes(model: ModelConfig, tokens: int) -> tuple[int, int]:
    """Gradient of the head, and all that the final norm, the head and its loss hold at once."""
    d = model.d_model
    vocab = model.vocab_size + -model.vocab_size % losses._VOCAB_MULTIPLE
    rows = losses._rows_of_a_piece(tokens, vocab, 2)
    gradient = 4 * vocab * d
    # The final norm is not compiled: two float32 tensors and its bf16 output. Then the output's
    # gradient, targets and losses; the weight in bf16; one piece of logits with its in- and output.
    forward = tokens * (4 * d + 4 * d + 2 * d + 2 * d + 8 + 4)
    forward += gradient + 2 * vocab * d + 2 * rows * vocab + 4 * rows * d
    # Backwards through the norm: five float32 tensors beside those two, and gradients in and out.
    return gradient, max(forward, tokens * 26 * d + gradient)


def fullest(moments: dict[str, dict[str, int]]) -> str:
    """The moment that decides whether a run fits."""
    return max(moments, key=lambda name: sum(moments[name].values()))


def peak_bytes(config: TrainingConfig, dispatch: str) -> int:
    """Predicted peak of allocated memory; see :func:`memory_moments`."""
    return max(sum(parts.values()) for parts in memory_moments(config, dispatch).values())


def expected_speed(config: TrainingConfig, dispatch: str, gpu: str) -> Speed | None:
    """From a recorded step of this GPU and path; None where there is none.

    The recorded model is the seeds' (``ModelConfig``'s defaults) at 16 x 2,048 tokens. A step that
    was recorded with other checkpointing is scaled by the FLOPs of recomputation.
    """
    model = config.model()
    rows = [
        row
        for row in MEASURED
        if (row.gpu, row.dispatch, row.compiled) == (gpu, dispatch, config.compile_model)
    ]
    # The row of the same checkpointing first, else one that recomputes no product either.
    rows.sort(
        key=lambda row: (row.grad_checkpoint != model.grad_checkpoint, str(row.grad_checkpoint))
    )
    if not rows:
        return None
    row, reference = rows[0], ModelConfig()
    basis = f"measured at {row.commit}"
    if row.grad_checkpoint == model.grad_checkpoint:
        return Speed(row.mfu, basis)

    def flops(grad_checkpoint: bool | str) -> int:
        return arithmetic.training_flops_per_token(
            replace(reference, grad_checkpoint=grad_checkpoint)
        )

    scale = flops(row.grad_checkpoint) / flops(model.grad_checkpoint)
    how = "with" if row.grad_checkpoint else "without"
    return Speed(row.mfu * scale, f"{basis} {how} recomputation, scaled by FLOPs")


def disk(config: TrainingConfig) -> dict[str, Any]:
    """Bytes of a checkpoint, how many a run keeps, and what it needs at most."""
    model = config.model()
    sizes = {
        "weights": arithmetic.weight_bytes(model),
        "optimizer": arithmetic.optimizer_bytes(model),
    }
    saved = {*range(config.save_every, config.max_steps, config.save_every), config.max_steps}
    newest = set(sorted(saved)[-config.keep_last :]) if config.keep_last else saved
    every = {step for step in saved if config.keep_every and step % config.keep_every == 0}
    kept = newest | every
    at_most = min(len(saved), len(kept) + 1)  # an old one goes when the new one is complete
    return {
        "checkpoint_bytes": sizes,
        "saved": len(saved),
        "kept": len(kept),
        "needed_bytes": at_most * sum(sizes.values()),
    }

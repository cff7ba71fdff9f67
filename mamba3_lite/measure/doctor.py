"""The command ``doctor``: can this machine train, what would each SSD path do here, and why.

It looks and asks, and trains nothing; nothing optional needs to be there.
"""

import contextlib
import importlib.util
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mamba3_lite import env, hardware
from mamba3_lite.errors import UserError
from mamba3_lite.measure import budget
from mamba3_lite.models import arithmetic, ssd_backends, ssd_plans
from mamba3_lite.models.transformer import ModelConfig
from mamba3_lite.schema import find_config
from mamba3_lite.training.compile import compile_refusal
from mamba3_lite.training.config import TrainingConfig, load_training_config

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
# Extra of the package: what it lets a user do, and the module it brings.
EXTRAS = {
    "tensorboard": ("tensorboard", "TensorBoard files beside the log"),
    "wandb": ("wandb", "logging to W&B"),
    "plots": ("matplotlib", "pictures"),
    "tokenizers": ("tokenizers", "tokenizer.json files"),
    "parquet": ("pyarrow", "Parquet files as a source"),
    "zstd": ("zstandard", ".zst files as a source"),
    "datasets": ("datasets", "Hugging Face data sets as a source"),
    "dedup": ("datasketch", "near-duplicate removal"),
    "hf": ("transformers", "an export seen from transformers"),
    "eval": ("lm_eval", "evaluation by tasks of lm-evaluation-harness"),
}
_ROOMY_BYTES = 20 * 10**9


class Finding(NamedTuple):
    """One thing looked at; ``problem`` is what the user must mend before training, a sentence."""

    topic: str
    text: str
    problem: str | None = None


def examine(config: TrainingConfig | None = None) -> list[Finding]:
    """Everything there is to know, in the order of reading.

    Args:
        config: a run to ask for; without it the seed model, whose data and folder nobody asks for.
    """
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        there = torch.cuda.is_available()
    cuda_says = [str(w.message).split(" (Triggered")[0] for w in heard]
    device = torch.device("cuda" if there else "cpu")
    findings = [_python(), _torch(), _triton(device)]
    findings += _gpus(there, cuda_says)
    findings += list(_paths(config.model() if config else ModelConfig(), device, config))
    findings += [_compile(device, config), _plan_cache()]
    findings += [_disk(config)] + ([] if config is None else list(_run(config, device)))
    return findings + [_environment(), *_extras()]


def _python() -> Finding:
    problem = None
    if sys.version_info < OLDEST_PYTHON:
        problem = f"Python {'.'.join(map(str, OLDEST_PYTHON))} or newer is needed"
    return Finding("Python", f"{platform.python_version()} on {platform.platform()}", problem)


def _torch() -> Finding:
    version = torch.__version__
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    problem = None
    if found < OLDEST_TORCH:
        problem = (
            f"torch {'.'.join(map(str, OLDEST_TORCH))} or newer is needed: pip install -U torch"
        )
    return Finding("torch", f"{version}, {built}", problem)


def _triton(device: torch.device) -> Finding:
    """Installed or not; on a GPU also whether it could build what it launches kernels with."""
    on_gpu = device.type == "cuda"
    if importlib.util.find_spec("triton") is None:
        return Finding("Triton", "not installed")
    problem = None
    if on_gpu and not any(map(shutil.which, filter(None, (env.read("CC"), "gcc", "clang")))):
        problem = "Triton finds no C compiler: install gcc"
    elif on_gpu and not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        problem = "Triton finds no Python headers: install them (Debian and Ubuntu: python3-dev)"
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    return Finding("Triton", version, problem)


def _nvidia_smi() -> list[str]:
    """Name and driver of every NVIDIA GPU, as its own tool says; empty where it says nothing."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return []
    query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [line.strip() for line in lines if line.strip()]


def _gpus(there: bool, cuda_says: list[str]) -> list[Finding]:
    seen = _nvidia_smi()
    if not there:
        text = "none that torch can use: it would train in float32 on the CPU"
        problem = None
        if seen and torch.version.cuda is None:
            problem = f"this torch cannot use the {seen[0].split(',')[0]}: install a CUDA build"
        elif seen or cuda_says:
            said = cuda_says[0] if cuda_says else "is CUDA_VISIBLE_DEVICES set?"
            problem = f"torch finds no GPU: {said}"
        return [Finding("GPU", text, problem), _cpu()]
    findings = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        peak = hardware.peak_bf16_flops(properties.name)
        stated = (
            f"stated bf16 peak {peak / 1e12:.0f} TFLOP/s" if peak else "no peak on record: no MFU"
        )
        free, _ = torch.cuda.mem_get_info(index)
        findings.append(
            Finding(
                f"GPU {index}",
                f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB ({free / 2**30:.1f} "
                f"free), compute capability {properties.major}.{properties.minor}, {stated}",
            )
        )
    driver = {line.rpartition(",")[2].strip() for line in seen}
    return [*findings, Finding("driver", ", ".join(sorted(driver)) or "unknown"), _cpu()]


def _cpu() -> Finding:
    return Finding("CPU", f"{hardware.device_name('cpu')}, {os.cpu_count()} threads")


def _shape(model: ModelConfig, device: torch.device) -> ssd_backends.Shape:
    return ssd_backends.Shape(
        model.head_dim, model.state_dim, model.chunk_size, device, model.n_heads
    )


def _paths(
    model: ModelConfig, device: torch.device, config: TrainingConfig | None
) -> Iterator[Finding]:
    """Each SSD path and "auto", for the model's heads; a path that a run names must be possible."""
    shape = _shape(model, device)
    for name, backend in ssd_backends.BACKENDS.items():
        refusal = backend.refuse(shape)
        text = f"runs on {device.type}" if refusal is None else f"refuses: {refusal}"
        problem = None
        if name == "triton" and refusal is None and env.read("ENABLE_TRITON_KERNELS") != "1":
            text += ", but only with ENABLE_TRITON_KERNELS=1; without it pytorch runs"
        if name == "triton" and refusal is not None:
            text += " Pytorch would run in its place."
        elif refusal is not None and config is not None and model.ssd_dispatch == name:
            problem = f"model.ssd_dispatch is {name}, which cannot run here: {refusal}"
        yield Finding(f"ssd_dispatch: {name}", text, problem)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            text = f"takes {ssd_backends.resolve('auto', shape).name}"
        except UserError as problem:
            yield Finding("ssd_dispatch: auto", "finds nothing", str(problem))
            return
    why = said.getvalue().strip().partition("(")[2].removesuffix(")")
    yield Finding("ssd_dispatch: auto", f"{text} ({why})" if why else text)


def _compile(device: torch.device, config: TrainingConfig | None) -> Finding:
    topic, refusal = "torch.compile", compile_refusal(device)
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        refusal = "on a GPU it needs Triton (pip install triton)"
    if refusal is None:
        return Finding(topic, "possible, block by block")
    if device.type == "cpu":
        return Finding(topic, f"not possible: {refusal}; a run says so and goes on without")
    wanted = config is None or config.compile_model
    problem = f"torch.compile is not possible: {refusal}; or set training.compile to false"
    return Finding(topic, f"not possible: {refusal}", problem if wanted else None)


def _plan_cache() -> Finding:
    """What the fused kernels remember; it costs a test at every start where it cannot be kept."""
    topic = "plans of the fused kernels"
    try:
        path = ssd_plans._path()
    except RuntimeError:
        return Finding(topic, "not kept: this user has no home directory; set MAMBA3_LITE_CACHE")
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        return Finding(topic, f"not kept: {folder} cannot be written; set MAMBA3_LITE_CACHE")
    return Finding(topic, f"{len(ssd_plans._entries())} remembered in {path}")


def _disk(config: TrainingConfig | None) -> Finding:
    """Room where checkpoints go; a run asks for three of them before it starts."""
    place = Path("." if config is None else config.checkpoint_dir).absolute()
    folder = place
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = f"{free / 1e9:.1f} GB free for {place}"
    if config is None:
        few = "" if free >= _ROOMY_BYTES else "; checkpoints of the 434 M model take 5.2 GB each"
        return Finding("disk", text + few)
    model = config.model()
    one = arithmetic.weight_bytes(model) + arithmetic.optimizer_bytes(model)
    needed = budget.disk(config)["needed_bytes"]
    text += f"; a checkpoint takes {one / 1e9:.2f} GB, the run at most {needed / 1e9:.2f}"
    problem = None
    if free < max(3 * one, needed):
        problem = f"too little room for {place}: {max(3 * one, needed) / 1e9:.2f} GB are needed"
    return Finding("disk", text, problem)


def _run(config: TrainingConfig, device: torch.device) -> Iterator[Finding]:
    """What else a run needs: its data, and its memory on the GPU that is here."""
    found = os.path.exists(config.data_path)
    missing = f"no data at {config.data_path}: prepare them, or set data.train_data_path"
    yield Finding(
        "data", f"{config.data_path}{'' if found else ', not there'}", None if found else missing
    )
    if device.type != "cuda":
        return
    model = config.model()
    try:
        path = budget.planned_dispatch(model)[0]
        if model.ssd_dispatch == "auto":
            path = ssd_backends.resolve("auto", _shape(model, device)).name
    except UserError:
        return  # the path's own finding says why
    need = budget.peak_bytes(config, path)
    total = torch.cuda.get_device_properties(device).total_memory
    text = f"{need / 2**30:.1f} GiB predicted of {total / 2**30:.1f}"
    problem = None
    if need > total:
        problem = f"the run does not fit the GPU: {text}; lower training.micro_batch_size"
    yield Finding("memory", text, problem)


def _environment() -> Finding:
    given = [f"{v.name}={env.read(v.name)}" for v in env.VARIABLES if env.is_set(v.name)]
    problem = None
    for name in ("TRITON_PER_CHUNK_NUM_STAGES", "TRITON_PER_CHUNK_NUM_WARPS"):
        try:
            env.read_int(name)
        except UserError as wrong:
            problem = str(wrong)
    return Finding("environment variables", ", ".join(given) or "none of ours is set", problem)


def _extras() -> Iterator[Finding]:
    for extra, (module, use) in EXTRAS.items():
        there = importlib.util.find_spec(module) is not None
        text = f"{use}: there" if there else f'{use}: pip install "mamba3-lite[{extra}]"'
        yield Finding(f"extra {extra}", text)


def as_record(findings: list[Finding]) -> dict[str, Any]:
    """Ready for JSON."""
    return {
        "can_train": not any(finding.problem for finding in findings),
        "findings": [finding._asdict() for finding in findings],
    }


def doctor_command(
    config: Annotated[
        str | None, typer.Option(help="Training YAML: also whether its run can start here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say whether this machine can train, and what each SSD path does here and why.

    On a GPU the fused kernels are tested and timed once, as at the start of a run.

    Examples:

    mamba3-lite doctor

    mamba3-lite doctor --config configs/pretrain_h200_434m.yaml

    Exit codes: 0 can train here, 1 something has to be mended first, 2 user error.
    """
    settings = None if config is None else load_training_config(find_config(config))[0]
    findings = examine(settings)
    record = as_record(findings)
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        table = Table("", "here")
        for finding in findings:
            table.add_row(escape(finding.topic), escape(finding.text))
        Console().print(table)
        for finding in findings:
            if finding.problem:
                print(f"[mend] {finding.problem}")
        print("this machine can train" if record["can_train"] else "mend this first")
    raise typer.Exit(0 if record["can_train"] else 1)

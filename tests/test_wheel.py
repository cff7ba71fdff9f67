"""The wheel holds the package and nothing else, and trains where no checkout is."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

CONFIG = """
model:
  vocab_size: 64
  d_model: 32
  n_layers: 1
  n_heads: 2
  head_dim: 16
  state_dim: 8
  chunk_size: 16
  ffn_dim: 64
  max_seq_len: 32
training:
  micro_batch_size: 2
  gradient_accumulation_steps: 1
  total_steps: 3
  warmup_steps: 1
  lr: 1e-3
  compile: false
  save_interval: 3
  log_interval: 1
  save_dir: {folder}/checkpoints
data:
  train_data_path: {folder}/tokens.bin
"""

# An editable install puts the checkout on sys.path; here it must not be a second source.
RUN_INSTALLED = """
import pathlib, runpy, sys
checkout, installed = map(pathlib.Path, sys.argv[1:3])
sys.path[:] = [p for p in sys.path if not pathlib.Path(p).resolve() == checkout]
import mamba3_lite
assert pathlib.Path(mamba3_lite.__file__).is_relative_to(installed), mamba3_lite.__file__
sys.argv[:3] = ["mamba3-lite"]
runpy.run_module("mamba3_lite.cli", run_name="__main__")
"""


def succeed(command: list[str], *, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Output of a command (both streams), which must end with 0."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    succeed([*build, str(ROOT)], cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def write_job(folder: Path) -> Path:
    """A three-step job: one file of tokens and the configuration that names it."""
    generator = torch.Generator().manual_seed(1)
    torch.save(torch.randint(0, 64, (1000,), generator=generator), folder / "tokens.bin")
    config = folder / "tiny.yaml"
    config.write_text(CONFIG.format(folder=folder), encoding="utf-8")
    return config


def assert_trained(folder: Path, output: str) -> None:
    opt_steps = [int(n) for n in re.findall(r"step=\s*(\d+) \| loss=\d", output)]
    assert opt_steps == [1, 2, 3], output
    saved = {path.name for path in (folder / "checkpoints").iterdir()}
    assert {"model_step_3.safetensors", "optim_step_3.pt", "meta_step_3.json"} <= saved


def test_the_wheel_is_pure_python_and_holds_the_package_only(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    dist_info = wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"
    assert {name.split("/")[0] for name in names} == {"mamba3_lite", dist_info}


def test_the_wheel_holds_every_module_asset_and_configuration(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "mamba3_lite"
    owed = [*package.rglob("*.py"), *(package / "data" / "assets").iterdir()]
    assert {str(path.relative_to(ROOT)) for path in owed} <= names
    configs = {f"mamba3_lite/{path.relative_to(ROOT)}" for path in ROOT.glob("configs/**/*.yaml")}
    assert "mamba3_lite/configs/pretrain_a100_400m.yaml" in configs
    assert configs <= names


def test_the_installed_wheel_trains_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    installed, folder = tmp_path / "site", tmp_path / "job"
    folder.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    succeed([*pip, "--target", str(installed), str(wheel)], cwd=tmp_path)
    runner = folder / "run_installed.py"
    runner.write_text(RUN_INSTALLED, encoding="utf-8")
    config = write_job(folder)
    command = [sys.executable, str(runner), str(ROOT), str(installed)]
    output = succeed(
        [*command, "pretrain", "--config", str(config)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed)},
    )
    assert_trained(folder, output)


@pytest.mark.campaign
def test_the_wheel_with_its_dependencies_trains_in_a_fresh_environment(
    wheel: Path, tmp_path: Path
) -> None:
    """Nothing shared with this interpreter: every dependency comes from the package index."""
    environment, folder = tmp_path / "venv", tmp_path / "job"
    folder.mkdir()
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(constraints), str(wheel)]
    succeed(install, cwd=folder, env=clean)
    where = "import mamba3_lite; print(mamba3_lite.__file__)"
    imported = succeed([str(python), "-c", where], cwd=folder, env=clean)
    assert Path(imported.strip()).is_relative_to(environment)
    config = write_job(folder)
    script = environment / "bin" / "mamba3-lite"
    output = succeed([str(script), "pretrain", "--config", str(config)], cwd=folder, env=clean)
    assert_trained(folder, output)

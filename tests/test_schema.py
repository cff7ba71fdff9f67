"""YAML, environment and command line into one typed configuration, with each value's source."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import mamba3_lite
from mamba3_lite import cli, schema
from mamba3_lite.errors import UserError
from mamba3_lite.models.transformer import ModelConfig
from mamba3_lite.schema import keys_of, nearest, read_config, typed
from mamba3_lite.training import command
from mamba3_lite.training import config as module
from mamba3_lite.training.config import (
    TrainingConfig,
    check_resume,
    load_training_config,
    validate,
)

CONFIGS = sorted((Path(mamba3_lite.__file__).resolve().parents[1] / "configs").glob("*.yaml"))

CONTRACT = {
    "model": {
        "vocab_size": 50257, "d_model": 1024, "n_layers": 28, "n_heads": 16, "head_dim": 64,
        "state_dim": 64, "chunk_size": 64, "ffn_dim": 2048, "max_seq_len": 2048,
        "weight_tying": True, "rms_norm_eps": 1e-5, "init_std": 0.02,
    },
    "training": {
        "micro_batch_size": 16, "gradient_accumulation_steps": 2, "total_steps": 256000,
        "warmup_steps": 2000, "lr": 3e-4, "min_lr_ratio": 0.05, "weight_decay": 0.1, "beta1": 0.9,
        "beta2": 0.95, "grad_clip": 1.0, "grad_checkpoint": True, "compile": True,
        "compile_mode": "max-autotune", "save_interval": 4000, "log_interval": 50,
        "nan_guard": True, "nan_guard_max_consecutive": 5, "save_dir": "checkpoints/pretrain",
    },
    "data": {
        "tokenizer": "gpt2", "shard_size_tokens": 50000000, "max_tokens": 8000000000,
        "data_mix": "mamba2-default", "train_data_path": "data/pretrain_chinchilla",
    },
}  # fmt: skip


@dataclass
class Toy:
    """One field of each kind."""

    count: int = 1
    rate: float = 0.5
    flag: bool = False
    name: str = "x"
    sizes: list[int] = dataclasses.field(default_factory=lambda: [1])


TOY = {"toy": keys_of("toy", Toy)}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("rate: 3e-4", "rate", 3e-4),
        ("rate: 1E5", "rate", 1e5),
        ("rate: 2", "rate", 2.0),
        ("rate: .inf", "rate", float("inf")),
        ("count: 8000000000", "count", 8_000_000_000),
        ("count: 50_000", "count", 50_000),
        ("count: -3", "count", -3),
        ("flag: true", "flag", True),
        ("name: '7'", "name", "7"),
        ("name: ''", "name", ""),
        ("sizes: [3, 4]", "sizes", [3, 4]),
    ],
)
@pytest.mark.filterwarnings("error")
def test_values_are_typed(line: str, name: str, value: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", f"toy: {{{line}}}\n")
    from_file = read_config(path, TOY).values["toy"][name]
    key, _, text = line.partition(": ")
    from_override = read_config(None, TOY, overrides=[f"toy.{key}={text}"]).values["toy"][name]
    assert from_file == from_override == value
    assert type(from_file) is type(from_override) is type(value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 1.5, "needs a whole number, got 1.5"),
        ("count", 2.0, "needs a whole number, got 2.0"),
        ("count", True, "needs a whole number, got true"),
        ("count", "5", "needs a whole number, got '5'"),
        ("rate", "3e-4", "needs a number, got '3e-4'"),
        ("rate", False, "needs a number, got false"),
        ("rate", [1], "needs a number, got [1]"),
        ("flag", 1, "needs true or false, got 1"),
        ("flag", "true", "needs true or false, got 'true'"),
        ("name", 7, "needs a string, got 7; put it in quotes"),
        ("name", {"a": 1}, "needs a string, got {'a': 1}"),
        ("name", None, "needs a string, got nothing"),
        ("sizes", [1, "two"], "needs a value of type list, got [1, 'two']"),
        ("sizes", 3, "needs a value of type list, got 3"),
    ],
)
def test_values_of_another_type_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        typed(Toy, name, value)
    assert str(caught.value) == message


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(UserError) as caught:
        typed(Toy, "count", "x" * 10_000)
    assert len(str(caught.value)) < 200


def test_nearest_names() -> None:
    assert nearest("warmup_step", ["lr", "warmup_steps"]) == " (did you mean 'warmup_steps'?)"
    assert nearest("zzz", ["lr", "warmup_steps"]) == ""


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("training.lrr=1", "(did you mean 'lr'?)"),
        ("training.max_grad_norm=1", "(did you mean 'grad_clip'?)"),
        ("training.batch_size=1", "(did you mean 'micro_batch_size'?)"),
        ("training.d_model=1", "(it belongs to section 'model')"),
        ("model.lr=1", "(it belongs to section 'training')"),
        ("traning.lr=1", "(did you mean 'training'?)"),
        ("data.qqq=1", "(keys: tokenizer, shard_size_tokens, "),
        ("qqq.lr=1", "(sections: model, training, data, parallel)"),
    ],
)
def test_an_unknown_name_says_where_to_go(override: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        load_training_config(None, [override])
    assert hint in str(caught.value) and "on the command line" in str(caught.value)


def test_all_problems_come_in_one_message(tmp_path: Path) -> None:
    base = write(tmp_path / "base.yaml", "model: {d_model: wide}\nextra: {}\n")
    path = write(
        tmp_path / "c.yaml", "base: base.yaml\ntraining: {lrr: 1, lr: -1, total_steps: 1.5}\n"
    )
    with pytest.raises(UserError) as caught:
        load_training_config(path, ["training.beta1=2", "nonsense"])
    message = str(caught.value)
    assert message.startswith("7 problems: ") and "\n" not in message
    for part in (
        f"'model.d_model' in {base} needs a whole number",
        f"unknown section 'extra' in {base}",
        f"unknown key 'training.lrr' in {path}",
        f"'training.lr' in {path} must be a positive number, got -1.0",
        f"'training.total_steps' in {path} needs a whole number, got 1.5",
        "'training.beta1' on the command line must be at least 0 and below 1, got 2.0",
        "override 'nonsense' must look like section.key=value",
    ):
        assert part in message


def test_base_files_are_read_first_and_relative_to_their_child(tmp_path: Path) -> None:
    grand = write(tmp_path / "grand.yaml", "toy: {count: 1, rate: 1.0, name: grand}\n")
    base = write(tmp_path / "shared" / "base.yaml", "base: ../grand.yaml\ntoy: {rate: 2.0}\n")
    child = write(tmp_path / "runs" / "child.yaml", "base: ../shared/base.yaml\ntoy: {name: me}\n")
    resolved = read_config(child, TOY)
    assert resolved.values == {"toy": {"count": 1, "rate": 2.0, "name": "me"}}
    sources = {key: Path(source).resolve() for key, source in resolved.sources.items()}
    assert sources == {"toy.count": grand, "toy.rate": base, "toy.name": child}


def test_two_children_may_share_a_base_but_no_file_is_its_own(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "base: b.yaml\n")
    write(tmp_path / "b.yaml", "base: a.yaml\n")
    with pytest.raises(UserError, match=r"in a circle .*a\.yaml -> .*b\.yaml -> .*a\.yaml"):
        read_config(tmp_path / "a.yaml", TOY)
    write(tmp_path / "b.yaml", "toy: {count: 4}\n")
    assert read_config(tmp_path / "a.yaml", TOY).values["toy"]["count"] == 4


def test_precedence_and_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write(tmp_path / "base.yaml", "training: {compile_mode: default}\n")
    child = write(tmp_path / "c.yaml", "base: base.yaml\ntraining: {compile_mode: max-autotune}\n")

    def mode(*arguments: Any) -> tuple[str, str | None]:
        config, sources = load_training_config(*arguments)
        return config.compile_mode, sources.get("training.compile_mode")

    assert mode(None) == ("max-autotune", None)
    assert mode(base) == ("default", str(base))
    assert mode(child) == ("max-autotune", str(child))
    monkeypatch.setenv("TORCH_COMPILE_MODE", "reduce-overhead")
    assert mode(child) == ("reduce-overhead", "environment variable TORCH_COMPILE_MODE")
    override = ["training.compile_mode=max-autotune-no-cudagraphs"]
    assert mode(child, override) == ("max-autotune-no-cudagraphs", schema.COMMAND_LINE)


def test_references_inside_a_file_are_resolved(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "toy: {count: 3, name: 'n${toy.count}'}\n")
    assert read_config(path, TOY).values["toy"]["name"] == "n3"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
@pytest.mark.filterwarnings("error")
def test_every_shipped_yaml_loads(path: Path) -> None:
    config, sources = load_training_config(path)
    validate(config)
    assert str(path) in sources.values()
    assert set(sources.values()) <= set(map(str, CONFIGS))


def test_the_production_yaml_has_the_keys_and_values_of_the_contract() -> None:
    (path,) = [path for path in CONFIGS if path.name == "pretrain_a100_400m.yaml"]
    raw = yaml.safe_load(path.read_text())
    assert {section: list(body) for section, body in raw.items()} == {
        section: list(body) for section, body in CONTRACT.items()
    }
    assert [len(body) for body in raw.values()] == [12, 18, 5]
    config, _ = load_training_config(path)
    owners = {"model": config.model(), "training": config, "data": config.data}
    for section, body in CONTRACT.items():
        for name, value in body.items():
            key = module.SECTIONS[section][name]
            owner = config if key.owner == "training" else owners[key.owner]
            got = getattr(owner, key.field)
            assert (got, type(got)) == (value, type(value)), name
    assert config.model().ssd_dispatch == "pytorch"
    assert config.tokens_per_step == 65_536
    assert config.total_tokens == 16_777_216_000


def test_the_h200_yaml_trains_the_seed_model_once_over_8_billion_tokens() -> None:
    a100, h200 = (
        load_training_config(path)[0]
        for name in ("pretrain_a100_400m.yaml", "pretrain_h200_434m.yaml")
        for path in CONFIGS
        if path.name == name
    )
    fast = {"ssd_dispatch": "auto", "grad_checkpoint": False}
    assert h200.model() == dataclasses.replace(a100.model(), **fast)
    assert h200.compile_model
    assert h200.tokens_per_step == 65_536
    # Not one optimizer step more than the tokens suffice for.
    assert 0 <= h200.data.max_tokens - h200.total_tokens < h200.tokens_per_step
    assert h200.data.max_tokens == 8_000_000_000


def test_a_new_model_field_is_a_yaml_key(tmp_path: Path) -> None:
    extended = dataclasses.make_dataclass(
        "Extended", [("window", int, dataclasses.field(default=0))], bases=(ModelConfig,)
    )
    assert set(module.SECTIONS["model"]) == {f.name for f in dataclasses.fields(ModelConfig)}
    sections = {**module.SECTIONS, "model": keys_of("model", extended)}
    path = write(tmp_path / "c.yaml", "model: {window: 128, d_model: 64}\n")
    assert read_config(path, sections).values["model"] == {"window": 128, "d_model": 64}
    with pytest.raises(UserError, match=r"'model.window' on the command line needs a whole number"):
        read_config(path, sections, overrides=["model.window=1.5"])
    with pytest.raises(UserError, match=r"unknown key 'model.window'"):
        read_config(path, module.SECTIONS)


@pytest.mark.parametrize(
    ("model", "training", "flag", "expected"),
    [
        ("", "", False, True),  # the trainer's default is true, the model's own is false
        ("", "grad_checkpoint: false", False, False),
        ("grad_checkpoint: false", "", False, False),
        ("grad_checkpoint: true", "grad_checkpoint: false", False, True),
        ("", "", True, False),
        ("", "grad_checkpoint: true", True, False),
        ("grad_checkpoint: false", "", True, False),
        ("grad_checkpoint: true", "", True, True),
    ],
)
def test_grad_checkpoint(
    model: str,
    training: str,
    flag: bool,
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ModelConfig().grad_checkpoint is False
    path = write(tmp_path / "c.yaml", f"model: {{{model}}}\ntraining: {{{training}}}\n")
    built: list[TrainingConfig] = []

    class Recorder:
        def __init__(self, config: TrainingConfig, **options: Any) -> None:
            built.append(config)

        def train(self) -> int:
            return 0

    monkeypatch.setattr(command, "Pretrainer", Recorder)
    with pytest.raises(SystemExit) as stop:
        cli.main(["pretrain", "--config", str(path), *(["--no-checkpoint"] if flag else [])])
    assert stop.value.code == 0
    assert built[0].model().grad_checkpoint is expected
    # One line where the command line does not have the last word, and only there.
    said = [line for line in capsys.readouterr().out.splitlines() if "--no-checkpoint" in line]
    assert len(said) == (flag and expected)
    assert all("model.grad_checkpoint" in line for line in said)


def saved(**changes: Any) -> dict[str, Any]:
    """What a checkpoint's meta file holds of the configuration."""
    return dataclasses.asdict(dataclasses.replace(TrainingConfig(), **changes))


def test_unchanged_settings_resume_without_a_word() -> None:
    assert check_resume(saved(), TrainingConfig()) == []


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"lr": 1e-3}, "training.lr: 0.0003 -> 0.001"),
        ({"max_steps": 300_000}, "training.total_steps: 256000 -> 300000"),
        ({"data_path": "moved"}, "data.train_data_path: 'data/pretrain_data.bin' -> 'moved'"),
        ({"model_config": {"chunk_size": 128}}, "model.chunk_size: 64 -> 128"),
        (
            {"batch_size": 8, "gradient_accumulation_steps": 4},
            "training.micro_batch_size: 16 -> 8",
        ),
    ],
)
def test_free_and_safe_changes_are_noted(changes: dict[str, Any], note: str) -> None:
    assert note in check_resume(saved(), dataclasses.replace(TrainingConfig(), **changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "training.seed: 0 -> 1"),
        ({"max_seq_len": 1024}, "model.max_seq_len: 2048 -> 1024"),
        ({"vocab_size": 500}, "model.vocab_size: 50257 -> 500"),
        ({"data_order": "shuffled"}, "data.order: 'sequential' -> 'shuffled'"),
        ({"model_config": {"n_layers": 2}}, "model.n_layers: 28 -> 2"),
        ({"batch_size": 8}, "32 -> 16"),
    ],
)
def test_refused_changes_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match="Cannot resume") as caught:
        check_resume(saved(), dataclasses.replace(TrainingConfig(), **changes))
    assert named in str(caught.value)


def test_a_setting_that_an_old_checkpoint_lacks_had_its_default() -> None:
    old = saved()
    del old["seed"], old["keep_every"]
    assert check_resume(old, TrainingConfig()) == []
    assert check_resume(old, TrainingConfig(keep_every=7)) == ["training.keep_every: 0 -> 7"]
    with pytest.raises(UserError, match=r"training.seed: 0 -> 3"):
        check_resume(old, TrainingConfig(seed=3))

"""The settings of `prepare` as YAML, and the command that reads them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from mamba3_lite.cli import main
from mamba3_lite.data.config import check_job, load_job
from mamba3_lite.data.dataset import PretrainDataset
from mamba3_lite.errors import UserError
from tests.data_jobs import job, jsonl, run, source, texts, tokens

ROOT = Path(__file__).resolve().parents[1]


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content))
    return path


def test_every_section_is_typed(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mix.yaml",
        {
            "prepare": {
                "out": "o",
                "max_tokens": 1000,
                "val_fraction": 0,
                "on_exhausted": "repeat",
            },
            "clean": {"max_digits": 0.25},
            "dedup": {"near": True},
            "sources": [
                {"name": "a", "weight": 1, "paths": "x.txt", "suffixes": [".log", ".txt"]},
                {"name": "b", "dataset": "who/what", "field": "a.b", "fields": ["q", "r"]},
            ],
        },
    )
    made = load_job(path)
    assert (made.prepare.max_tokens, made.prepare.val_fraction) == (1000, 0.0)
    assert made.prepare.tokenizer == "gpt2" and made.prepare.on_exhausted == "repeat"
    assert made.clean.max_digits == 0.25 and made.clean.enabled
    assert made.dedup.near and made.dedup.exact
    first, second = made.sources
    assert (first.paths, first.suffixes, first.weight) == (("x.txt",), (".log", ".txt"), 1.0)
    assert (second.dataset, second.field, second.fields) == ("who/what", "a.b", ("q", "r"))
    assert made.train_path == Path("o/train") and made.val_path is None
    check_job(made)


def test_a_base_file_is_read_first(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", {"prepare": {"seed": 5, "out": "o"}, "sources": [{"name": "a"}]})
    made = load_job(write(tmp_path / "b.yaml", {"base": "base.yaml", "prepare": {"out": "p"}}))
    assert (made.prepare.seed, made.prepare.out, made.sources[0].name) == (5, "p", "a")


def test_all_problems_come_in_one_message(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mix.yaml",
        {
            "prepare": {"max_token": 3, "seed": "x"},
            "cleen": {},
            "dedup": [1],
            "sources": [{"weight": 1}, {"name": "a", "paths": [3], "feild": "x"}],
        },
    )
    with pytest.raises(UserError) as caught:
        load_job(path)
    message = str(caught.value)
    for problem in (
        "7 problems: ",
        f"unknown key 'prepare.max_token' in {path} (did you mean 'max_tokens'?)",
        f"'prepare.seed' in {path} needs a whole number, got 'x'",
        f"unknown section 'cleen' in {path} (did you mean 'clean'?)",
        f"section 'dedup' in {path} must hold key: value pairs",
        f"'sources[0]' in {path} needs a name",
        f"'sources[1].paths' in {path} needs a string or a list of strings, got [3]",
        f"unknown key 'sources[1].feild' in {path} (did you mean 'field'?)",
    ):
        assert problem in message
    with pytest.raises(UserError, match="must be a list of sources"):
        load_job(write(path, {"sources": {"name": "a"}}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"val_fraction": 1.0}, "val_fraction must be at least 0 and below 1, not 1.0"),
        ({"shard_size_tokens": 0}, "shard_size_tokens must be at least 1"),
        ({"max_tokens": 1}, "max_tokens must be at least 2"),
        ({"workers": -1}, "workers must be 0 or more"),
        ({"seed": -1}, "seed must be between"),
        ({"on_exhausted": "stopp"}, "one of stop, repeat, continue .did you mean 'stop'"),
        ({"invalid_utf8": "no"}, "invalid_utf8 must be one of replace, skip, fail"),
    ],
)
def test_ranges(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        check_job(job(tmp_path, source(tmp_path / "a.txt"), **changes))


def test_sources_are_checked_together(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    bad = [source(path, 0.0), source(path), source(path, name="../b"), source(path, float("inf"))]
    with pytest.raises(UserError) as caught:
        check_job(job(tmp_path, *bad))
    for problem in (
        "5 problems",
        "weight of source 'a' must be",
        "'a' is used twice",
        "'../b' may",
    ):
        assert problem in str(caught.value)
    with pytest.raises(UserError, match="no sources"):
        check_job(job(tmp_path))


def test_the_shipped_configurations_load() -> None:
    made = load_job(ROOT / "configs" / "data" / "mamba2-default.yaml")
    check_job(made)
    weights = {entry.name: entry.weight for entry in made.sources}
    assert weights == {
        "fineweb-edu": 0.5, "fineweb": 0.2, "the-stack-python": 0.15, "openmath-instruct-2": 0.1,
        "arxiv": 0.05,
    }  # fmt: skip
    production = load_job(ROOT / "configs" / "pretrain_a100_400m.yaml")
    assert production.sources == made.sources
    assert production.prepare.max_tokens == 8_000_000_000
    # What the shipped training configuration reads is where the training shards go.
    assert production.train_path == Path("data/pretrain_chinchilla")


def training_yaml(tmp_path: Path, target: str, **data: Any) -> Path:
    jsonl(tmp_path / "a.jsonl", texts("a", 50))
    mix = {
        "prepare": {"val_fraction": 0.2, "out": "elsewhere", "workers": 1, "max_tokens": 10},
        "sources": [{"name": "a", "paths": str(tmp_path / "a.jsonl")}],
    }
    write(tmp_path / "data" / "mine.yaml", mix)
    content = {"train_data_path": str(tmp_path / target), "data_mix": "mine", **data}
    return write(tmp_path / "train.yaml", {"model": {"d_model": 64}, "data": content})


@pytest.mark.parametrize("target", ["shards", "prepared/train"])
def test_a_training_configuration_says_what_it_will_read(target: str, tmp_path: Path) -> None:
    path = training_yaml(tmp_path, target, max_tokens=600, shard_size_tokens=200)
    made = load_job(path)
    report = run(made, check=True)
    assert report.train_path == str(tmp_path / target)
    assert PretrainDataset(tmp_path / target, 16, 50257).n_tokens + report.val_tokens <= 600
    out = (tmp_path / target).parent if target.endswith("train") else tmp_path / target
    assert len(tokens(out / "val")) == report.val_tokens > 0
    assert run(made).already_prepared
    run(made, force=True)
    assert sorted(entry.name for entry in out.iterdir() if entry.is_dir())[-1] in ("val", "train")
    assert not (out / ".work").exists()


def test_a_training_configuration_needs_a_mix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file configs/data/mien\.yaml .did you mean 'mine'"):
        load_job(training_yaml(tmp_path, "x", data_mix="mien"))
    with pytest.raises(UserError, match="without data.data_mix"):
        load_job(training_yaml(tmp_path, "x", data_mix=""))
    with pytest.raises(UserError, match="'data.max_tokens' in .* needs a whole number, got 'all'"):
        load_job(training_yaml(tmp_path, "x", max_tokens="all"))


def test_the_command_takes_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    jsonl(tmp_path / "a.jsonl", [*texts("a", 60), "0123456789 " * 20, *texts("a", 7)])
    path = write(
        tmp_path / "mix.yaml",
        {"sources": [{"name": "mine", "paths": str(tmp_path / "a.jsonl")}], "prepare": {"seed": 1}},
    )
    command = ["prepare", str(path), "--out", str(tmp_path / "out"), "--workers", "1"]
    with pytest.raises(SystemExit) as end:
        main([*command, "--verify"])
    assert not end.value.code
    said = " ".join(capsys.readouterr().out.split())
    assert "verified" in said
    assert "mine" in said and "100.00% / 100.00% (all used)" in said and "1 digits" in said
    with pytest.raises(SystemExit):
        main([*command, "--force", "--skip-clean", "--skip-dedup"])
    assert "none" in capsys.readouterr().out
    for wrong, message in ((["--text-field", "x"], "--text-field is for files"),):
        with pytest.raises(SystemExit) as end:
            main([*command, *wrong])
        assert end.value.code == 2 and message in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["prepare", str(path)])
    assert end.value.code == 2 and "prepare.out must be the folder" in capsys.readouterr().err

"""The documents against the code: every name, link, command, table and figure in them."""

import ast
import dataclasses
import functools
import gzip
import json
import math
import re
import shlex
import signal
import struct
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import typer
import yaml
from torch.distributed.run import get_args_parser

from mamba3_lite import cli, env, hardware
from mamba3_lite.data import ingest, shards
from mamba3_lite.data.clean import CleanConfig
from mamba3_lite.data.config import DedupConfig, PrepareConfig, check_job, load_job
from mamba3_lite.data.mixture import OnExhausted
from mamba3_lite.data.prepare import STAGES
from mamba3_lite.data.records import InvalidUtf8, SourceConfig
from mamba3_lite.data.report import PrepareReport, SourceReport
from mamba3_lite.data.shards import ShardHeader, ShardWriter
from mamba3_lite.data.sources import _SUFFIXES, KINDS
from mamba3_lite.measure import parity
from mamba3_lite.models import arithmetic
from mamba3_lite.models.mamba_block import stable_decay
from mamba3_lite.models.transformer import Mamba3Transformer, ModelConfig
from mamba3_lite.training import pretrain
from mamba3_lite.training.config import (
    _FREE_MODEL_FIELDS,
    SECTIONS,
    DataConfig,
    TrainingConfig,
    load_training_config,
)
from mamba3_lite.training.schedule import lr_factor
from mamba3_lite.training.stop import EXIT_OUT_OF_TIME
from mamba3_lite.training.watchdog import EXIT_HUNG

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mamba3_lite"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
DATA = "docs/references/data.md"
PRODUCTION = ROOT / "configs" / "pretrain_a100_400m.yaml"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

page_ids = [str(p.relative_to(ROOT)) for p in PAGES]
every_page = pytest.mark.parametrize("page", PAGES, ids=page_ids)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def blocks(page: Path, language: str) -> list[str]:
    return [b for kind, b in FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """(header, rows) of every table, cells stripped."""
    for block in re.findall(r"(?:^\|.*\|$\n?)+", text, flags=re.MULTILINE):
        rows = [[c.strip() for c in line.strip("|").split("|")] for line in block.splitlines()]
        yield rows[0], rows[2:]


def table(page: str, *columns: str) -> list[list[str]]:
    """The rows of the one table whose header begins with these columns, backticks removed."""
    found = [rows for head, rows in tables(read(page)) if tuple(head[: len(columns)]) == columns]
    assert len(found) == 1, f"{page}: {len(found)} tables with columns {columns}"
    return [[cell.replace("`", "") for cell in row] for row in found[0]]


# Names -------------------------------------------------------------------------------------------


@functools.cache
def symbols(path: Path) -> set[str]:
    """Dotted names a module defines: functions, classes, their members, constants, re-exports."""
    found: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                collect(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef) and prefix:
                # self.attribute = ... inside a method
                found.update(
                    prefix + n.attr
                    for n in ast.walk(node)
                    if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
                )
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [n for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
                found.update(prefix + n.id for n in names)
            elif isinstance(node, ast.ImportFrom):
                found.update(prefix + (alias.asname or alias.name) for alias in node.names)

    collect(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def unresolved_anchors(text: str) -> list[str]:
    wrong = []
    for file, symbol in re.findall(r"`([\w/]+\.py):([A-Za-z_][\w.]*)", text):
        path = PACKAGE / file
        is_example = f"{file}:{symbol}" == "file.py:Symbol"
        if not is_example and (not path.is_file() or symbol not in symbols(path)):
            wrong.append(f"{file}:{symbol}")
    for file, name in re.findall(r"\b(tests/[\w/]+\.py)::([\w:]+)", text):
        path = ROOT / file
        if not path.is_file() or name.replace("::", ".") not in symbols(path):
            wrong.append(f"{file}::{name}")
    for file in re.findall(r"`([\w./-]+\.(?:py|yaml))`", text):
        if "/" in file and not any((base / file).is_file() for base in (ROOT, PACKAGE)):
            wrong.append(file)
    return wrong


@every_page
def test_anchors_name_real_code(page: Path) -> None:
    assert unresolved_anchors(page.read_text(encoding="utf-8")) == []


def test_the_search_for_anchors_finds_wrong_ones() -> None:
    wrong = [
        "models/mimo.py:Nothing", "models/none.py:MIMO", "training/pretrain.py:Pretrainer.nothing",
        "tests/test_docs.py::test_nothing", "configs/none.yaml",
    ]  # fmt: skip
    right = ["models/mimo.py:MIMO.mix", "training/pretrain.py:TrainingConfig", "models/mimo.py"]
    text = " ".join(f"`{name}`" for name in [*wrong, *right])
    assert sorted(unresolved_anchors(text)) == sorted(wrong)


# Links -------------------------------------------------------------------------------------------


def heading_slugs(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


def relative_links(page: Path) -> list[str]:
    found = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page))
    return [link for link in found if not link.startswith(("http://", "https://"))]


@every_page
def test_relative_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in relative_links(page):
        file, _, fragment = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (fragment and fragment not in heading_slugs(target)):
            wrong.append(link)
    assert wrong == []


def test_every_page_is_in_the_index_and_begins_with_a_summary() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in relative_links(index)}
    assert {p for p in DOCS if p != index} <= linked
    for page in DOCS:
        heads = re.findall(r"^#.*$", prose(page), flags=re.MULTILINE)
        assert heads[0].startswith("# ") and heads[1] == "## 60-second summary", page


# Commands ----------------------------------------------------------------------------------------


def commands(page: Path) -> list[list[str]]:
    """Every command line of the page's bash blocks, split into words."""
    lines = "\n".join(blocks(page, "bash")).splitlines()
    return [shlex.split(line) for line in lines if line.strip()]


def subcommand(name: str) -> typer.core.TyperCommand:
    group = typer.main.get_command(cli.app)
    assert isinstance(group, typer.core.TyperGroup)
    command = group.get_command(group.make_context("mamba3-lite", [name]), name)
    assert isinstance(command, typer.core.TyperCommand)
    return command


@every_page
def test_commands_are_understood(page: Path) -> None:
    for words in commands(page):
        match words:
            case ["make", target]:
                assert re.search(rf"^{target}:", read("Makefile"), re.MULTILINE), words
            case ["source", path]:
                assert path == ".venv/bin/activate" and "VENV ?= .venv\n" in read("Makefile")
            case ["pip", "install", *rest]:
                named = set(",".join(re.findall(r"\[(.*?)\]", rest[-1])).split(","))
                extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
                assert named <= extras.keys(), words
                assert "torch==2.13.0" in read("constraints.txt").splitlines()
            case ["mamba3-lite", name, *rest]:
                subcommand(name).make_context(name, rest)  # raises on an unknown option
            case ["python3", "training/pretrain.py", *rest]:
                subcommand("pretrain").make_context("pretrain", rest)
            case ["torchrun", *rest]:
                arguments = get_args_parser().parse_args(rest)
                name, *rest = arguments.training_script_args
                if not arguments.no_python:
                    name, rest = "pretrain", arguments.training_script_args
                    assert arguments.training_script == "training/pretrain.py"
                subcommand(name).make_context(name, list(rest))
            case ["sbatch", recipe, *rest]:
                assert (ROOT / recipe).is_file(), words
                subcommand("pretrain").make_context("pretrain", list(rest))
            case ["kubectl", "apply", "-f", recipe]:
                assert (ROOT / recipe).is_file(), words
            case ["python", script, *rest] if script.startswith("benchmarks/"):
                known = re.findall(r'"(--[\w-]+)"', read(script))
                assert {word for word in rest if word.startswith("--")} <= set(known), words
            case _:
                pytest.fail(f"{page}: no test understands {words}")


TINY = [
    "model.d_model=16", "model.n_layers=1", "model.n_heads=2", "model.head_dim=8",
    "model.state_dim=4", "model.ffn_dim=16", "model.max_seq_len=32", "training.micro_batch_size=2",
    "training.total_steps=4", "training.warmup_steps=1", "training.save_interval=2",
    "training.eval_interval=2", "training.eval_batches=1", "training.tensorboard=false",
]  # fmt: skip


def run_readme_command(words: list[str]) -> None:
    """Runs one README command for real, with a tiny model where one is trained."""
    name, *rest = words
    if name == "python3":
        # The production file validates nothing, so it takes no eval_interval.
        tiny = [setting for setting in TINY if "eval" not in setting]
        subprocess.run([sys.executable, *rest, *tiny], check=True, timeout=120)
    elif name == "mamba3-lite":
        arguments = [*rest, *TINY] if rest[0] == "pretrain" else rest
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 0, words


def test_readme_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = ROOT / "README.md"
    for name in ("configs", "training"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    text = Path("my_text")
    text.mkdir()
    for i in range(60):
        story = " ".join(f"word{i * j % 37} of story {i}" for j in range(30))
        (text / f"story{i}.txt").write_text(story)
    (config,) = blocks(readme, "yaml")
    named = re.match(r"# (\S+\.yaml)\n", config)
    assert named is not None
    Path(named[1]).write_text(config)
    # A sample of the grid: the whole one takes minutes.
    whole = parity.problems
    monkeypatch.setattr(parity, "problems", lambda lengths: whole(lengths)[::60])

    ran = [words for words in commands(readme) if words[0] in ("mamba3-lite", "python3")]
    for words in ran:
        run_readme_command(words)
    done = {words[1] for words in ran}
    assert {"prepare", "pretrain", "generate", "parity", "training/pretrain.py"} <= done
    assert Path("runs/mine/model_step_4.safetensors").is_file()
    shown = capsys.readouterr().out
    assert "Once upon a time" in shown and " 0 failures" in shown


@pytest.mark.parametrize("page", DOCS, ids=page_ids[3:])
def test_python_examples_run(page: Path) -> None:
    for source in blocks(page, "python"):
        exec(compile(source, str(page), "exec"), {})


def test_the_numpy_reader_of_the_data_page_reads_our_shards(tmp_path: Path) -> None:
    (source,) = [b for b in blocks(ROOT / DATA, "python") if "read_tokens" in b]
    space: dict = {}
    exec(source, space)
    for vocab_size in (500, 70_000):
        ids = np.random.default_rng(0).integers(vocab_size, size=1000)
        folder = tmp_path / str(vocab_size)
        with ShardWriter(
            folder, vocab_size=vocab_size, eos_id=0, tokenizer_name="t",
            tokenizer_fingerprint="0" * 64, shard_size_tokens=600,
        ) as writer:  # fmt: skip
            writer.append(ids)
        parts = [space["read_tokens"](p) for p in sorted(folder.glob("tokens_*.bin"))]
        assert np.array_equal(np.concatenate(parts), ids)
    folder, lengths = tmp_path / "indexed", [700, 1, 299]
    with small_writer(folder) as writer:
        writer.append_documents(ids % 500, lengths, [0, 1, 0])
    documents = space["read_documents"](folder)
    assert [len(document) for document in documents] == lengths
    assert np.array_equal(np.concatenate(documents), ids % 500)


def small_writer(folder: Path) -> ShardWriter:
    return ShardWriter(
        folder, vocab_size=500, eos_id=7, tokenizer_name="t", tokenizer_fingerprint="ab" * 32,
        shard_size_tokens=600, source_names=["a", "b"],
    )  # fmt: skip


GUIDE = ROOT / "docs" / "guides" / "data.md"
# What these name is on the network.
ONLINE = ["hub.yaml"]


def write_recipe_inputs() -> None:
    """Files of the names that the data guide uses, in the current folder."""
    import pyarrow
    import pyarrow.parquet

    def stories(name: str, count: int = 200) -> list[str]:
        words = [f"{name}{i}" for i in range(97)]
        return [" ".join(words[(i * j) % 97] for j in range(2, 30)) for i in range(1, count)]

    for folder in ("notes", "books", "more_web", "code", "old_shards", "records"):
        Path(folder).mkdir()
    for folder, suffix in (("notes", ".md"), ("books", ".txt"), ("code", ".c")):
        for i, text in enumerate(stories(folder)):
            Path(folder, f"{i}{suffix}").write_text(text)
    for name, field in (
        ("corpus.jsonl.gz", "body"), ("web.jsonl.gz", "body"), ("more_web/1.jsonl", "body"),
        ("downloads/fineweb-edu/1.jsonl", "text"), ("downloads/fineweb/1.jsonl", "text"),
        ("downloads/the-stack-python/1.jsonl", "content"), ("downloads/arxiv/1.jsonl", "text"),
    ):  # fmt: skip
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps({field: text}) + "\n" for text in stories(path.parent.name))
        path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    rows = [{"text": text, "lang": "en"} for text in stories("row")]
    pyarrow.parquet.write_table(pyarrow.table({"doc": rows}), "table.parquet")
    math_rows = {"problem": stories("problem"), "generated_solution": stories("solution")}
    Path("downloads/openmath").mkdir()
    pyarrow.parquet.write_table(pyarrow.table(math_rows), "downloads/openmath/1.parquet")
    ids = np.random.default_rng(0).integers(50_000, size=4_000)
    ids[::20] = 50_256
    torch.save(torch.from_numpy(ids), "old_shards/shard_00000.bin")
    ids.astype("<u4").tofile("records/records_00000.bin")


def test_data_recipes_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    write_recipe_inputs()
    for content in blocks(GUIDE, "yaml"):
        named = re.match(r"# (\S+\.yaml)\n", content)
        assert named is not None
        Path(named[1]).write_text(content)
    for name in ONLINE:
        check_job(load_job(name))
    for words in commands(GUIDE):
        if words[0] == "mamba3-lite" and not set(ONLINE) & set(words):
            run_readme_command(words)
    for name in ("notes", "corpus", "table", "old", "records", "mix", "local"):
        assert Path("data", name, "train", shards.DOCUMENTS).is_file(), name
    shown = capsys.readouterr().out
    assert "data/mix: verified" in shown and "epochs" in shown
    assert Path("lengths.png").is_file()
    assert Path("runs/documents/model_step_4.safetensors").is_file()


# Tables ------------------------------------------------------------------------------------------


def test_model_fields_and_defaults() -> None:
    rows = table("docs/references/config.md", "field", "default", "read by")
    want = [(f.name, f.default) for f in dataclasses.fields(ModelConfig)]
    assert [(row[0], ast.literal_eval(row[1])) for row in rows] == want


def test_training_fields_keys_defaults_and_resume() -> None:
    rows = table("docs/references/config.md", "field", "YAML key", "default", "resume")
    fields = [
        f for f in dataclasses.fields(TrainingConfig) if f.name not in ("model_config", "data")
    ]
    want = {f.name: (f.default, f.metadata["resume"]) for f in fields}
    assert {row[0]: (ast.literal_eval(row[2]), row[3]) for row in rows} == want
    data = table("docs/references/config.md", "field", "YAML key", "default", "meaning")
    assert {row[0]: ast.literal_eval(row[2]) for row in data} == dataclasses.asdict(DataConfig())

    keys = {
        f"{s}.{name}": key.field for s, names in SECTIONS.items() for name, key in names.items()
    }
    documented = {row[1]: row[0] for row in [*rows, *data]}
    documented |= {f"model.{f.name}": f.name for f in dataclasses.fields(ModelConfig)}
    assert documented == keys


def test_the_production_file_key_by_key() -> None:
    rows = table("docs/references/config.md", "key", "value", "field")
    content = yaml.safe_load(PRODUCTION.read_text(encoding="utf-8"))
    want = {f"{s}.{k}": str(v) for s, body in content.items() for k, v in body.items()}
    assert {row[0]: str(yaml.safe_load(row[1])) for row in rows} == want
    assert len(rows) == 35
    for key, _, name in rows:
        section, _, short = key.partition(".")
        assert (name or short) == SECTIONS[section][short].field


def test_the_resume_table_of_the_runbook() -> None:
    rows = {row[0]: row[1] for row in table("docs/guides/a100_runbook.md", "on resume", "knobs")}
    by_class: dict[str, set[str]] = {"free": set(), "safe": set(), "refused": set()}
    for row in table("docs/references/config.md", "field", "YAML key", "default", "resume"):
        by_class[row[3]].add(row[1])
    assert set(re.findall(r"\w+\.\w+", rows["safe"])) == by_class["safe"]
    assert set(re.findall(r"\w+\.\w+", rows["refused"])) == by_class["refused"]
    free = re.search(r"Of the `model:` section (.*?) are free", read("docs/guides/a100_runbook.md"))
    assert free is not None
    assert set(re.findall(r"`(\w+)`", free[1])) == set(_FREE_MODEL_FIELDS)


@pytest.mark.parametrize("page", ["docs/references/pretrain_cli.md", "docs/guides/a100_runbook.md"])
def test_exit_codes(page: str) -> None:
    want = {
        pretrain.EXIT_DONE, 1, 2, EXIT_OUT_OF_TIME, EXIT_HUNG, 128 + signal.SIGINT,
        128 + signal.SIGTERM,
    }  # fmt: skip
    assert {int(row[0]) for row in table(page, "code", "meaning")} == want


def test_environment_variables() -> None:
    rows = table("docs/references/pretrain_cli.md", "variable", "default", "meaning")
    assert [(row[0], row[1]) for row in rows] == [(v.name, v.default) for v in env.VARIABLES]


@pytest.mark.parametrize(
    ("name", "page", "column"),
    [
        ("pretrain", "docs/references/pretrain_cli.md", "flag"),
        ("prepare", DATA, "option"),
        ("inspect", DATA, "inspect option"),
    ],
)
def test_flags(name: str, page: str, column: str) -> None:
    rows = table(page, column, "default")
    documented = {word for row in rows for word in re.findall(r"--[\w-]+|\b[A-Z]+\b", row[0])}
    options = set()
    for parameter in subcommand(name).params:
        is_option = parameter.param_type_name == "option"
        options |= {max(parameter.opts, key=len)} if is_option else {parameter.name.upper()}
    assert documented == options - {"--help"}


@pytest.mark.parametrize(
    ("column", "schema"),
    [
        ("prepare key", PrepareConfig), ("clean key", CleanConfig), ("dedup key", DedupConfig),
        ("source key", SourceConfig),
    ],
)  # fmt: skip
def test_keys_of_the_data_configuration(column: str, schema: type) -> None:
    rows = table(DATA, column, "default", "meaning")
    fields = dataclasses.fields(schema)
    want = {f.name: "required" if f.default is dataclasses.MISSING else f.default for f in fields}
    assert list(want) == [row[0] for row in rows]
    for name, default, _ in rows:
        assert (default if default == "required" else ast.literal_eval(default)) == want[name], name


def test_options_of_prepare_default_to_its_keys() -> None:
    keys = {row[0]: row[1].strip('"') for row in table(DATA, "prepare key", "default", "meaning")}
    options = {row[0]: row[1] for row in table(DATA, "option", "default", "meaning")}
    for key in keys.keys() - {"out", "on_exhausted"}:
        assert options["--" + key.replace("_", "-")] == keys[key], key


def test_choices_of_the_data_configuration() -> None:
    kinds = table(DATA, "kind", "files ending in")
    assert [row[0] for row in kinds] == list(KINDS)
    assert {row[0]: tuple(row[1].split()) for row in kinds if row[1]} == _SUFFIXES
    policies = [row[0] for row in table(DATA, "policy", "a source has fewer tokens than its share")]
    assert policies == list(get_args(OnExhausted))
    meanings = {row[0]: row[2] for row in table(DATA, "prepare key", "default", "meaning")}
    for key, choices in (("on_exhausted", OnExhausted), ("invalid_utf8", InvalidUtf8)):
        assert set(get_args(choices)) <= set(re.findall(r"\w+", meanings[key])), key
    assert [row[0] for row in table(DATA, "stage", "what it does")] == list(STAGES)


def test_reasons_for_skipping() -> None:
    code = "".join(p.read_text(encoding="utf-8") for p in (PACKAGE / "data").glob("*.py"))
    rules = read("mamba3_lite/data/clean.py")
    want = set(re.findall(r'\bProblem\(\s*"(\w+)"', code))
    want |= set(re.findall(r'\breturn "(\w*duplicate)"', code))
    want |= {a or b for a, b in re.findall(r'\breturn "(\w+)"|"(\w+)": config\.', rules)}
    found = [name for row in table(DATA, "reason", "counted when") for name in row[0].split(", ")]
    assert len(found) == len(set(found)) and set(found) == want


def test_layout_of_a_shard() -> None:
    header = ShardHeader(np.dtype("<u4"), 3**20, 70_001, 69_997, 69_991, bytes(range(32)).hex())
    raw = header.pack()
    found: dict[str, Any] = {}
    end = 0
    for offset, kind, content in table(DATA, "offset", "type", "content"):
        assert int(offset) == end, offset
        if kind.startswith("uint16"):
            break
        count = re.match(r"(\d+) bytes", kind)
        form = f"<{count[1]}s" if count else {"uint32": "<I", "uint64": "<Q"}[kind]
        (found[content],) = struct.unpack_from(form, raw, end)
        end += struct.calcsize(form)
    assert end == len(raw) == shards.HEADER_BYTES
    values = [value for value in found.values() if not isinstance(value, bytes)]
    assert values == [shards.VERSION, 2, 3**20, 70_001, 69_997, 69_991]
    assert bytes(range(32)) in found.values() and shards.MAGIC in found.values()
    index = {row[0]: row[1] for row in table(DATA, "index file", "type")}
    assert index == {file: dtype.name for file, dtype in shards._INDEX.values()}


def test_fields_of_manifest_and_report(tmp_path: Path) -> None:
    with small_writer(tmp_path / "shards") as writer:
        writer.append_documents([1, 7, 2, 7], [2, 2], [0, 1])
    rows = table(DATA, "manifest field", "content")
    assert ", ".join(row[0] for row in rows).split(", ") == list(writer.manifest)
    named = {row[0]: row[1] for row in rows}
    for name in ("shards", "sources", "tokenizer"):
        entry = writer.manifest[name]
        assert all(field in named[name] for field in (entry[0] if name != "tokenizer" else entry))
    report = ", ".join(row[0] for row in table(DATA, "report field", "meaning")).split(", ")
    assert sorted(report) == sorted(f.name for f in dataclasses.fields(SourceReport))
    text = read(DATA).partition("### prepare.json")[2].partition("| report field")[0]
    stored = PrepareReport("train", None).stored().keys() - {"already_prepared"}
    assert stored <= set(re.findall(r"`(\w+)`", text))


def test_keys_of_document_mode() -> None:
    rows = table(DATA, "training key", "default", "effect")
    fields = {f.name: f.default for f in dataclasses.fields(TrainingConfig)}
    for key, default, _ in rows:
        assert SECTIONS["data"][key.removeprefix("data.")].field in fields
        assert yaml.safe_load(default) is fields[key.removeprefix("data.")]
    assert {row[0] for row in rows} == {"data.document_mode", "data.mask_boundary_targets"}


def test_all_subcommands_are_described() -> None:
    rows = table("docs/references/pretrain_cli.md", "command", "what it does")
    assert {row[0] for row in rows} | {"pretrain"} == set(cli.COMMANDS)


def test_parity_limits() -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    assert set(dtypes) == set(parity.LIMITS)
    rows = table("docs/references/ssd.md", "tensor", "float32", "float64", "bfloat16")
    for names, *limits in rows:
        names = names.replace("final state", "state").replace("d(initial state)", "dstate")
        for name in names.split(", "):
            for dtype, limit in zip(dtypes, limits, strict=True):
                assert parity.LIMITS[dtype][name] == float(limit), name


def training_steps() -> list[dict[str, Any]]:
    lines = read("benchmarks/results/training_step.jsonl").splitlines()
    return [row for row in map(json.loads, lines) if row["benchmark"] == "training_step"]


def figures_of_a_step(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """ms, tok/s, peak GiB and commit as the tables have them."""
    times = "{median_ms:,.0f} ({min_ms:,.0f} to {max_ms:,.0f})".format(**row)
    commit = row["environment"]["git"]["commit"][:7]
    return times, f"{row['tokens_per_sec']:,}", f"{row['peak_mem_gib']:.1f}", commit


def test_training_steps_are_recorded_ones() -> None:
    recorded = [
        (row["dispatch"], row["compile"], *figures_of_a_step(row)) for row in training_steps()
    ]
    rows = table("docs/guides/performance.md", "dispatch", "compile", "checkpointing")
    assert rows
    for dispatch, mode, _, times, rate, _, memory, commit in rows:
        assert (dispatch, mode, times, rate, memory, commit) in recorded, (dispatch, times)


def test_steps_by_length_are_recorded_ones() -> None:
    fused = [
        row
        for row in training_steps()
        if (row["dispatch"], row["grad_checkpoint"]) == ("fused", False)
        and row.get("accumulation", 1) == 1
        and row["micro_batch"] * row["seq_len"] == 32_768
    ]
    recorded = {
        (f"{row['micro_batch']} × {row['seq_len']:,}", row["compile"], *figures_of_a_step(row)): row
        for row in fused
    }
    rows = table("docs/guides/performance.md", "batch × T", "compile", "ms a step")
    assert {row[0] for row in rows} == {"16 × 2,048", "4 × 8,192", "1 × 32,768"}
    short, long, _, _, middle, _ = (recorded[tuple(row)]["tokens_per_sec"] for row in rows)
    whole_runs = map(json.loads, read("benchmarks/results/many_gpus.jsonl").splitlines())
    beside = {
        row["tokens_per_sec"]
        for row in whole_runs
        if (row["mode"], row["environment"]["git"]["commit"][:7]) == ("alone", "30ff437")
    }
    (beside,) = beside
    others = [
        row["tokens_per_sec"]
        for row in fused
        if (row["micro_batch"], row["compile"]) == (16, "default")
    ]
    text = " ".join(read("docs/guides/performance.md").split())
    assert f"1 × 32,768 was {1 - long / short:.1%} behind".replace("%", " %") in text
    slowest, fastest = min(others), max(others)
    for said in (
        f"{middle / slowest - 1:.1%} ahead of the slowest of those ({slowest:,} tok/s)",
        f"{1 - middle / fastest:.1%} behind the fastest ({fastest:,})",
        f"{beside:,} tok/s", f"4 × 8,192 is {1 - middle / beside:.1%} behind that",
    ):  # fmt: skip
        assert said.replace("%", " %") in text, said


def test_state_dict_keys() -> None:
    tiny = dict(vocab_size=9, d_model=8, n_layers=1, n_heads=2, head_dim=4, state_dim=4, ffn_dim=8)
    text = read("docs/references/model.md").partition("## State-dict keys")[2].partition("With")[0]
    want = [key.replace("layers.0.", "layers.{i}.") for key in Mamba3Transformer(tiny).state_dict()]
    assert re.findall(r"`([^`]+)`", text) == want


# Departures --------------------------------------------------------------------------------------

DEPARTURES = [
    "exponent is masked first", "optimizer steps", "unknown key", "inert", "dummy tokens",
    "uint32 shards", "exact resume", "loss and gradient norm", "re(a) < 0", "temporary name, fsync",
    "batch shrinks", "window mean", "foreseeable refusals", "unknown name", "accumulation window",
    "schedule is unchanged", "measured rows", "windows of 256",
]  # fmt: skip


def test_departures_are_stated_with_reason_and_page() -> None:
    rows = table("docs/architecture.md", "the seeds", "here", "why", "page")
    assert len(rows) == len(DEPARTURES)
    for keyword, row in zip(DEPARTURES, rows, strict=True):
        assert keyword in " ".join(row[:2]).lower().replace("*", ""), keyword
        assert row[2] and "](" in row[3], keyword


# Figures -----------------------------------------------------------------------------------------


def mean_step() -> float:
    """E softplus(N(0, 0.64^2)): the mean step of a freshly initialised production block."""
    z = np.linspace(-8, 8, 20_001)
    weight = np.exp(-z * z / 2)
    return float((weight * np.log1p(np.exp(0.64 * z))).sum() / weight.sum())


STATED_BYTES_PER_SEC = 4.8e12  # of an H200's memory


def step_floors() -> dict[str, tuple[float, float]]:
    """Bytes (FLOPs for the products) of a production step's parts, and the seconds they need."""
    model, tokens = ModelConfig(), 16 * 2048
    layer_token_bytes = 2 * model.n_layers * tokens
    products = arithmetic.matmul_parameters(model)
    in_blocks = products - model.vocab_size * model.d_model
    moved = {
        "SSD": 28 * (770 + 1412) * tokens * 16,
        "as built": 28 * sum(ssd_traffic().values()),
        "norms": 17 * model.d_model * layer_token_bytes,
        "SwiGLU": 8 * model.ffn_dim * layer_token_bytes,
        "cross-entropy": 3 * 2 * tokens * (model.vocab_size + -model.vocab_size % 128),
        "optimizer": 8 * arithmetic.weight_bytes(model),
        "casts": 6 * (products + in_blocks),
    }
    flops = arithmetic.model_flops_per_token(model) * tokens
    peak = hardware.peak_bf16_flops("NVIDIA H200")
    assert peak is not None
    seconds = {name: size / STATED_BYTES_PER_SEC for name, size in moved.items()}
    return {"products": (flops, flops / peak)} | {n: (moved[n], seconds[n]) for n in moved}


def ssd_traffic() -> dict[str, int]:
    """Bytes of each fused kernel at the production shape, each input read once, bf16."""
    batch_heads, chunks, width, channels = 16 * 16, 2048 // 64, 2 * 64, 64
    token_heads = batch_heads * 2048
    states, d_states = (2 * batch_heads * n * width * channels for n in (chunks, chunks + 1))
    b = c = 2 * width
    x = y = dy = 2 * channels
    dt, phase, sums, edges = 2, 3 * 4, 2 * 4, 2 * 4 * batch_heads * chunks
    return {
        "phase": token_heads * (dt + phase),
        "carry": token_heads * (x + b + phase) + states,
        "output": token_heads * (x + b + c + phase + y) + states,
        "carry, backwards": token_heads * (dy + c + phase) + d_states,
        "gradient": token_heads * (2 * (x + b + c) + dy + phase + sums) + states + d_states + edges,
        "decay gradient": token_heads * (2 * dt + sums) + edges,
    }


def floor_figures() -> Iterator[tuple[str, str]]:
    def cells(size: float) -> str:
        return f"{size / 1e6:,.0f} | {1e6 * size / STATED_BYTES_PER_SEC:.0f}"

    page = "docs/concepts/ssd_theory.md"
    token_heads = 16 * 2048 * 16
    forward, backward = 770 * token_heads, 1412 * token_heads
    yield page, f"{token_heads:,} token-heads"
    yield page, f"{2 * 321 + 64} numbers"
    yield page, f"| {forward / 1e6:.0f} MB | {backward / 1e6:.0f} MB |"
    ideal = [1e6 * size / STATED_BYTES_PER_SEC for size in (forward, backward)]
    yield page, f"| {ideal[0]:.0f} µs | {ideal[1]:.0f} µs |"
    flops = [token_heads * per_token for per_token in (57_344, 131_072)]
    yield page, f"| {flops[0] / 1e9:.1f} GFLOP | {flops[1] / 1e9:.1f} GFLOP |"
    yield page, f"| {flops[0] / 989e6:.0f} µs | {flops[1] / 989e6:.0f} µs |"
    states = 2 * 256 * 32 * 128 * 64
    yield page, f"{states / 1e6:.0f} MB in bf16 at C = 64"
    traffic = list(ssd_traffic().items())
    for name, size in traffic:
        assert any(
            head[0] == "kernel"
            and any(row[0] == name and " | ".join(row[3:5]) == cells(size) for row in rows)
            for head, rows in tables(read(page))
        ), (name, cells(size))
    sums = [sum(size for _, size in half) for half in (traffic[:3], traffic[3:])]
    for total in sums:
        yield page, "| **" + cells(total).replace(" | ", "** | **") + "** |"
    extra = (64 * (6 * 128 + 6 * 64) + 8 * 128 * 64) / 131_072 - 1
    yield page, f"{extra:.0%}".replace("%", " %")
    yield page, f"{2 * 128 * 128 // 128} registers"
    yield page, f"{float(np.spacing(4e5)):.1e} turns apart"

    page = "docs/guides/performance.md"
    built = [1e6 * total / STATED_BYTES_PER_SEC for total in sums]
    for name, least, moved in zip(("forward", "backward"), ideal, built, strict=True):
        yield page, f"| {name} | {least:.0f} | {moved:.0f} |"
    yield page, f"| both | {sum(ideal):.0f} | {sum(built):.0f} |"
    at_edges = 3 * states + 2 * states * 33 // 32
    yield page, f"{at_edges / 1e6:.0f} of the {(sum(sums) - forward - backward) / 1e6:,.0f} MB"
    parts = step_floors()
    size, seconds = parts["products"]
    yield page, f"{size / 1e12:.1f} TFLOP | {1e3 * seconds:.1f} |"
    (ssd, ssd_s), (as_built, as_built_s) = parts["SSD"], parts["as built"]
    yield page, f"{ssd / 1e9:.1f} GB; as the kernels move it {as_built / 1e9:.1f} GB"
    yield page, f"| {1e3 * ssd_s:.1f}; {1e3 * as_built_s:.1f} |"
    (norms, norms_s), (swiglu, swiglu_s) = parts["norms"], parts["SwiGLU"]
    yield page, f"residuals {norms / 1e9:.1f} GB, SwiGLU {swiglu / 1e9:.1f} GB"
    yield page, f"| {(norms + swiglu) / 1e9:.1f} GB | {1e3 * (norms_s + swiglu_s):.1f} |"
    for name in ("cross-entropy", "optimizer", "casts"):
        yield page, f"| {parts[name][0] / 1e9:.1f} GB | {1e3 * parts[name][1]:.1f} |"
    total_s = sum(seconds for name, (_, seconds) in parts.items() if name != "as built")
    yield page, f"**{1e3 * total_s:.1f}**"
    yield page, f"{arithmetic.parameter_count(ModelConfig()):,}"
    h200, _ = load_training_config(ROOT / "configs" / "pretrain_h200_434m.yaml")
    page = "docs/references/config.md"
    yield page, f"65,536 × {h200.max_steps:,} = {h200.total_tokens / 1e9:.1f} B tokens"


def figures() -> Iterator[tuple[str, str]]:
    """(page, figure as it must stand there), all recomputed."""
    yield from floor_figures()
    config, model = TrainingConfig(), ModelConfig()
    remat = ModelConfig(grad_checkpoint=True)
    counts = arithmetic.parameter_counts(model)
    layer_parts = ("in_proj", "mimo", "out_proj", "ffn")
    layer = sum(counts[p] for p in layer_parts) // 28 + 2 * 1024 + 16
    weights, moments = arithmetic.weight_bytes(model), arithmetic.optimizer_bytes(model)

    page = "docs/references/config.md"
    yield page, f"| {config.tokens_per_micro_step:,} |"
    yield page, f"| {config.tokens_per_step:,} |"
    yield page, f"| {config.total_tokens / 1e9:.2f} B |"
    yield page, f"| {config.total_tokens / 8e9:.1f} |"
    yield page, f"{config.log_every * config.tokens_per_micro_step / 1e6:.2f} M tokens"
    yield page, f"{config.save_every * config.tokens_per_step / 1e6:.0f} M tokens"
    yield page, f"{config.warmup_steps * config.tokens_per_step / 1e6:.0f} M tokens"
    yield page, f"{config.warmup_steps / config.max_steps:.1%}".replace("%", " %")
    floor = config.lr * lr_factor(256_000, warmup_steps=2000, max_steps=256_000, min_lr_ratio=0.05)
    start = config.lr * lr_factor(0, warmup_steps=2000, max_steps=256_000, min_lr_ratio=0.05)
    yield page, f"{floor:.1e}".replace("e-0", "e-")
    yield "docs/references/training.md", f"starts at {start:.0e}".replace("e-0", "e-")

    page = "docs/references/model.md"
    for part in layer_parts[:3]:
        yield page, f"| {counts[part] // 28:,} |"
    yield page, f"| {2 * model.d_model * model.ffn_dim:,} |"
    yield page, f"| {model.d_model * model.ffn_dim:,} |"
    yield page, f"**{layer:,}**"
    yield page, f"| {28 * layer:,} |"
    yield page, f"| {counts['embedding']:,} |"
    yield page, f"**{28 * layer + counts['embedding'] + 1024:,}**"
    yield page, f"{arithmetic.parameter_count(model):,}"
    yield page, f"{arithmetic.matmul_parameters(model):,}"
    yield page, f"{arithmetic.model_flops_per_token(model):,}"
    yield (
        page,
        f"{arithmetic.state_bytes(model):,} B ({arithmetic.state_bytes(model) / 2**20:.1f} MiB)",
    )
    yield page, f"{arithmetic.forward_flops_per_token(model):,}"
    yield page, f"{arithmetic.training_flops_per_token(model):,}"
    yield page, f"{arithmetic.training_flops_per_token(remat):,}"
    yield page, f"{weights:,} B"
    logits = f"{16 * 2048 * 50257 * 4 / 1e9:.1f} GB"
    yield "docs/references/training.md", logits
    longest = f"{128 / CleanConfig().min_unique_chars:,.0f} characters"
    yield DATA, longest
    yield "docs/architecture.md", longest
    yield DATA, f"{ingest.PART_BYTES >> 20} MiB of input or {ingest.PART_RECORDS:,} records"
    yield "docs/guides/data.md", f"{ingest.PART_BYTES >> 20} MiB of input"
    yield "docs/LOG.md", logits

    page = "docs/guides/a100_runbook.md"
    yield page, f"{(weights + moments) / 1e9:.1f} GB"
    yield page, f"weights {weights / 1e9:.2f} GB"
    yield page, f"moments {moments / 1e9:.2f} GB"
    yield page, f"{arithmetic.activation_bytes(model, 16, 2048) / 1e9:.1f} GB"
    yield page, f"{arithmetic.activation_bytes(remat, 16, 2048) / 1e9:.1f} GB"
    yield page, f"{math.log(50257):.2f}"

    page = "docs/concepts/ssd_theory.md"
    for chunk in (64, 128, 256):
        c, r = ModelConfig(chunk_size=chunk), ModelConfig(chunk_size=chunk, grad_checkpoint=True)
        forward, backward = (f // (28 * 16) for f in arithmetic.ssd_flops_per_token(c))
        yield page, f"| {chunk} | {forward:,} | {backward:,} |"
        per_token = (
            arithmetic.forward_flops_per_token(c), arithmetic.training_flops_per_token(c),
            arithmetic.training_flops_per_token(r),
        )  # fmt: skip
        yield page, f"| {chunk} | " + " | ".join(f"{f / 1e6:,.1f}" for f in per_token) + " |"
    share = sum(arithmetic.ssd_flops_per_token(model)) / arithmetic.training_flops_per_token(model)
    yield page, f"{share:.1%}".replace("%", " %")
    yield page, f"{arithmetic.model_flops_per_token(model) / 1e6:,.1f} MFLOP"
    yield page, f"{2 * arithmetic.matmul_parameters(model) / 1e6:.0f} MB"
    yield page, f"{arithmetic.state_bytes(model) / 1e6:.1f} MB"
    yield page, f"{2 * (64 + 128 + 128 + 1 + 64)} B"
    yield page, f"{int(57_344 / 770)} FLOPs a byte"
    yield page, f"{3 * 128 * 64:,}"
    yield page, f"{3 * 128 * 64 / (64 * 57_344):.1%}".replace("%", " %")

    page = "docs/concepts/block_and_stability.md"
    overflow, step = math.log(torch.finfo(torch.float32).max), mean_step()
    yield page, f"{overflow:.2f}"
    for chunk in (64, 128, 256):
        yield page, f"| {chunk} | {overflow / (chunk - 1):.3f} |"
    yield page, f"{0.02 * math.sqrt(1024):.2f}"
    yield page, f"mean step is {step:.2f}"
    yield page, f"= {2 * 64 * step:.0f}"
    yield page, f"e^{{{2048 * step * 0.001:.1f}}}"
    yield page, f"e^{{{2048 * step * 0.01:.0f}}}"
    yield page, f"+{overflow / (2048 * step):.3f}"
    yield page, f"{1 / 3e-4:,.0f} steps"
    for raw in (-2, -1, -0.5, 0, 1, 10):
        rate = -float(stable_decay(torch.tensor([complex(raw)]))[0])
        yield page, f"| {raw:+g} | {round(rate, 4):g} |".replace("+0 ", "0 ")
    yield page, f"{math.log(2):.3f}"
    yield page, f"{-(-(10**6) // 64):,}"
    yield page, f"{16 * 15_625**2 * 8 / 1e9:.0f} GB"
    yield page, f"{math.pi * step:.1f} rad"
    yield page, f"{round(math.pi * step * 2048, -1):,.0f} rad"
    for angle, shown in ((1_000, "6.1e-5"), (10_000, "9.8e-4"), (1_000_000, "0.0625")):
        assert math.isclose(float(shown), np.spacing(np.float32(angle)), rel_tol=0.01)
        yield page, shown
    yield page, f"{float(np.spacing(np.float32(math.pi))) / 2:.1e}".replace("e-07", "e-7")


@pytest.mark.parametrize("page", sorted({page for page, _ in figures()}))
def test_figures_are_what_the_arithmetic_gives(page: str) -> None:
    text = read(page)
    missing = [figure for where, figure in figures() if where == page and figure not in text]
    assert missing == []


def test_no_document_mentions_a_place_outside_the_project() -> None:
    for page in PAGES:
        assert not re.search(r"\.\./shared", page.read_text("utf-8")), page

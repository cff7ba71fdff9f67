"""Text in, text out: the Python API, saved and forked states, and the command."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

import mamba3_lite
from mamba3_lite import cli
from mamba3_lite.data.tokenizer import load_tokenizer
from mamba3_lite.errors import UserError
from mamba3_lite.inference import console
from mamba3_lite.inference.api import LanguageModel, TextStream
from mamba3_lite.inference.state import State
from mamba3_lite.training.pretrain import Pretrainer
from tests.runs import config

ROOT = Path(mamba3_lite.__file__).resolve().parents[1]
STORY = "The cat sat on the mat. The dog sat on the log. Ein Käfer saß auf dem Gräschen — so! "


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A run on a few words of real text, with the tokenizer's whole vocabulary."""
    folder = tmp_path_factory.mktemp("text")
    torch.save(torch.tensor(load_tokenizer("gpt2").encode(STORY * 40)), folder / "train.bin")
    settings = config(
        folder, max_steps=60, lr=2e-2, save_every=60, vocab_size=50257, model={"vocab_size": 50257}
    )
    assert Pretrainer(settings).train() == 0
    return folder / "run"


@pytest.fixture(scope="module")
def model(run_dir) -> LanguageModel:
    return mamba3_lite.load(run_dir, device="cpu")


# The Python API


def test_three_lines_to_the_first_token(run_dir):
    code = f"""from mamba3_lite import load
model = load({str(run_dir)!r})
print(model.generate("The"))"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert " sat on the" in done.stdout


def test_importing_the_package_stays_free():
    code = "import sys, mamba3_lite; assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mamba3_lite.nothing  # noqa: B018


def test_several_prompts_at_once_are_those_one_by_one(model):
    prompts = ["The cat", "The", "Ein Käfer saß auf"]
    how = {"max_new_tokens": 12, "temperature": 0}
    together = model.generate(prompts, **how)
    assert together == [model.generate(prompt, **how) for prompt in prompts]
    assert together[0].startswith(" sat on the")


def test_a_stream_says_the_same_in_whole_characters(model):
    how = {"max_new_tokens": 40, "seed": 5, "temperature": 0.3}
    pieces = list(model.stream("Ein K", **how))
    assert "".join(pieces) == model.generate("Ein K", **how)
    assert "ä" in "".join(pieces) and not any("\N{REPLACEMENT CHARACTER}" in p for p in pieces)
    assert len(pieces) > 10


def test_a_character_of_several_tokens_waits_and_bad_bytes_do_not_wait_for_ever():
    text = load_tokenizer("gpt2")
    stream = TextStream(text.decode)
    ids = text.encode("a\N{ELEPHANT}b")
    assert len(ids) > 3
    pieces = [stream.push(token) for token in ids]
    assert [p for p in pieces if p] == ["a", "\N{ELEPHANT}", "b"] and stream.finish() == ""
    half = text.encode("\N{ELEPHANT}")[:1]
    pieces = [stream.push(token) for token in half * 9]
    assert any(pieces), "four tokens without a character are shown as they are"
    assert "".join(pieces) + stream.finish() == text.decode(half * 9)


def test_the_runs_own_tokenizer_and_bfloat16(run_dir):
    narrow = mamba3_lite.load(run_dir, device="cpu", dtype="bfloat16")
    assert narrow.tokenizer.name == "gpt2"
    assert narrow.model.embed.weight.dtype == torch.bfloat16
    assert narrow.model.layers[0].A.dtype == torch.complex64
    assert narrow.generate("The cat", max_new_tokens=3, temperature=0) == " sat on the"
    narrow.generate("The cat", max_new_tokens=3, bf16_state=True)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"device": "tpu"}, "device 'tpu' is unknown; use cpu, cuda or auto"),
        ({"dtype": "int3"}, "dtype 'int3' is unknown; use float32"),
        ({"tokenizer": "gpt9"}, "'gpt9' is not known"), ({"opt_step": 7}, "steps available: 60"),
    ],
)  # fmt: skip
def test_mistakes_of_loading_are_named(run_dir, wrong, says):
    with pytest.raises(UserError, match=says):
        mamba3_lite.load(run_dir, **wrong)


# States


def test_a_prefix_is_read_once_and_continued_many_times(model):
    how = {"max_new_tokens": 10, "temperature": 0}
    prefix = "The cat sat on the mat. The dog"
    state = model.read(prefix)
    before = [t.clone() for t in [*state.layers, state.logits]]
    want = model.generate(prefix, **how)
    assert model.generate("", state=state, **how) == want
    assert model.generate(" sat", state=state, **how) == model.generate(prefix + " sat", **how)
    endings = [" sat", " saß auf", " sat on the"]
    got = model.generate(endings, state=state, **how)
    assert got == [model.generate(prefix + ending, **how) for ending in endings]
    assert model.generate(["", ""], state=state, **how) == [want, want]
    assert all(map(torch.equal, before, [*state.layers, state.logits])), "nothing was changed"
    longer = model.read(" sat", state=state)
    assert model.generate("", state=longer, **how) == model.generate(prefix + " sat", **how)


def test_a_state_does_not_grow_with_the_text(model, tmp_path):
    sizes = set()
    for times in (1, 50):
        model.read(STORY * times).save(tmp_path / "state")
        sizes.add((tmp_path / "state").stat().st_size)
    assert len(sizes) == 1


def test_a_saved_state_comes_back_bit_for_bit(model, run_dir, tmp_path):
    state = model.read(["The cat", "The dog"])
    state.save(tmp_path / "state.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["state.safetensors"]
    again = mamba3_lite.load(run_dir, device="cpu").load_state(tmp_path / "state.safetensors")
    assert all(map(torch.equal, [*state.layers, state.logits], [*again.layers, again.logits]))
    assert again.batch_size == 2 and again.model == state.model
    copy = again.clone()
    copy.layers[0].zero_()
    assert torch.equal(again.layers[0], state.layers[0])
    assert torch.equal(again.repeat(2).logits, state.logits[[0, 0, 1, 1]])


def test_states_that_do_not_fit_are_refused(model, run_dir, tmp_path):
    state = model.read("The cat")
    other = mamba3_lite.load(run_dir, device="cpu")
    with torch.no_grad():
        other.model.norm_f.weight.mul_(1.5)
    state.save(tmp_path / "state")
    with pytest.raises(UserError, match="belongs to another model"):
        other.load_state(tmp_path / "state")
    with pytest.raises(UserError, match="belongs to another model"):
        other.generate("", state=state)
    with pytest.raises(UserError, match="belongs to another model"):
        other.generate("", state=state, max_new_tokens=0)
    narrow = mamba3_lite.load(run_dir, device="cpu", dtype="bfloat16")
    assert narrow.load_state(tmp_path / "state").batch_size == 1, "the same model, narrower"
    with pytest.raises(UserError, match="holds 2 rows and there are 3 prompts"):
        model.generate(["a", "b", "c"], state=state.repeat(2))
    with pytest.raises(UserError, match="at least one token"):
        model.generate(["", "a"], state=state)
    with pytest.raises(UserError, match="nowhere: the state cannot be read"):
        State.load(tmp_path / "nowhere", model.model)
    (tmp_path / "text").write_text("no state")
    with pytest.raises(UserError, match="text: the state cannot be read"):
        State.load(tmp_path / "text", model.model)
    with pytest.raises(UserError, match="holds no state of a model"):
        State.load(run_dir / "model_step_60.safetensors", model.model)
    with pytest.raises(UserError, match="cannot be written"):
        state.save(tmp_path / "no" / "folder")


# The command


class Typed(io.TextIOWrapper):
    """Standard input: a file, or somebody at a terminal."""

    def __init__(self, text: str, *, terminal: bool = False):
        super().__init__(io.BytesIO(text.encode()), encoding="utf-8")
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def say(run_dir, capsys, monkeypatch):
    """Runs the command with something on standard input; exit code, output, errors."""

    def run(*options: str, stdin: str = "", terminal: bool = False) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", Typed(stdin, terminal=terminal))
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main(["generate", str(run_dir), "--device", "cpu", *options])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


GREEDY = ("--temperature", "0", "--max-new-tokens", "8")


def test_a_prompt_from_anywhere(say, model, tmp_path):
    want = "The cat" + model.generate("The cat", max_new_tokens=8, temperature=0) + "\n"
    (tmp_path / "prompt.txt").write_text("The cat", encoding="utf-8")
    for options, stdin in (
        (("--prompt", "The cat"), ""), (("--prompt-file", str(tmp_path / "prompt.txt")), ""),
        (("--prompt", "-"), "The cat"), ((), "The cat"),
    ):  # fmt: skip
        code, out, err = say(*options, *GREEDY, stdin=stdin)
        assert (code, out) == (0, want), options
        assert "[checkpoint] loaded step 60" in err, "what is no text is on standard error"
    code, out, _ = say(*GREEDY, terminal=True)
    assert code == 0 and out.startswith("import ")


def test_several_samples(say):
    code, out, _ = say("--prompt", "The", "--num-samples", "3", "--max-new-tokens", "20")
    samples = out.split("--- sample ")[1:]
    assert code == 0 and [s[:6] for s in samples] == ["1 of 3", "2 of 3", "3 of 3"]
    assert all("\nThe" in s for s in samples) and len({s[6:] for s in samples}) > 1
    again = say("--prompt", "The", "--num-samples", "3", "--max-new-tokens", "20")
    assert again[1] == out, "the seed decides"
    other = say("--prompt", "The", "--num-samples", "3", "--max-new-tokens", "20", "--seed", "9")
    assert other[1] != out


def test_a_conversation_shows_each_text_and_its_speed(say, model, monkeypatch):
    lines = iter(["The cat", "", "Ein"])

    def typed(prompt):
        print(prompt, end="")
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    code, out, err = say("--interactive", "--prompt", "The dog sat. ", *GREEDY, terminal=True)
    want = [
        model.generate("The dog sat. " + line, max_new_tokens=8, temperature=0)
        for line in ("The cat", "Ein")
    ]
    assert (code, out) == (0, f"> {want[0]}> > {want[1]}> \n")
    assert err.count("[8 tokens, ") == 2 and "tok/s]" in err and "Ctrl-D" in err


def test_ctrl_c_ends_a_text_and_then_the_conversation(say, monkeypatch):
    lines = iter(["The cat", KeyboardInterrupt])

    def typed(prompt):
        line = next(lines)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    push = TextStream.push

    def interrupted(self, token):
        if len(self._ids) == 3:
            raise KeyboardInterrupt
        return push(self, token)

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(console.TextStream, "push", interrupted)
    code, out, err = say("--interactive", *GREEDY, terminal=True)
    assert code == 0 and " sat on the" in out and "[stopped]" in err
    assert "Traceback" not in err
    code, out, err = say("--prompt", "The cat", *GREEDY)
    assert code == 130 and out == "The cat sat on the\n" and "Traceback" not in err


def test_it_stops_at_the_end_of_a_text_unless_told_not_to(say, model, monkeypatch):
    (end,) = model.tokenizer.encode(" mat")
    monkeypatch.setattr("mamba3_lite.data.tokenizer.Gpt2Tokenizer.eos_id", end)
    _, out, _ = say("--prompt", "The cat", *GREEDY)
    assert out == "The cat sat on the\n"
    _, out, _ = say("--prompt", "The cat", *GREEDY, "--no-stop-at-eos")
    assert out.startswith("The cat sat on the mat.")


# case D04
@pytest.mark.parametrize(
    ("options", "stdin", "says"),
    [
        (("--prompt", ""), "", "--prompt is empty: give at least one character"),
        (("--prompt", "-"), "", "standard input is empty: give at least one character"),
        ((), "", "standard input is empty"),
        (("--prompt", "a", "--prompt-file", "b"), "", "both given: leave one out"),
        (("--prompt-file", "nowhere.txt"), "", "nowhere.txt: cannot be read (No such file"),
        (("--prompt", "-", "--interactive"), "", "both read standard input"),
        (("--prompt", "a", "--top-p", "0"), "", "top_p must lie between 0 and 1 and not be 0"),
        (("--prompt", "a", "--top-k", "-2"), "", "top_k must be 0 (off) or positive, got -2"),
        (("--prompt", "a", "--repetition-penalty", "0"), "", "repetition_penalty must be"),
        (("--prompt", "a", "--num-samples", "0"), "", "--num-samples must be 1 or more, got 0"),
        (("--prompt", "a", "--tokenizer", "no.json"), "", "cannot read no.json"),
        (("--prompt", "a", "--device", "abacus"), "", "device 'abacus' is unknown"),
        (("--prompt", "a", "--dtype", "int3"), "", "dtype 'int3' is unknown"),
        (("--prompt", "a", "--opt-step", "3"), "", "steps available: 60"),
    ],
)
def test_every_mistake_is_one_clear_line(say, options, stdin, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = say(*options, stdin=stdin)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err


def test_bytes_that_are_no_text_are_named(say, tmp_path):
    (tmp_path / "bytes").write_bytes(b"good \xff")
    code, _, err = say("--prompt-file", str(tmp_path / "bytes"))
    assert code == 2 and "not UTF-8 at byte 5; convert it first" in err and err.count("\n") == 1


def test_a_broken_checkpoint_is_one_clear_line(say, monkeypatch):
    load = console.load

    def broken(*args, **options):
        model = load(*args, **options)
        with torch.no_grad():
            model.model.norm_f.weight[0] = float("nan")
        return model

    monkeypatch.setattr(console, "load", broken)
    code, _, err = say("--prompt", "The cat", *GREEDY)
    assert code == 2 and err.splitlines()[-1].startswith("error: The model's logits are not finite")
    assert "Traceback" not in err


def test_the_guide_knows_every_option_and_its_default():
    page = (ROOT / "docs" / "guides" / "generate.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`--.*?) \| (.*?) \|", page, flags=re.MULTILINE)
    documented = {
        name: default for names, default in rows for name in re.findall(r"--[\w-]+", names)
    }
    group = typer.main.get_command(cli.app)
    assert isinstance(group, typer.core.TyperGroup)
    command = group.get_command(group.make_context("mamba3-lite", ["generate"]), "generate")
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    assert set(documented) == {o for p in options for o in [*p.opts, *p.secondary_opts]} - {
        "--help"
    }
    for option in options:
        shown = documented[option.opts[0]]
        if isinstance(option.default, int | float | str) and not isinstance(option.default, bool):
            assert shown == f"`{option.default}`", option.name


def test_the_measured_speeds_are_those_of_the_recorded_rows():
    page = (ROOT / "docs" / "guides" / "generate.md").read_text(encoding="utf-8")
    lines = (ROOT / "benchmarks" / "results" / "decode.jsonl").read_text(encoding="utf-8")
    found = list(map(json.loads, lines.splitlines()))
    newest = {row["benchmark"] + str(row.get("batch", "")): row for row in found}
    for batch in (1, 64):
        row = newest[f"decode{batch}"]
        low, high = f"{row['min']:,}", f"{row['max']:,}"
        rate = f"{row['tokens_per_sec']:,} ({low} to {high})"
        graphs = f"{row['graph_us']} | {row['in_graph_us']} | {row['floor_us']}"
        assert f"| {batch} | {rate} | {graphs} |" in page
    assert f": {newest['decode_first_token']['median_ms']} ms" in page
    (commit,) = {row["environment"]["git"]["commit"] for row in newest.values()}
    assert f"in the same run (commit {commit[:7]})" in page
    memory = newest["decode_memory"]["mib"]
    assert memory["at_token_1000"] == memory["at_token_100000"]
    assert f"{memory['at_token_1000']} MiB at token 1,000" in page
    assert "\n".join(newest["decode_peer"]["printed"]) in page

"""Perplexity: the same numbers whatever the batch, tokens and bytes counted exactly, D06."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from mamba3_lite.data.dataset import PretrainDataset
from mamba3_lite.data.prepare import prepare
from mamba3_lite.errors import UserError
from mamba3_lite.evaluation import scoring
from mamba3_lite.evaluation.corpus import Document, shard_corpus, text_corpus
from mamba3_lite.evaluation.perplexity import Mode, measure, save_picture, windowed
from mamba3_lite.evaluation.scoring import Passage, Scorer
from mamba3_lite.evaluation.subject import Subject, load_subject
from mamba3_lite.models.transformer import Mamba3Transformer
from mamba3_lite.training.losses import next_token_loss
from tests.eval_runs import EvalRun, sentences, trained_run, write_jsonl
from tests.runs import MODEL

WHOLE = Mode()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> EvalRun:
    return trained_run(tmp_path_factory.mktemp("eval"))


@pytest.fixture(scope="module")
def subject(run: EvalRun) -> Subject:
    return load_subject(run.folder, device="cpu")


def with_batches(subject: Subject, **how: int) -> Scorer:
    return Scorer(subject.scorer.model, **how)


def losses_of(scorer: Scorer, passages: list[Passage]) -> list[np.ndarray]:
    """-log p of every place of every passage, NaN where nothing was scored, nothing twice."""
    found = [np.full(len(passage.ids), np.nan) for passage in passages]
    for part in scorer.score(iter(passages)):
        place = slice(part.begin, part.begin + len(part.ids))
        assert np.isnan(found[part.passage][place]).all(), "a token was scored twice"
        assert np.array_equal(part.ids, passages[part.passage].ids[place])
        found[part.passage][place] = part.losses
    return found


def expected(model: Mamba3Transformer, passage: Passage) -> np.ndarray:
    """The same from one plain forward pass."""
    if len(passage.ids) == 1:
        return np.full(1, np.nan)
    ids = torch.from_numpy(passage.ids.astype(np.int64))
    with torch.no_grad():
        log_p = torch.log_softmax(model(ids[None, :-1])[0].double(), -1)
    found = np.full(len(ids), np.nan)
    found[1:] = -log_p.gather(1, ids[1:, None]).squeeze(1).numpy()
    found[: passage.first] = np.nan
    return found


# case D06
@pytest.mark.parametrize("mode", [WHOLE, windowed(24), windowed(40, 16)], ids=lambda m: m.words)
def test_d06_perplexity_does_not_depend_on_the_batch(subject, tmp_path, mode):
    texts = sentences(20, seed=5)
    corpus = text_corpus([str(write_jsonl(tmp_path / "texts.jsonl", texts))], subject)
    results = [
        measure(with_batches(subject, batch_size=size, batch_tokens=tokens), corpus, mode)
        for size, tokens in ((1, 4096), (4, 4096), (20, 4096), (20, 160), (None, 700))
    ]
    encode = subject.tokenizer.encode
    for result in results:
        assert result["perplexity"] == pytest.approx(results[0]["perplexity"], rel=1e-5)
        assert result["bits_per_byte"] == pytest.approx(results[0]["bits_per_byte"], rel=1e-5)
        assert result["tokens"] == sum(len(encode(text)) + 1 for text in texts)
        assert result["bytes"] == sum(len(text.encode()) for text in texts)
        assert result["documents"] == result["eos_tokens"] == 20
    assert 3 < results[0]["perplexity"] < 150, "neither hopeless nor cheating"


@pytest.mark.parametrize("how", [{}, {"batch_size": 3, "batch_tokens": 64}, {"batch_tokens": 100}])
def test_every_token_is_scored_once_and_as_a_plain_forward_pass_does(subject, how, monkeypatch):
    monkeypatch.setattr(scoring, "_POOL_BATCHES", 2)
    monkeypatch.setitem(scoring._LOGITS, "cpu", 300 * 7)
    draw = np.random.default_rng(0)
    lengths = [2, 3, 150, 1, 40, 41, 7, 90, 2, 64]
    passages = [Passage(draw.integers(300, size=n), 1 + n // 3) for n in lengths]
    found = losses_of(with_batches(subject, **how), passages)
    for got, passage in zip(found, passages, strict=True):
        np.testing.assert_allclose(got, expected(subject.scorer.model, passage), atol=2e-5)


def test_greedy_says_which_tokens_were_the_likeliest(subject):
    passage = Passage(np.random.default_rng(1).integers(300, size=30), 1)
    with torch.no_grad():
        likeliest = subject.scorer.model(torch.from_numpy(passage.ids)[None]).argmax(-1)[0].numpy()
    passage.ids[20:] = likeliest[19]  # at least the first of these is right
    (part,) = subject.scorer.score([passage], greedy=True)
    assert part.greedy is not None and part.greedy[19]
    with torch.no_grad():
        again = subject.scorer.model(torch.from_numpy(passage.ids)[None]).argmax(-1)[0].numpy()
    assert np.array_equal(part.greedy, again[:-1] == passage.ids[1:])


def test_long_passages_go_through_in_pieces_of_bounded_size(subject, monkeypatch):
    shapes = []
    hidden = subject.scorer.model.hidden
    monkeypatch.setattr(
        subject.scorer.model, "hidden",
        lambda ids, **how: shapes.append(tuple(ids.shape)) or hidden(ids, **how),
    )  # fmt: skip
    draw = np.random.default_rng(2)
    passages = [Passage(draw.integers(300, size=n), 1) for n in (5_000, 700, 90)]
    found = losses_of(with_batches(subject, batch_size=3, batch_tokens=600), passages)
    assert max(rows * columns for rows, columns in shapes) <= 600
    # Whoever has ended is left out: 3 rows to 90, 2 to 700, then one.
    assert [rows for rows, _ in shapes] == [3] + [2] * 3 + [1] * 21
    monkeypatch.undo()
    for got, passage in zip(found, passages, strict=True):
        np.testing.assert_allclose(got, expected(subject.scorer.model, passage), atol=5e-5)


@pytest.mark.parametrize("window", [1, 2, 5, 8, 100])
def test_windows_score_each_token_once_with_the_stated_context(window):
    documents = [Document(np.arange(1, n + 1), n) for n in (7, 1, 1, 13, 4)]
    stream = np.concatenate([[0], *(document.ids for document in documents)])
    for stride in {1, window // 2 or 1, window}:
        seen, place = [], 0
        passages = list(Mode(window, stride).passages(iter(documents), 0))
        for number, passage in enumerate(passages):
            assert len(passage.ids) <= window + 1
            assert np.array_equal(passage.ids, stream[place : place + len(passage.ids)])
            scored = np.arange(passage.first, len(passage.ids))
            seen += (place + scored).tolist()
            if number:
                assert passage.first == window - stride + 1
            place += stride
        assert seen == list(range(1, len(stream)))


def test_windows_of_the_training_length_give_the_validation_loss(run, subject, tmp_path):
    ids = np.concatenate([d.ids for d in shard_corpus(run.data / "val", subject).documents()])
    ids = ids[: len(ids) // 24 * 24]
    torch.save(torch.from_numpy(np.r_[subject.tokenizer.eos_id, ids]), tmp_path / "stream.pt")
    dataset = PretrainDataset(tmp_path / "stream.pt", 24, 300)
    with torch.no_grad():
        sums = [next_token_loss(subject.scorer.model, x[None], y[None])[0] for x, y in dataset]
    passages = windowed(24).passages([Document(ids, 0)], subject.tokenizer.eos_id)
    found = np.concatenate([part.losses for part in subject.scorer.score(passages)])
    assert len(found) == 24 * len(sums) == len(ids)
    assert found.sum() == pytest.approx(float(torch.stack(sums).double().sum()), rel=1e-6)


def test_loss_by_context_adds_up_and_falls(run, subject):
    corpus = shard_corpus(run.data, subject)
    assert corpus.name == str(run.data / "val")
    result = measure(subject.scorer, corpus, windowed(64))
    rows = result["by_context"]
    assert [(row["from"], row["to"]) for row in rows] == [
        (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64),
    ]  # fmt: skip
    windows = math.ceil(corpus.tokens / 64)
    assert [row["tokens"] for row in rows[:3]] == [windows, windows, 2 * windows]
    assert sum(row["tokens"] for row in rows) == result["tokens"] == corpus.tokens
    total = sum(row["tokens"] * row["loss"] for row in rows)
    assert total / corpus.tokens == pytest.approx(result["loss"], rel=1e-9)
    assert rows[0]["loss"] > rows[-1]["loss"] + 0.1, "the state is worth something"
    assert all(0 < row["standard_error"] < 1 for row in rows)
    text_nats = result["loss"] * result["tokens"] - result["eos_loss"] * result["eos_tokens"]
    bits = text_nats / math.log(2) / result["bytes"]
    assert result["bits_per_byte"] == pytest.approx(bits, rel=1e-9)


def test_whole_documents_start_from_an_empty_state(run, subject):
    corpus = shard_corpus(run.data, subject)
    result = measure(subject.scorer, corpus, WHOLE)
    eos, model = subject.tokenizer.eos_id, subject.scorer.model
    passages = [Passage(np.r_[eos, document.ids], 1) for document in corpus.documents()]
    want = np.concatenate([expected(model, passage)[1:] for passage in passages])
    assert result["loss"] == pytest.approx(want.mean(), rel=1e-6)
    assert result["documents"] == len(passages) == result["by_context"][0]["tokens"]
    first = measure(subject.scorer, corpus, WHOLE, limit=3)
    assert first["documents"] == 3
    assert first["tokens"] == sum(len(passage.ids) - 1 for passage in passages[:3])


@pytest.mark.parametrize("tokenizer", ["own", "gpt2"])
def test_bytes_of_shards_are_those_of_the_texts(run, tmp_path, tokenizer):
    texts = [*sentences(30, seed=9), "a\n\tb  c\r\n", "🔑" * 50, "…"]
    name = str(run.tokenizer) if tokenizer == "own" else "gpt2"
    prepare(
        [write_jsonl(tmp_path / "texts.jsonl", texts)], tmp_path / "data", tokenizer=name,
        shard_size_tokens=97, workers=1, log=lambda _: None, progress=False,
    )  # fmt: skip
    model = Mamba3Transformer({**MODEL, "vocab_size": 50_257})
    corpus = shard_corpus(tmp_path / "data" / "train", Subject(Scorer(model), {}, name, {}, {}))
    assert corpus.facts["tokenizer"] == name
    assert [d.size_bytes for d in corpus.documents()] == [len(text.encode()) for text in texts]


def test_autocast_is_near_and_its_logits_are_not_rounded(subject, run):
    corpus = shard_corpus(run.data, subject)
    narrow = load_subject(run.folder, device="cpu", dtype="bfloat16")
    assert "autocast" in narrow.settings["dtype"]
    loss, wide = (measure(s.scorer, corpus, WHOLE, limit=8)["loss"] for s in (narrow, subject))
    assert loss != wide and loss == pytest.approx(wide, rel=0.02)
    logits = narrow.scorer._logits(torch.randn(9, 16).bfloat16())
    assert logits.dtype == torch.float32
    assert (logits != logits.bfloat16()).float().mean() > 0.9


def test_a_broken_model_and_foreign_ids_are_named(run):
    model = load_subject(run.folder, device="cpu").scorer.model
    with torch.no_grad():
        model.norm_f.weight[0] = math.nan
    with pytest.raises(UserError, match="logits are not finite"):
        list(Scorer(model).score([Passage(np.arange(9), 1)]))
    for ids in ([1, 300, 2], [1, 2, 300], [1, -1, 2]):
        with pytest.raises(UserError, match="outside 0 to 299.*tokenizer"):
            list(Scorer(model).score([Passage(np.array(ids), 1)]))


def test_sizes_that_mean_nothing_are_refused():
    for sizes, complaint in (((0,), "--window"), ((8, 0), "--stride"), ((8, 9), "--stride")):
        with pytest.raises(UserError, match=complaint):
            windowed(*sizes)


def test_picture_of_loss_by_context(run, subject, tmp_path: Path):
    pytest.importorskip("matplotlib")
    corpus = shard_corpus(run.data, subject)
    results = [measure(subject.scorer, corpus, m, limit=9) for m in (WHOLE, windowed(16))]
    results[0]["data"] = "a$x_1$"
    assert save_picture(results, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_documents_are_read_as_they_are_needed(subject):
    """Memory does not grow with the corpus: a pool is filled, scored, and the next one filled."""
    read = itertools.count()

    def endless():
        while True:
            next(read)
            yield Passage(np.arange(100), 1)

    scorer = with_batches(subject, batch_tokens=200)
    parts = scorer.score(endless())
    for _ in range(5):
        next(parts)
    assert next(read) <= 200 * scoring._POOL_BATCHES / 100 + 1

import hashlib
import json
import lzma
import random
from pathlib import Path

import pytest

from mamba3_lite.data import tokenizer as module
from mamba3_lite.data.tokenizer import EOS_TEXT, MAX_PIECE_CHARS, load_tokenizer, split_text
from mamba3_lite.errors import UserError


@pytest.fixture
def json_tokenizer(tmp_path: Path) -> Path:
    """A byte-level tokenizer.json with 256 bytes and one end-of-document token."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    built.add_special_tokens(["</s>", "<mine>"])
    path = tmp_path / "tokenizer.json"
    built.save(str(path))
    return path


def test_gpt2_known_ids_and_constants() -> None:
    gpt2 = load_tokenizer("gpt2")
    assert gpt2.encode("Hello world") == [15496, 995]
    assert (gpt2.name, gpt2.vocab_size, gpt2.eos_id) == ("gpt2", 50257, 50256)
    assert gpt2.fingerprint == module.GPT2_SHA256
    assert gpt2.decode([15496, 995, 50256]) == "Hello world" + EOS_TEXT


def test_gpt2_special_text_in_a_document_is_ordinary_text() -> None:
    gpt2 = load_tokenizer("gpt2")
    ids = gpt2.encode(f"a{EOS_TEXT}b")
    assert gpt2.eos_id not in ids
    assert gpt2.decode(ids) == f"a{EOS_TEXT}b"


def test_gpt2_round_trip_and_batch() -> None:
    gpt2 = load_tokenizer("gpt2")
    texts = ["", " ", "naïve 中文 \r\n\t x", "a" * 1000, "word " * 20_000]
    assert gpt2.encode_batch(texts) == [gpt2.encode(text) for text in texts]
    assert [gpt2.decode(gpt2.encode(text)) for text in texts] == texts


def test_pieces_encode_to_the_ids_of_the_whole_text() -> None:
    gpt2 = load_tokenizer("gpt2")
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choice(" \n\t\r\u2003\x1cx'sl1.é中") for _ in range(300))
        pieces = list(split_text(text, 50))
        assert "".join(pieces) == text
        assert all(0 < len(piece) <= 50 for piece in pieces)
        assert sum((gpt2.encode(piece) for piece in pieces), []) == gpt2.encode(text)


def test_text_without_a_cut_point_is_cut_hard() -> None:
    assert [len(piece) for piece in split_text("a" * 25, 10)] == [10, 10, 5]
    assert list(split_text("", 10)) == [""]


def test_blank_run_that_overflows_the_regex_stack() -> None:
    gpt2 = load_tokenizer("gpt2")
    text = " " * 1_000_000 + "x"
    assert gpt2.decode(gpt2.encode(text)) == text


@pytest.mark.parametrize("damage", ["flip", "truncate", "missing"])
def test_damaged_gpt2_file_is_refused(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asset = Path(module.__file__).parent / "assets" / "gpt2.tiktoken.xz"
    raw = bytearray(lzma.decompress(asset.read_bytes()))
    raw[1000] ^= 1
    packed = lzma.compress(bytes(raw), preset=0)
    (tmp_path / "assets").mkdir()
    if damage != "missing":
        content = packed if damage == "flip" else packed[: len(packed) // 2]
        (tmp_path / "assets" / asset.name).write_bytes(content)
    monkeypatch.setattr(module.resources, "files", lambda package: tmp_path)
    module.gpt2_encoding.cache_clear()
    try:
        with pytest.raises(UserError, match="gpt2.tiktoken.xz.*damaged"):
            load_tokenizer("gpt2")
    finally:
        module.gpt2_encoding.cache_clear()


def test_json_tokenizer(json_tokenizer: Path) -> None:
    loaded = load_tokenizer(str(json_tokenizer))
    assert (loaded.name, loaded.vocab_size) == (str(json_tokenizer), 258)
    assert loaded.eos_id == 256
    assert loaded.fingerprint == hashlib.sha256(json_tokenizer.read_bytes()).hexdigest()
    text = "a</s>b é"
    ids = loaded.encode(text)
    assert max(ids) < 256
    assert loaded.decode(ids) == text
    assert loaded.encode_batch([text, ""]) == [ids, []]


def test_json_tokenizer_eos_named_by_its_config(json_tokenizer: Path) -> None:
    config = json_tokenizer.with_name("tokenizer_config.json")
    config.write_text(json.dumps({"eos_token": {"content": "<mine>"}}))
    assert load_tokenizer(str(json_tokenizer)).eos_id == 257
    config.write_text(json.dumps({"eos_token": "<absent>"}))
    with pytest.raises(UserError, match="<absent>"):
        load_tokenizer(str(json_tokenizer))


def test_unusable_tokenizer_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'gpt3' is not known"):
        load_tokenizer("gpt3")
    with pytest.raises(UserError, match="cannot read .*absent.json"):
        load_tokenizer(str(tmp_path / "absent.json"))
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(UserError, match="broken.json is not a usable"):
        load_tokenizer(str(broken))


def test_missing_tokenizers_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"mamba3-lite\[tokenizers\]"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_piece_limit_is_far_below_the_overflow() -> None:
    text = " " * MAX_PIECE_CHARS
    assert len(load_tokenizer("gpt2").encode(text + "x")) == MAX_PIECE_CHARS

"""The frame of the HTML pages: text is text, pictures are inline, and matplotlib may be absent."""

import builtins
from pathlib import Path
from typing import Any

import pytest

from mamba3_lite.measure import html


def line(figure: Any) -> None:
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1])
    axes.set(xlabel="optimizer <step>", title="a & b")


def test_text_is_never_markup() -> None:
    nasty = "<script>alert('x')</script>"
    parts = [
        html.paragraph(nasty), html.paragraph(nasty, soft=True), html.listing(nasty),
        html.table([nasty], [[nasty]]), html.picture(line, nasty), html.image(b"png", nasty),
    ]  # fmt: skip
    page = html.page(nasty, [(nasty, "".join(parts))])
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 12
    assert page.startswith("<!doctype html>") and 'name="viewport"' in page


def test_a_picture_takes_the_colours_of_the_page_and_the_same_bytes_each_time() -> None:
    svg = html.picture(line, "caption")
    assert svg == html.picture(line, "caption")
    assert svg.count("currentColor") > 5 and "#000000" not in svg
    assert html.COLOURS[0] in svg
    assert "optimizer &lt;step&gt;" in svg, "text stays text, so that it can be found and selected"


def test_a_picture_is_also_a_file(tmp_path: Path) -> None:
    assert html.save_picture(line, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_caption_stands_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    assert html.NO_PICTURE.partition(" ")[0] in html.picture(line, "caption")
    assert not html.save_picture(line, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()

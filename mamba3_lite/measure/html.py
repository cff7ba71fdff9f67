"""One self-contained HTML page: readable on a phone, light and dark, nothing fetched.

A page is a title and sections; the functions here turn text, tables and pictures into the HTML of a
section. A picture is a function that draws on a matplotlib figure, so that one drawing serves the
page (as SVG in the page's own colours) and a PNG file.
"""

import base64
import io
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

Draw = Callable[[Any], None]  # gets an empty matplotlib.figure.Figure

# Wide enough for a curve, narrow enough that its labels can be read on a phone.
SIZE_INCHES = (5.5, 3.6)
# After Okabe and Ito, told apart by colour-blind readers; without black and yellow and with a
# lighter blue, so that all stand out on light and on dark ground.
COLOURS = ("#2a86c8", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
NO_PICTURE = 'no picture: pip install "mamba3-lite[plots]"'

# Stands for the page's text colour in a drawing; no drawing needs this one for itself.
_INK = "#010203"
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #656d76; --line: #d4d9df;
  --tint: #f4f6f8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --paper: #14171b; --soft: #98a1ab;
  --line: #363c44; --tint: #1e2329; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 46rem; padding: 1rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2rem; }
figure { margin: 1rem 0; } figure svg, figure img { display: block; width: 100%; height: auto; }
figcaption, .soft { color: var(--soft); font-size: 0.875rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.7rem 0.3rem 0; border-bottom: 1px solid var(--line); text-align: left;
  overflow-wrap: normal; vertical-align: top; }
pre { padding: 0.75rem; background: var(--tint); overflow-x: auto; font-size: 0.85rem; }
"""


def page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """The whole document.

    Args:
        title: plain text.
        sections: (heading as plain text, HTML from the functions below) in order.
    """
    body = "\n".join(
        f"<section><h2>{escape(heading)}</h2>\n{content}</section>" for heading, content in sections
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def paragraph(text: str, *, soft: bool = False) -> str:
    """Plain text as a paragraph; ``soft``: small and grey."""
    kind = ' class="soft"' if soft else ""
    return f"<p{kind}>{escape(text)}</p>\n"


def listing(text: str) -> str:
    """Plain text as it is, such as a command or a configuration."""
    return f"<pre>{escape(text)}</pre>\n"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Cells are shown with ``str``; a table wider than the screen scrolls by itself."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><tr>{head}</tr>\n{body}</table></div>\n'


def picture(draw: Draw, caption: str, *, size_inches: tuple[float, float] = SIZE_INCHES) -> str:
    """A drawing as inline SVG whose text and axes take the page's colour, light or dark.

    The caption (plain text) is also what a screen reader says. Without matplotlib the caption
    stands alone, with a line that says what to install.
    """
    svg = _rendered(draw, size_inches, "svg", ink=_INK, facecolor="none")
    if svg is None:
        return paragraph(f"{caption} ({NO_PICTURE})", soft=True)
    text = svg.decode("utf-8")
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = text.replace("<svg", f'<svg role="img" aria-label="{escape(caption)}"', 1)
    return f"<figure>{text}<figcaption>{escape(caption)}</figcaption></figure>\n"


def image(png: bytes, caption: str) -> str:
    """A PNG that is there already, inline."""
    data = base64.b64encode(png).decode("ascii")
    return (
        f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>\n"
    )


def save_picture(draw: Draw, path: Path, *, size_inches: tuple[float, float] = SIZE_INCHES) -> bool:
    """The same drawing as a PNG file, black on white; False, and no file, without matplotlib."""
    png = _rendered(draw, size_inches, "png", ink="black", facecolor="white")
    if png is not None:
        path.write_bytes(png)
    return png is not None


def _rendered(
    draw: Draw, size_inches: tuple[float, float], kind: str, *, ink: str, facecolor: str
) -> bytes | None:
    try:
        import matplotlib
        from cycler import cycler
        from matplotlib.figure import Figure
    except ImportError:
        return None
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style: Any = {
        **dict.fromkeys(inked, ink), "axes.facecolor": "none", "grid.color": "#888888",
        "grid.alpha": 0.3, "axes.grid": True, "axes.spines.top": False, "axes.spines.right": False,
        "axes.prop_cycle": cycler(color=COLOURS), "legend.frameon": False,
        "font.size": 9, "legend.fontsize": 8, "svg.fonttype": "none", "svg.hashsalt": "mamba3-lite",
    }  # fmt: skip
    # Of a picture's bytes nothing may depend on when it was drawn.
    metadata = {"Date": None} if kind == "svg" else None
    out = io.BytesIO()
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size_inches, layout="constrained")
        draw(figure)
        figure.savefig(out, format=kind, facecolor=facecolor, dpi=150, metadata=metadata)
    return out.getvalue()

"""Horizontal bar charts as SVG: text and bars only, legible on a light and on a dark page."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_WIDTH, _LABELS, _VALUES = 760, 250, 110
_ROW, _TOP = 28, 44
_DIGIT = 9  # width of a digit, at most
_STYLE = """\
text { font: 14px system-ui, sans-serif; fill: #1d2b29 }
.title { font-weight: 600 } .bar { fill: #9db8b4 } .own { fill: #1f7a6d } .target { stroke: #b3432b; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e3f0ee } .bar { fill: #55706c } .own { fill: #4fb8a6 } .target { stroke: #ef8c73 }
}"""


class Bar(NamedTuple):
    """One bar. `own` marks Keepgate's among those of others; `target` is drawn as a line."""

    label: str
    value: float
    shown: str
    own: bool = False
    target: float | None = None


def bar_chart(title: str, bars: Sequence[Bar]) -> str:
    """An SVG document of one bar per line, in the order given, scaled to the largest value or target."""
    largest = max(max(bar.value, bar.target or 0.0) for bar in bars)
    scale = (_WIDTH - _LABELS - _VALUES) / largest
    height = _TOP + _ROW * len(bars)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="0" y="20">{escape(title)}</text>',
    ]
    for number, bar in enumerate(bars):
        y = _TOP + _ROW * number
        width = bar.value * scale
        kind = "own" if bar.own else "bar"
        # The value stands behind its own bar, and behind the target only where they would overlap.
        mark = (bar.target or 0.0) * scale
        end = mark if width - 4 < mark < width + 8 + _DIGIT * len(bar.shown) else width
        lines += [
            f'<text x="{_LABELS - 10}" y="{y + 15}" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect class="{kind}" x="{_LABELS}" y="{y}" width="{max(width, 1):.1f}" height="20" rx="2"/>',
            f'<text x="{_LABELS + end + 8:.1f}" y="{y + 15}">{escape(bar.shown)}</text>',
        ]
        if bar.target is not None:
            x = f"{_LABELS + bar.target * scale:.1f}"
            lines.append(f'<line class="target" x1="{x}" x2="{x}" y1="{y - 3}" y2="{y + 23}"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"

"""A curve as a small SVG picture: for the UI's metadata and for reports."""

from __future__ import annotations

import base64
from collections.abc import Sequence

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 640, 240, 56, 28, 26, 12


def curve_svg(points: Sequence[Sequence[float]], title: str) -> str:
    """One line over steps, with axes and its first and last value. At most 400 points are drawn."""
    if not points:
        return ""
    stride = max(1, len(points) // 400)
    kept = [*points[::stride], points[-1]]
    steps = [float(point[0]) for point in kept]
    values = [float(point[1]) for point in kept]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    first, length = steps[0], (steps[-1] - steps[0]) or 1.0

    def x(step: float) -> float:
        return _LEFT + (step - first) / length * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (high - value) / span * (_HEIGHT - _TOP - _BOTTOM)

    line = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in zip(steps, values, strict=True))
    ticks = "".join(
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}" '
        f'stroke="#8884" /><text x="{_LEFT - 6}" y="{y(v) + 4:.1f}" '
        f'text-anchor="end">{v:.3g}</text>'
        for v in (low, (low + high) / 2, high)
    )
    marks = "".join(
        f'<text x="{x(s):.1f}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{s:.0f}</text>'
        for s, anchor in ((steps[0], "start"), (steps[-1], "end"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="11" '
        f'fill="#667"><rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>'
        f'<text x="{_LEFT}" y="16" font-size="13" fill="#223">{title}: '
        f"{values[0]:.4g} → {values[-1]:.4g}</text>{ticks}{marks}"
        f'<polyline points="{line}" fill="none" stroke="#4f43dd" stroke-width="1.8"/></svg>'
    )


def curve_markdown(points: Sequence[Sequence[float]], title: str) -> str:
    """The picture as Markdown with its bytes inside."""
    encoded = base64.b64encode(curve_svg(points, title).encode()).decode()
    return f"![{title}](data:image/svg+xml;base64,{encoded})"

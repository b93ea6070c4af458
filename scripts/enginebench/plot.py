# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The comparison as an SVG: milliseconds a token over the batch, a panel a context."""

import math
from html import escape
from typing import Any

from enginebench.results import STEP, milliseconds
from enginebench.table import decode_points, title

_WIDTH, _HEIGHT = 360, 260
_LEFT, _TOP, _BOTTOM = 52, 34, 40
_COLORS = ("#1f5fbf", "#d1495b", "#3a8f5c", "#8a6bbf", "#b8860b")
_TICKS = (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)


def svg(content: dict[str, Any]) -> str:
    """Both axes are logarithmic; contexts with one batch share the last panel."""
    engines = content["engines"]
    points = decode_points(engines)
    batches: dict[int, list[int]] = {}
    for context, batch in points:
        batches.setdefault(context, []).append(batch)
    panels = [
        (f"context {c}", "batch", [(b, {"context": c, "batch": b}) for b in found])
        for c, found in batches.items()
        if len(found) > 1
    ]
    at_one = [(c, {"context": c, "batch": 1}) for c in batches if 1 in batches[c]]
    if len(at_one) > 1:
        panels.append(("batch 1", "context", at_one))
    body = [
        f'<g transform="translate({i * _WIDTH},0)">{_panel(engines, *panel)}</g>'
        for i, panel in enumerate(panels)
    ]
    legend = "".join(
        f'<text x="{_LEFT + 150 * i}" y="{_HEIGHT + 16}" fill="{_color(i)}">'
        f"{escape(title(name))}</text>"
        for i, name in enumerate(engines)
    )
    width = max(_WIDTH * len(panels), _LEFT + 150 * len(engines))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
        f'height="{_HEIGHT + 26}" font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(body)}{legend}'
        "</svg>\n"
    )


def _color(index: int) -> str:
    return _COLORS[index % len(_COLORS)]


def _panel(
    engines: dict[str, dict[str, Any]],
    heading: str,
    axis: str,
    points: list[tuple[int, dict[str, int]]],
) -> str:
    lines = {
        name: [
            (x, ms)
            for x, where in points
            if (ms := milliseconds(engine, STEP, **where)) is not None
        ]
        for name, engine in engines.items()
    }
    times = [ms for line in lines.values() for _, ms in line]
    low, high = math.log(min(times) / 1.2), math.log(max(times) * 1.2)
    first, last = math.log(points[0][0]), math.log(points[-1][0])

    def across(x: float) -> float:
        share = (math.log(x) - first) / (last - first)
        return _LEFT + share * (_WIDTH - _LEFT - 20)

    def down(ms: float) -> float:
        share = (math.log(ms) - low) / (high - low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)

    parts = [
        f'<text x="{_LEFT}" y="18" font-weight="bold">ms a token, {heading}</text>',
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}">{axis}</text>',
    ]
    for x, _ in points:
        parts.append(
            f'<text x="{across(x):.1f}" y="{_HEIGHT - 24}" text-anchor="middle">'
            f"{x}</text>"
        )
    for tick in _TICKS:
        if low <= math.log(tick) <= high:
            y = f"{down(tick):.1f}"
            parts.append(
                f'<path d="M{_LEFT} {y}H{_WIDTH - 20}" stroke="#ddd"/>'
                f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end" dy="4">{tick}</text>'
            )
    for i, line in enumerate(lines.values()):
        places = [f"{across(x):.1f},{down(ms):.1f}" for x, ms in line]
        parts.append(
            f'<polyline points="{" ".join(places)}" fill="none" '
            f'stroke="{_color(i)}" stroke-width="2"/>'
        )
        for place in places:
            cx, cy = place.split(",")
            parts.append(f'<circle cx="{cx}" cy="{cy}" r="2.5" fill="{_color(i)}"/>')
    return "".join(parts)

"""What every device holds of a state, as a picture."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from partitioning.hardware.chips import GIB
from partitioning.pictures.figures import TICKS, new_figure
from partitioning.plan.audit import ROLES, Audit, bytes_by_device, check_bytes
from partitioning.rules import describe_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MISPLACED = 'not where the plan puts them'
_ROLE_COLORS = dict(
    zip((*ROLES, _MISPLACED), ('#31688e', '#35b779', '#c9c9c9', '#d1495b'), strict=True)
)
_BUDGET_COLOR = '#b3261e'
_LEAST_GIB = GIB / 10  # smaller amounts are shown in bytes


def draw_audit(
    audit: Audit,
    png: str | os.PathLike[str] | None = None,
    *,
    budget: float | None = None,
    title: str | None = None,
) -> Figure:
    """Draws what every device holds of a state: one bar per device, stacked by role.

    Usage:
      draw_audit(plan.audit(), 'memory.png', budget=16 * 2**30)

    Args:
      audit: the audit of a plan.
      png: a file to draw into; its suffix decides the format.
      budget: the most bytes that a device may hold, drawn as a line, or as a note if it is far
        above the bars.
      title: the line above; by default the mesh.

    Raises:
      TypeError: if `audit` is not an Audit.
      ValueError: if `budget` is not a number of bytes above 0.
      RuntimeError: if matplotlib is not installed.
    """
    if not isinstance(audit, Audit):
        raise TypeError(
            f'draw_audit takes an Audit, such as plan.audit(), not a {type(audit).__name__}'
        )
    if budget is not None:
        check_bytes(budget)
    ids = sorted(audit.bytes_by_device)
    figure = new_figure((min(max(0.3 * len(ids) + 1.2, 5.0), 9.0), 3.4))
    plot = figure.add_subplot()
    unit, name = (GIB, 'GiB') if audit.bytes_per_device >= _LEAST_GIB else (1, 'bytes')
    base = np.zeros(len(ids))
    for role, held in bytes_by_role(audit).items():
        top = base + np.array([held[device] for device in ids]) / unit
        if (top > base).any():
            label = f'{role}, {_amount(max(held.values()))}'
            _draw_bars(plot, base, top, _ROLE_COLORS[role], label)
        base = top
    high = max(float(np.max(base)), 1 / unit)
    plot.set_ylim(0, 1.12 * high)
    if budget is not None:
        _draw_budget(plot, budget / unit, high, _amount(budget))
    step = -(-len(ids) // TICKS) if len(ids) > 2 * TICKS else 1
    places = range(0, len(ids), step)
    plot.xaxis.set_ticks(places, [str(ids[place]) for place in places], fontsize=8)
    plot.set_xlim(-0.6, len(ids) - 0.4)
    plot.set_xlabel('device')
    plot.set_ylabel(f'{name} held')
    plot.yaxis.set_tick_params(labelsize=8)
    plot.yaxis.set_major_formatter('{x:,.4g}' if unit > 1 else '{x:,.0f}')
    plot.spines[['top', 'right']].set_visible(False)
    figure.legend(loc='outside lower center', ncols=2, fontsize=8, frameon=False)
    figure.suptitle(describe_axes(audit.mesh) if title is None else title, fontsize=10)
    if png is not None:
        figure.savefig(png)
    return figure


def bytes_by_role(audit: Audit) -> dict[str, dict[int, int]]:
    """For each role, the bytes that each device holds, by the id of the device.

    Arrays that are not where the plan puts them are counted separately.
    """
    ids, wrong = audit.bytes_by_device, {cost.row.path for cost in audit.misplaced}
    placed = bytes_by_device([r for r in audit.rows if r.path not in wrong], audit.mesh, {})
    held = {role: {d: placed[d][role] if d in placed else 0 for d in ids} for role in ROLES}
    rest = {device: total - sum(h[device] for h in held.values()) for device, total in ids.items()}
    return {**held, _MISPLACED: rest}


def _draw_bars(plot: Any, base: np.ndarray, top: np.ndarray, color: str, label: str) -> None:
    """Draws one bar per device as one collection: thousands of artists would take seconds."""
    from matplotlib.collections import PolyCollection

    many = len(base) > 64
    half = 0.5 if many else 0.38
    x = np.arange(len(base))
    corners = [(x - half, base), (x - half, top), (x + half, top), (x + half, base)]
    bars = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
    plot.add_collection(
        PolyCollection(list(bars), facecolor=color, linewidths=0, antialiased=not many, label=label)
    )


def _draw_budget(plot: Any, budget: float, high: float, amount: str) -> None:
    text = f'budget {amount}, {100 * high / budget:.3g}% held'
    if budget <= 4 * high:
        plot.axhline(budget, color=_BUDGET_COLOR, linestyle='--', linewidth=1.4, label=text)
        plot.set_ylim(0, 1.12 * max(budget, high))
    else:  # with a line, the bars would be too low to read
        style = {'size': 8, 'color': _BUDGET_COLOR, 'ha': 'right', 'va': 'top'}
        plot.text(0.995, 0.99, f'\u2191 {text}', transform=plot.transAxes, **style)


def _amount(held: float) -> str:
    return f'{held / GIB:,.3g} GiB' if held >= _LEAST_GIB else f'{held:,.0f} bytes'

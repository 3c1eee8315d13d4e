"""The meshes of a machine, ranked by the forecasts of a function on each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from meshwright.report.figures import machine_name, source_name, verdict
from meshwright.report.forecasts import Forecast
from meshwright.report.page.html_tables import plain_table
from meshwright.report.page.markup import Html, tag
from partitioning.amounts import bytes_str, seconds_str, share_str
from partitioning.plan.tables import text_table
from partitioning.rules import describe_axes

_LISTED = 20
_HEAD = ('mesh', 'fits', 'time', 'MFU', 'peak', 'sent')


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MeshRanking:
    """Forecasts of a function on the meshes of a machine.

    Attributes:
      forecasts: the forecasts, the best first.
      failed: why a mesh cannot be used, by its axes: {'data 3 x model 2': 'the batch ...'}.
    """

    forecasts: tuple[Forecast, ...]
    failed: Mapping[str, str]

    @property
    def best(self) -> Forecast:
        """The best of them; its `mesh` has the sizes of the axes."""
        return self.forecasts[0]

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        rows = _rows(self)
        widths = [max(len(row[i]) for row in (_HEAD, *rows)) for i in range(1, len(_HEAD))]
        aligned = [(r[0], *(c.rjust(w) for c, w in zip(r[1:], widths, strict=True))) for r in rows]
        lines = [_title(self), '', *text_table(_HEAD, aligned)]
        rest = len(self.forecasts) - _LISTED
        lines += [f'and {rest} more'] if rest > 0 else []
        lines += ['', *_failures(self)] if self.failed else []
        return '\n'.join(lines)

    def _repr_html_(self) -> str:
        return ranking_table(self)


def _title(ranking: MeshRanking) -> str:
    first, count = ranking.best, len(ranking.forecasts)
    origin = source_name('jaxpr' if first.back_end == 'none' else 'compiler', first)
    meshes = '1 mesh' if count == 1 else f'{count} meshes'
    return f'{first.function} on {meshes} of {machine_name(first)}, the best first ({origin})'


def _rows(ranking: MeshRanking) -> list[tuple[str, ...]]:
    rows = list[tuple[str, ...]]()
    for one in ranking.forecasts[:_LISTED]:
        rows.append(
            (
                describe_axes(one.mesh),
                verdict(one.fits),
                seconds_str(one.time.seconds) if one.time else '-',
                share_str(one.mfu) if one.mfu is not None else '-',
                bytes_str(one.memory.peak),
                bytes_str(sum(c.total_bytes for c, _ in one.collectives)),
            )
        )
    return rows


def _failures(ranking: MeshRanking) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for mesh, why in ranking.failed.items():
        reasons.setdefault(why, []).append(mesh)
    return [f'not possible: {", ".join(meshes)}: {why}' for why, meshes in reasons.items()]


def ranking_table(ranking: MeshRanking) -> Html:
    """The ranking as a table of a page."""
    failures = [tag('p', line) for line in _failures(ranking)]
    return tag(
        'div', tag('p', tag('b', _title(ranking))), plain_table(_HEAD, _rows(ranking)), *failures
    )

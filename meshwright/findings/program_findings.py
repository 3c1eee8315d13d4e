"""The findings of a traced function."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.sharding import Mesh

from meshwright.calls.held import HeldArray
from meshwright.findings import (
    array_checks,
    call_checks,
    frozen_checks,
    gathered_layers,
    gathered_rows,
    memory_checks,
    product_checks,
    shard_map_checks,
    work_checks,
)
from meshwright.findings.exchange_checks import find_needless_exchanges
from meshwright.findings.map_entries import with_map_entries
from meshwright.findings.program_facts import ProgramFacts
from meshwright.jax_private import TracedCall
from meshwright.report.forecasts import Forecast, ForecastFinding
from meshwright.report.page.html_tables import plain_table
from meshwright.report.page.markup import Html, tag
from meshwright.user_lines import shorten_sources
from partitioning.plan.findings import Finding
from partitioning.rules import MeshLike

# In the order in which a reader mends them.
_CHECKS: tuple[Callable[[ProgramFacts], Iterator[Finding]], ...] = (
    array_checks.find_whole_batches,
    work_checks.find_whole_work,
    array_checks.find_whole_arrays,
    shard_map_checks.find_whole_shard_maps,
    product_checks.find_cut_products,
    gathered_rows.find_gathered_rows,
    gathered_layers.find_gathered_layers,
    product_checks.find_indivisible_constraints,
    frozen_checks.find_frozen_states,
    array_checks.find_unlike_optimizer_states,
    array_checks.find_constants,
    memory_checks.find_kept_layers,
    call_checks.find_changed_layouts,
    call_checks.find_changed_types,
    call_checks.find_undonated,
    product_checks.find_host_work,
)


class Findings(tuple[Finding, ...]):
    """The findings of a function: one line each in print, and a table in a notebook."""

    def __str__(self) -> str:
        return '\n'.join(map(str, self)) if self else 'no findings'

    def _repr_html_(self) -> str:
        return findings_table(self)


def lint_program(
    traced: TracedCall,
    mesh: MeshLike,
    held: Sequence[HeldArray],
    results: Sequence[Any] | None = None,
) -> Findings:
    """Returns what is wrong or wasteful in the layouts of a traced function.

    Args:
      traced: the function.
      mesh: its mesh.
      held: the arrays of its arguments.
      results: the sharding of each result of the compiled program, by default those that the
        function states.
    """
    known = traced.results if results is None else results
    facts = ProgramFacts(traced=traced, mesh=mesh, held=held, results=known)
    found = with_map_entries(finding for check in _CHECKS for finding in check(facts))
    return Findings(map(_shortened, found))


def with_exchanges(
    found: Findings, traced: TracedCall, mesh: Mesh, held: Sequence[HeldArray]
) -> Findings:
    """The findings of a function with the exchanges that it does not need, at other places.

    Args:
      found: the other findings.
      traced, mesh, held: as for `lint_program`.
    """
    places = {finding.where for finding in found}
    more: list[Finding] = []
    with contextlib.suppress(Exception):  # of an operation that nobody has thought of
        more += map(_shortened, find_needless_exchanges(traced, mesh, held))
    return Findings((*found, *(one for one in more if one.where not in places)))


def _shortened(finding: Finding) -> Finding:
    return finding._replace(
        where=shorten_sources(finding.where), message=shorten_sources(finding.message)
    )


def with_findings(
    forecast: Forecast,
    traced: TracedCall,
    mesh: MeshLike,
    held: Sequence[HeldArray],
    results: Sequence[Any] | None = None,
) -> Forecast:
    """A forecast with the findings of its function. One that cannot be read has a note.

    Args:
      forecast: the forecast.
      traced, mesh, held, results: as for `lint_program`.
    """
    try:
        found = lint_program(traced, mesh, held, results)
    except Exception as error:  # of an operation that nobody has thought of
        why = f'{type(error).__name__}: {error}'.splitlines()[0]
        note = f'findings were not looked for, because of {why}'
        return dataclasses.replace(forecast, notes=(*forecast.notes, note))
    findings = (ForecastFinding(kind=f.kind, where=f.where, message=f.message) for f in found)
    return dataclasses.replace(forecast, findings=tuple(findings))


def findings_table(findings: Sequence[Finding]) -> Html:
    """Findings as a table of a page."""
    if not findings:
        return tag('p', 'No findings.')
    rows = [[tag('code', f.where), f.kind, f.message] for f in findings]
    return plain_table(('where', 'what', 'finding'), rows)

"""The table of measured rows next to the forecasts of their own programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from partitioning.amounts import bytes_str
from partitioning.hardware import CHIPS

from .own_cases import OwnForecast, find_differences, score_own

_ORIGINS = {'jaxpr': 'by formula', 'compiler': 'of compiled programs'}
_COLUMNS = ('mean', 'median', 'worst', 'bias', 'naive', 'inside')


def print_own(forecasts: Sequence[OwnForecast], reasons: Mapping[str, str]) -> None:
    """Prints a line per row, the errors by chip and by framework, and what is missing."""
    print(f'{len(forecasts)} rows are forecast from their own programs, {len(reasons)} are not.\n')
    print(
        f'{"row":42} {"measured":>9} {"compiled":>18} {"by formula":>18} {"naive":>7} '
        f'{"peak of":>10} {"limit":>10} {"fits":>4} {"cpu s":>6}'
    )
    order = list(CHIPS)
    for f in sorted(forecasts, key=lambda f: order.index(f.row.chip)):
        print(_line(f))
    used = [f for f in forecasts if f.row['usable_for_step_time']]
    for origin, title in _ORIGINS.items():
        _print_scores(f'Errors of forecasts {title}, by chip', used, origin, lambda f: f.row.chip)
        _print_scores('By framework', used, origin, lambda f: f.row['framework'].split()[0])
        _print_scores('By class', used, origin, lambda f: f.row['class'])
    _print_list('Rows that ran, and do not fit by their forecast', _unfit(forecasts))
    _print_list('Programs that differ from what was measured', _differences(forecasts))
    _print_list('Rows without a forecast', reasons.items())


def _line(f: OwnForecast) -> str:
    cells = [
        f'{"-":>18}'
        if time is None
        else f'{time.seconds:8.2f} s {time.seconds / f.row.step_seconds - 1:+7.1%}'
        for time in (f.compiled, f.traced)
    ]
    found = f.found
    peak = _peak_of(found)
    fits = 'yes' if found['fits'] else 'no'
    old = '  superseded' if f.row.superseded else ''
    return (
        f'{f.row.name:42} {f.row.step_seconds:7.2f} s {" ".join(cells)} '
        f'{f.naive / f.row.step_seconds - 1:+7.1%} {bytes_str(peak):>10} '
        f'{bytes_str(found["memory_limit"]):>10} {fits:>4} {found["seconds"]["all"]:6.0f}{old}'
    )


def _print_scores(
    title: str,
    forecasts: Sequence[OwnForecast],
    origin: str,
    kind: Callable[[OwnForecast], str],
) -> None:
    print(f'\n{title}')
    heads = ''.join(f'{name:>8}' for name in _COLUMNS)
    print(f'  {"":16} {"rows":>4}{heads} {"rank":>6}')
    for name in (*sorted({kind(f) for f in forecasts}), 'all'):
        scored = score_own([f for f in forecasts if name in (kind(f), 'all')], origin)
        if scored is None:
            continue
        rows, found = scored
        cells = ''.join(f'{found[column]:8.1%}' for column in _COLUMNS)
        rank = '' if found['rank'] is None else f'{found["rank"]:.3f}'
        print(f'  {name:16} {rows:4}{cells} {rank:>6}')


def _unfit(forecasts: Sequence[OwnForecast]) -> Iterator[tuple[str, str]]:
    for f in forecasts:
        if not f.found['fits']:
            by = 'the compiler' if f.found['memory'] or f.found['needed'] else 'formula'
            peak, limit = bytes_str(_peak_of(f.found)), bytes_str(f.found['memory_limit'])
            yield f.row.name, f'{peak} of {limit}, by {by}'


def _peak_of(found: Mapping[str, Any]) -> int:
    if found['memory']:
        return found['memory']['peak']
    return found['needed'] or found['peak_by_formula']


def _differences(forecasts: Sequence[OwnForecast]) -> Iterator[tuple[str, str]]:
    for f in forecasts:
        for difference in find_differences(f):
            yield f.row.name, difference


def _print_list(title: str, pairs: Iterable[tuple[str, str]]) -> None:
    found = list(pairs)
    if found:
        print(f'\n{title}')
        for name, text in found:
            print(f'  {name:42} {text}')

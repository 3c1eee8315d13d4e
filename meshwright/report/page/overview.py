"""The answers of forecasts: next to each other in a table, and of one in large figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.report.forecasts import Forecast
from meshwright.report.page.exchange_section import network_name
from meshwright.report.page.markup import Child, Html, tag
from meshwright.report.page.memory_section import meter
from meshwright.report.page.time_section import no_time
from partitioning.amounts import bytes_str, flops_str, seconds_str, share_str
from partitioning.rules import describe_axes


def machine_name(forecast: Forecast) -> str:
    """The machine as a heading has it: 'v5e:16x16, 2 slices'."""
    slices = f', {forecast.num_slices} slices' if forecast.num_slices > 1 else ''
    return f'{forecast.topology}{slices}'


def comparison(forecasts: Sequence[Forecast], ids: Sequence[str]) -> Html:
    """Returns a table with one column for each forecast.

    Args:
      forecasts: the forecasts.
      ids: the ids of their parts of the page, which the headings lead to.
    """
    head = [
        tag(
            'th',
            tag('a', machine_name(f), href=f'#{name}'),
            tag('small', describe_axes(f.mesh)),
            scope='col',
        )
        for f, name in zip(forecasts, ids, strict=True)
    ]
    rows = [
        tag('tr', tag('th', title, scope='row'), *(tag('td', cell(f)) for f in forecasts))
        for title, cell in _ROWS
    ]
    table = tag(
        'table',
        tag('caption', 'the machines, next to each other', class_='hidden'),
        tag('thead', tag('tr', tag('td'), *head)),
        tag('tbody', *rows),
    )
    return tag('section', tag('div', table, class_='plain compare', tabindex='0'))


def verdict(forecast: Forecast) -> Html:
    """Returns whether a forecast fits, as a word with a sign."""
    sign, words, kind = {
        True: ('✓', 'fits', 'yes'),
        False: ('✕', 'does not fit', 'no'),
        None: ('?', 'limit not known', 'unknown'),
    }[forecast.fits]
    return tag('span', tag('span', sign, aria_hidden='true'), f' {words}', class_=f'verdict {kind}')


def tiles(forecast: Forecast) -> Html:
    """Returns the figures of a forecast that matter most, each with where it comes from."""
    compiler = forecast.back_end_version if forecast.back_end != 'none' else 'formula'
    shown = [
        _tile('peak memory', bytes_str(forecast.memory.peak), _free(forecast), compiler),
        _time_tile(forecast),
        _tile('sent per step', _sent_str(forecast), _sent_by_network(forecast), compiler),
        _tile(
            'model FLOPs',
            flops_str(forecast.model_flops),
            f'the program executes {flops_str(forecast.program_flops)}',
            'jaxpr',
        ),
    ]
    return tag('div', *shown, class_='tiles')


def _tile(name: str, figure: str, note: str, origin: str) -> Html:
    return tag(
        'div',
        tag('span', name, class_='name'),
        tag('strong', figure),
        tag('span', note, class_='note') if note else None,
        tag('span', origin, class_='origin'),
        class_='tile',
    )


def _time_tile(forecast: Forecast) -> Html:
    time = forecast.time
    if time is None:
        return _tile('step time', '-', no_time(forecast), 'model')
    note = f'{seconds_str(time.low)} to {seconds_str(time.high)}'
    if forecast.mfu is not None:
        note += f', MFU {share_str(forecast.mfu)}'
    return _tile('step time', seconds_str(time.seconds), note, 'model')


def _free(forecast: Forecast) -> str:
    limit, peak = forecast.memory.limit, forecast.memory.peak
    if limit is None:
        return ''
    return f'{share_str(peak / limit)} of {bytes_str(limit)}'


def _sent_str(forecast: Forecast) -> str:
    if not forecast.collectives and forecast.back_end == 'none':
        return '-'
    return bytes_str(sum(c.total_bytes for c, _ in forecast.collectives))


def _sent_by_network(forecast: Forecast) -> str:
    networks = dict.fromkeys(c.network for c, _ in forecast.collectives)
    sent = {
        n: sum(c.total_bytes for c, _ in forecast.collectives if c.network == n) for n in networks
    }
    return ', '.join(f'{network_name(forecast, n)} {bytes_str(b)}' for n, b in sent.items())


def _peak_cell(forecast: Forecast) -> Child:
    return [f'{bytes_str(forecast.memory.peak)} ', meter(forecast.memory)]


def _time_cell(forecast: Forecast) -> Child:
    time = forecast.time
    if time is None:
        return '-'
    return [
        seconds_str(time.seconds),
        tag('small', f'{seconds_str(time.low)} to {seconds_str(time.high)}'),
    ]


def _mfu_cell(forecast: Forecast) -> str:
    return '-' if forecast.mfu is None else share_str(forecast.mfu)


def _temporaries_cell(forecast: Forecast) -> str:
    size = forecast.memory.temporaries
    return '-' if size is None else bytes_str(size)


def _limit_cell(forecast: Forecast) -> str:
    return '-' if forecast.memory.limit is None else bytes_str(forecast.memory.limit)


_ROWS: tuple[tuple[str, Callable[[Forecast], Child]], ...] = (
    ('fits', verdict),
    ('peak memory', _peak_cell),
    ('limit', _limit_cell),
    ('arguments', lambda f: bytes_str(f.memory.arguments)),
    ('temporaries', _temporaries_cell),
    ('gradients (formula)', lambda f: bytes_str(f.memory.gradients)),
    ('activations (formula)', lambda f: bytes_str(f.memory.activations)),
    ('step time (model)', _time_cell),
    ('MFU', _mfu_cell),
    ('sent', lambda f: [_sent_str(f), tag('small', _sent_by_network(f))]),
    ('model FLOPs', lambda f: flops_str(f.model_flops)),
    ('program FLOPs', lambda f: flops_str(f.program_flops)),
    ('figures from', lambda f: f.back_end_version if f.back_end != 'none' else 'formulas'),
)

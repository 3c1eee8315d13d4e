"""The memory of a device: what fills it, and how much there is."""

from __future__ import annotations

from meshwright.report.figures import verdict
from meshwright.report.forecasts import Forecast, MemoryForecast
from meshwright.report.page.bars import Part, legend, lens, mark, stacked_bar
from meshwright.report.page.html_tables import plain_table
from meshwright.report.page.markup import Html, tag
from partitioning.amounts import share_str

_PARAMETERS, _OPTIMIZER, _BATCH, _OTHER, _GRADIENTS, _ACTIVATIONS, _TEMPORARIES = range(7)


def show_memory(forecast: Forecast) -> Html:
    """Returns the bars of the memory, against the limit of the chip."""
    memory = forecast.memory
    compiled = forecast.back_end != 'none'
    parts = _by_formula(memory)
    if compiled:
        rest = max(memory.peak - memory.arguments, 0)
        parts = _arguments(memory) + _parts(memory, ('temporaries at the peak', rest, _TEMPORARIES))
    bar = stacked_bar(parts, max(sum(p.size for p in parts), 1), 'what fills the memory')
    blocks = [
        tag('div', tag('p', _words(memory), class_='words'), meter(memory)),
        tag('div', lens(memory.peak / max(memory.limit or 0, memory.peak, 1)), bar),
        legend(parts),
    ]
    if compiled:
        formula = _by_formula(memory)
        whole = max(memory.analytic_peak, sum(part.size for part in formula), 1)
        blocks += [
            tag(
                'h4',
                f'By formula, without a compiler: {memory.show_bytes(memory.analytic_peak)}',
                tag('small', f' {_difference(memory)}'),
            ),
            stacked_bar(formula, whole, 'the memory by formula'),
            legend(formula),
        ]
    if forecast.changes:
        rows = [
            (
                tag('code', change.setting),
                memory.show_bytes(change.peak),
                verdict(change.fits),
                'compiler' if change.peak_from == 'compiler' else 'formula',
            )
            for change in forecast.changes
        ]
        heading = tag('h4', 'Settings that need less')
        blocks.append(
            tag('div', heading, plain_table(('setting', 'peak', '', 'figure from'), rows))
        )
    return tag('section', tag('h3', 'Memory of a device'), *blocks, class_='memory')


def meter(memory: MemoryForecast) -> Html:
    """Returns a small bar of the peak against the limit."""
    whole = max(memory.limit or 0, memory.peak, 1)
    color = 'full' if memory.fits is False else 'used'
    used = Part(name='peak', size=memory.peak, figure=memory.show_bytes(memory.peak), color=0)
    marks = []
    if memory.limit is not None:
        limit = f'limit: {memory.show_bytes(memory.limit)}'
        marks.append(mark(memory.limit / whole, 'limit', limit))
    return tag('div', stacked_bar([used], whole, _words(memory), *marks), class_=f'meter {color}')


def _words(memory: MemoryForecast) -> str:
    if memory.limit is None:
        return f'{memory.show_bytes(memory.peak)} at the peak; the limit of this chip is not known'
    free = memory.limit - memory.peak
    left = memory.show_bytes(abs(free))
    left += ' free' if free >= 0 else ' too much'
    peak, limit = memory.show_bytes(memory.peak), memory.show_bytes(memory.limit)
    return f'{peak} of {limit} at the peak ({share_str(memory.peak / memory.limit)}), {left}'


def _arguments(memory: MemoryForecast) -> list[Part]:
    return _parts(
        memory,
        ('parameters', memory.parameters, _PARAMETERS),
        ('optimizer', memory.optimizer, _OPTIMIZER),
        ('batch', memory.batch, _BATCH),
        ('other arguments', memory.other, _OTHER),
    )


def _by_formula(memory: MemoryForecast) -> list[Part]:
    rest = memory.analytic_peak - memory.arguments - memory.gradients - memory.activations
    return _arguments(memory) + _parts(
        memory,
        ('gradients', memory.gradients, _GRADIENTS),
        ('activations for the backward pass', memory.activations, _ACTIVATIONS),
        ('other temporaries', max(rest, 0), _TEMPORARIES),
    )


def _parts(memory: MemoryForecast, *parts: tuple[str, int, int]) -> list[Part]:
    return [
        Part(name=name, size=size, figure=memory.show_bytes(size), color=color)
        for name, size, color in parts
        if size
    ]


def _difference(memory: MemoryForecast) -> str:
    more = memory.analytic_peak / max(memory.peak, 1) - 1
    if abs(more) < 0.0005:
        return "equal to the compiler's peak"
    return f"{share_str(abs(more))} {'more' if more > 0 else 'less'} than the compiler's peak"

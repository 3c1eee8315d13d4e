"""The time of a step: its parts, its range, and the constants that it is computed with."""

from __future__ import annotations

from meshwright.report.figures import outside_words
from meshwright.report.forecasts import Forecast
from meshwright.report.page.bars import Part, color_of, legend, span, stacked_bar
from meshwright.report.page.html_tables import plain_table
from meshwright.report.page.markup import Html, tag
from meshwright.report.time_words import (
    bound_sentence,
    cost_per_million,
    range_sentence,
    tokens_per_second,
)
from meshwright.time import StepTime, TimePart
from partitioning.amounts import flops_str, seconds_str, share_str, value_str

_SMALL = 0.005  # smaller shares of the time are added up


def show_time(forecast: Forecast) -> Html:
    """Returns the parts of the time of a call, with its range and the constants of the model."""
    heading = tag('h3', 'Time of a step')
    time = forecast.time
    if time is None:
        missing = tag('p', f'Not forecast: {no_time(forecast)}.', class_='none')
        return tag('section', heading, missing, class_='time')
    words = (
        f'{seconds_str(time.seconds)} per step, between {seconds_str(time.low)} and '
        f'{seconds_str(time.high)}'
    )
    if forecast.mfu is not None:
        words += f'; MFU {share_str(forecast.mfu)} of {flops_str(forecast.model_flops)} per device'
    words += _more_words(forecast)
    meaning = '; '.join(filter(None, (range_sentence(forecast), outside_words(time))))
    whole = max(time.high, time.seconds) or 1.0
    low, high = time.low / whole, time.high / whole
    title = f'range: {seconds_str(time.low)} to {seconds_str(time.high)}'
    parts = _parts(time)
    return tag(
        'section',
        heading,
        tag('p', words, class_='words'),
        tag('p', bound_sentence(time)),
        tag('p', f'{meaning[0].upper()}{meaning[1:]}.') if meaning else None,
        stacked_bar(parts, whole, 'the parts of the time', span(low, high, title)),
        legend(parts),
        _constants(time),
        class_='time',
    )


def _more_words(forecast: Forecast) -> str:
    """The rate of tokens, and what they cost if the price of a chip is known."""
    rate, cost = tokens_per_second(forecast), cost_per_million(forecast)
    words = '' if rate is None else f'; {rate:,.0f} tokens per second on all devices'
    if cost is not None:
        words += f', a million for {cost:.3g} at {forecast.price:g} per chip and hour'
    return words


def no_time(forecast: Forecast) -> str:
    """Why a forecast has no time."""
    if not forecast.memory.analytic_peak:
        return 'there is no trace of the program'
    if forecast.back_end in ('none', 'cpu'):
        return 'nothing was compiled for this machine'
    return 'there is no step-time model of this chip'


def _parts(time: StepTime) -> list[Part]:
    shown = [part for part in time.parts if part.exposed >= _SMALL * time.seconds]
    parts = [
        Part(
            name=part.name,
            size=part.exposed,
            figure=seconds_str(part.exposed),
            color=color_of(number),
            note=_note(part, time),
        )
        for number, part in enumerate(shown)
    ]
    rest = [part.exposed for part in time.parts if part not in shown]
    if rest:
        name, color = f'{len(rest)} smaller parts', color_of(len(parts))
        parts.append(Part(name=name, size=sum(rest), figure=seconds_str(sum(rest)), color=color))
    return parts


def _note(part: TimePart, time: StepTime) -> str:
    hidden = part.seconds - part.exposed
    share = share_str(part.exposed / time.seconds) if time.seconds else ''
    if hidden > 0.005 * part.seconds:
        return f'{share}; the model takes {seconds_str(hidden)} more as hidden behind computation'
    return share


def _constants(time: StepTime) -> Html | None:
    if not time.constants:
        return None
    rows = [[c.name, value_str(c.value, c.unit), c.source] for c in time.constants]
    table = plain_table(('constant', 'value', 'source'), rows)
    count = len(time.constants)
    return tag(
        'details',
        tag('summary', f'{count} constant{"s" if count > 1 else ""} of the model, with sources'),
        table,
    )

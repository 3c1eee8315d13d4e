"""Forecasts as one HTML file, which needs nothing besides a browser."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.report.figures import machine_name
from meshwright.report.forecasts import Forecast
from meshwright.report.page.array_section import show_arrays, show_buffers, show_replicated
from meshwright.report.page.exchange_section import show_exchanges
from meshwright.report.page.markup import Html, tag
from meshwright.report.page.memory_section import show_memory
from meshwright.report.page.mesh_section import show_machine
from meshwright.report.page.overview import comparison, tiles, verdict
from meshwright.report.page.time_section import show_time
from partitioning.amounts import bytes_str, seconds_str
from partitioning.rules import describe_axes


def write_page(
    forecasts: Forecast | Sequence[Forecast],
    path: str | os.PathLike[str],
    *,
    subject: Mapping[str, str] | None = None,
) -> None:
    """Writes forecasts into one HTML file that works without a network.

    Several forecasts, for example of one function on several machines, are compared in a table.

    Args:
      forecasts: one forecast or several.
      path: the file, such as 'forecast.html'.
      subject: what the forecasts are of, such as {'commit': '1a2b3c'}, which the page begins with.

    Raises:
      ValueError: if there is no forecast.
    """
    Path(path).write_text(render_page(forecasts, subject), encoding='utf-8')


def render_page(
    forecasts: Forecast | Sequence[Forecast], subject: Mapping[str, str] | None = None
) -> str:
    """Returns the text of the file that `write_page` writes."""
    given = [forecasts] if isinstance(forecasts, Forecast) else [*forecasts]
    if not given:
        raise ValueError('a page needs at least one forecast')
    ids = [f'machine-{number}' for number in range(1, len(given) + 1)]
    functions = ', '.join(dict.fromkeys(forecast.function for forecast in given))
    machines = ', '.join(dict.fromkeys(map(machine_name, given)))
    body = tag(
        'body',
        tag(
            'header',
            tag('p', 'Meshwright forecast'),
            tag('h1', functions),
            *(tag('p', f'{name}: {text}') for name, text in (subject or {}).items()),
        ),
        tag(
            'main',
            comparison(given, ids) if len(given) > 1 else None,
            *map(_machine, given, ids),
        ),
        tag('footer', tag('p', 'All figures are per device and call, unless they say otherwise.')),
        tag('script', Html(_read('page.js'))),
    )
    style, script = _read('page.css'), _read('page.js')
    # Nothing is loaded, and no script but this one runs, whatever the names of arrays contain.
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    head = tag(
        'head',
        tag('meta', charset='utf-8'),
        tag('meta', http_equiv='Content-Security-Policy', content=policy),
        tag('meta', name='viewport', content='width=device-width, initial-scale=1'),
        tag('meta', name='color-scheme', content='light dark'),
        tag('title', f'Forecast of {functions} on {machines}'),
        tag('style', Html(style)),
    )
    return f'<!doctype html>\n{tag("html", head, body, lang="en")}\n'


def _machine(forecast: Forecast, name: str) -> Html:
    """One forecast; `name` is its id, with which the names of its tables begin."""
    made = forecast.compilation
    took = (
        f'Tracing and compiling took {seconds_str(made.seconds)}; the process used '
        f'{bytes_str(made.peak_rss)} at most.'
        if made.peak_rss  # a dry run does not measure it
        else None
    )
    source = f'Figures from: {forecast.back_end_version}.' if forecast.back_end_version else None
    listed = [tag('li', note) for note in (*forecast.notes, source, took) if note]
    heading = tag('h3', 'What is exact, and what is not')
    warnings = tag(
        'section',
        tag('h3', 'Warnings of the compiler'),
        tag('ul', *(tag('li', warning) for warning in forecast.warnings)),
        class_='warnings',
    )
    return tag(
        'article',
        tag(
            'h2',
            tag('span', machine_name(forecast), class_='title'),
            tag('span', describe_axes(forecast.mesh), class_='mesh'),
            verdict(forecast),
        ),
        tiles(forecast),
        warnings if forecast.warnings else None,
        show_memory(forecast),
        show_time(forecast),
        show_machine(forecast, f'{name}-mesh'),
        show_exchanges(forecast, f'{name}-exchanges'),
        show_buffers(forecast, f'{name}-buffers'),
        show_arrays(forecast, f'{name}-arrays'),
        show_replicated(forecast, f'{name}-replicated'),
        tag('section', heading, tag('ul', *listed), class_='notes'),
        id=name,
        data_title=machine_name(forecast),
    )


def _read(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding='utf-8')


def _digest(text: str) -> str:
    """The source expression that allows exactly this text in a page."""
    digest = hashlib.sha256(text.encode()).digest()
    return f'sha256-{base64.b64encode(digest).decode()}'

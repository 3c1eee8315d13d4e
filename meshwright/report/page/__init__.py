"""Writes `forecast.html`: forecasts as one file that a browser shows without a network."""

from meshwright.report.page.document import (
    render_page as render_page,
    write_page as write_page,
)

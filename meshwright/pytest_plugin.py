"""The plugin of pytest that the package registers: `pytest --update-forecasts`.

It loads neither jax nor anything else of this package, so it costs nothing in test runs without
layout tests. The assertions themselves are functions of `meshwright`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

_UPDATE = 'MESHWRIGHT_UPDATE_FORECASTS'
_PROPERTY = 'meshwright wrote'
_BEFORE = pytest.StashKey['str | None']()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the flag that updates golden files."""
    parser.getgroup('meshwright').addoption(
        '--update-forecasts',
        action='store_true',
        help='write the golden forecasts and layouts anew, in place of comparing with them',
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tells the checks, here and in processes that tests start, to write golden files."""
    if config.getoption('--update-forecasts'):
        config.stash[_BEFORE] = os.environ.get(_UPDATE)
        os.environ[_UPDATE] = '1'


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leaves the environment as it was."""
    if _BEFORE not in config.stash:
        return
    if (before := config.stash[_BEFORE]) is None:
        os.environ.pop(_UPDATE, None)
    else:
        os.environ[_UPDATE] = before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Notes the golden files that a test has written, which pytest-xdist sends with its report."""
    before = len(_written())
    try:
        return (yield)
    finally:
        for file in _written()[before:]:
            item.user_properties.append((_PROPERTY, str(file)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Lists the golden files that were written, so that nobody overlooks them."""
    reports = [r for found in terminalreporter.stats.values() for r in found]
    properties = [p for r in reports for p in getattr(r, 'user_properties', ())]
    files = dict.fromkeys(value for name, value in properties if name == _PROPERTY)
    if files:
        terminalreporter.section('golden files written; commit them')
        for file in files:
            terminalreporter.write_line(file)


def _written() -> list[Any]:
    """The golden files that this process has written."""
    module = sys.modules.get('meshwright.records.files')
    return [] if module is None else module.WRITTEN

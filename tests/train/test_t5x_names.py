"""Every name and parameter that T5X's gin files bind has a counterpart."""

import inspect
from pathlib import Path

import pytest

from train.gin.checks import is_gone
from train.gin.configurables import listed_names, register, register_listed
from train.t5x.modules import ALIASES

register_listed()  # as every command does
pytestmark = pytest.mark.core

NAMES = [
    line.partition(' =')
    for line in (Path(__file__).parent / 't5x_data/gin_names.txt').read_text().splitlines()
    if line and not line.startswith('#')
]


@pytest.mark.parametrize('name, parameters', [(n, p.split()) for n, _, p in NAMES])
def test_every_name_that_t5x_files_bind_exists(name, parameters):
    ours = ALIASES.translate(name.replace(' ', '.'))
    assert ours in listed_names()
    found = register(ours)
    known = inspect.signature(found.wrapped).parameters
    missing = [p for p in parameters if p not in known and not is_gone(found, p, ALIASES)]
    assert not missing

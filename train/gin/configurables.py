"""Registers with gin what gin files may name. No other module of the trainer knows gin."""

from __future__ import annotations

import importlib
from operator import attrgetter

from gin import config, config_parser

from partitioning import Plan
from train.gin.names import REGISTERED


def load_plan(path: str) -> Plan:
    """Reads the plan file at `path`, for `PjitPartitioner.plan`."""
    return Plan.load(path)


def _register(module: str, name: str) -> None:
    """Registers a function or class, unless gin has this name or the library does not have it.

    Users may have registered it under a name of their own before. Unlike
    `gin.external_configurable`, this notes the module from which the written configuration of a run
    imports the name. The module where it is defined may be private.
    """
    try:
        found = attrgetter(name)(importlib.import_module(module))
    except AttributeError:
        return
    known = config._inverse_lookup(found)
    if known is None or known.name not in REGISTERED.get(known.module, ()):
        location = config_parser.Location(None, 0, None, '')
        source = config_parser.ImportStatement(module, '.' in module, None, location)
        config._make_configurable(
            found, name, module, avoid_class_mutation=True, import_source=(source, name)
        )


for _module, _names in REGISTERED.items():
    for _name in _names:
        _register(_module, _name)

"""Translates the names of arrays between T5X and this package, from the names alone.

`train.t5x.state_names` knows the state of a run, and names its arrays exactly. A checkpoint that is
converted has only names, so Adafactor is recognized by its four statistics of each parameter.
"""

from __future__ import annotations

import re
from collections.abc import Collection

STEP = 'state/step'
STATISTICS = ('m', 'v', 'v_col', 'v_row')


def is_t5x(names: Collection[str]) -> bool:
    """Whether a T5X checkpoint has arrays with these names."""
    return any(name.startswith('target/') for name in names)


def sources_in_t5x(names: Collection[str]) -> dict[str, str]:
    """For each name that this package gives to an array of a T5X checkpoint, the name in T5X.

    The step is two arrays here if the optimizer is T5X's Adafactor, which counts its own steps.

    Args:
      names: the names in the checkpoint of T5X.
    """
    parameters = [name.removeprefix('target/') for name in names if name.startswith('target/')]
    statistics = [f'state/param_states/{path}/{s}' for path in parameters for s in STATISTICS]
    is_adafactor = bool(statistics) and set(statistics) <= set(names)
    sources = {}
    for name in names:
        of_optimizer = name.removeprefix('state/param_states/')
        if name == STEP:
            sources['step'] = name
        elif name.startswith('target/'):
            sources[f'params/{name.removeprefix("target/")}'] = name
        elif of_optimizer == name:
            sources[name] = name
        elif is_adafactor:
            path, _, statistic = of_optimizer.rpartition('/')
            sources[f'opt_state/{statistic}/{path}'] = name
        else:
            sources[f'opt_state/{of_optimizer}'] = name
    if is_adafactor and STEP in names:
        sources['opt_state/step'] = STEP
    return sources


def sources_for_t5x(names: Collection[str]) -> dict[str, str]:
    """For each name that T5X gives to an array of a checkpoint of this package, the name here.

    Args:
      names: the names in the checkpoint of this package.
    """
    sources, counts = dict[str, str](), set[str]()
    for name in names:
        if match := _match_statistic(name, names):
            before, statistic, path = match.groups()
            sources[f'state/param_states/{path}/{statistic}'] = name
            counts.add(f'{before}/step')
    for name in names:
        if name == 'step':
            sources[STEP] = name
        elif name.startswith('params/'):
            sources[f'target/{name.removeprefix("params/")}'] = name
        elif not name.startswith('opt_state/'):
            sources[name] = name
        elif name not in counts and not _match_statistic(name, names):
            sources[f'state/param_states/{name.removeprefix("opt_state/")}'] = name
    return sources


def _match_statistic(name: str, names: Collection[str]) -> re.Match[str] | None:
    """The parts of the name of an array of T5X's Adafactor, or None."""
    match = re.fullmatch(r'(opt_state(?:/.+?)??)/(m|v|v_col|v_row)/(.+)', name)
    if match is None:
        return None
    before, _, path = match.groups()
    return match if {f'{before}/step', f'params/{path}'} <= set(names) else None

"""Translates the names of arrays between T5X and this package.

A checkpoint that is converted has only names, so Adafactor is recognized by its four statistics of
each parameter. `train.t5x.state_names` knows the state of a run, so it knows where Adafactor is.
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
    """
    parameters = [name.removeprefix('target/') for name in names if name.startswith('target/')]
    statistics = [f'state/param_states/{path}/{s}' for path in parameters for s in STATISTICS]
    is_adafactor = bool(statistics) and set(statistics) <= set(names)
    sources = {'opt_state/step': STEP} if is_adafactor and STEP in names else {}
    for name in names:
        of_optimizer = name.removeprefix('state/param_states/')
        path, _, statistic = of_optimizer.rpartition('/')
        if name == STEP:
            ours = 'step'
        elif name.startswith('target/'):
            ours = f'params/{name.removeprefix("target/")}'
        elif of_optimizer == name:
            ours = name
        else:
            ours = f'opt_state/{statistic}/{path}' if is_adafactor else f'opt_state/{of_optimizer}'
        sources[ours] = name
    return sources


def sources_for_t5x(names: Collection[str]) -> dict[str, str]:
    """For each name that T5X gives to an array of a checkpoint of this package, the name here."""
    known, adafactors = set(names), set[str]()
    for name in names:
        match = re.fullmatch(r'(opt_state(?:/.+?)??)/(?:m|v|v_col|v_row)/(.+)', name)
        if match and {f'{match[1]}/step', f'params/{match[2]}'} <= known:
            adafactors.add(match[1])
    counts = {f'{start}/step' for start in adafactors}
    return {name_in_t5x(name, adafactors): name for name in names if name not in counts}


def name_in_t5x(name: str, adafactors: Collection[str]) -> str:
    """T5X's name of an array.

    The parameter params/encoder/norm/scale is target/encoder/norm/scale. Its second moment in T5X's
    Adafactor is state/param_states/encoder/norm/scale/v. T5X has one number of steps, so the count
    of that Adafactor is state/step as well. The state of any other optax transformation has the
    path that T5X gives it, state/param_states/<path in the state of the transformation>.

    Args:
      name: its name here.
      adafactors: where the states of T5X's Adafactor are, such as 'opt_state/0'.
    """
    field, _, rest = name.partition('/')
    if field == 'step':
        return STEP
    if field == 'params':
        return f'target/{rest}'
    if field != 'opt_state':
        return name
    for start in adafactors:
        if name.startswith(f'{start}/'):
            statistic, _, parameter = name.removeprefix(f'{start}/').partition('/')
            return f'state/param_states/{parameter}/{statistic}' if parameter else STEP
    return f'state/param_states/{rest}'

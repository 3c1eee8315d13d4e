"""The settings of a run as texts, and what changed in them since the run was last started.

A run that gin configures has its settings in config.gin, as gin has used them. Any other run has
them in settings.json: the fields of its TrainConfig, and the values that its functions hold, such
as the learning rate inside of an optax transformation.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from etils import epath

from partitioning.untrusted_text import parse_json
from train.config import TrainConfig
from train.gin.text import operative_text
from train.paths import replacing

FILE = 'settings.json'
Effect = Literal['result', 'masks', 'rounding', 'end', 'none', 'told']
EFFECTS: Mapping[Effect, str] = {
    'result': 'changes the result of later steps',
    'end': 'changes when the run ends',
    'masks': 'changes dropout masks, and the result by rounding if there is no dropout',
    'rounding': 'changes the result by rounding only',
    'none': 'does not change the result',
}
# The fields of TrainConfig whose effect is another one than 'result'. The record of the data tells
# of some with more detail.
_FIELDS: Mapping[str, Effect] = {
    **dict.fromkeys(
        (
            *('model_dir', 'evaluators', 'checkpoints', 'evaluate_first', 'writers', 'log_every'),
            *('metrics_on_failure', 'profile_steps', 'compilation_cache', 'prefetch', 'restore'),
            *('collect_garbage_every', 'watchdog', 'weight_metrics', 'evaluate_ema'),
        ),
        'none',
    ),
    **dict.fromkeys(
        ('total_steps', 'relative_steps', 'stop_when', 'max_skips', 'max_roll_backs'), 'end'
    ),
    **dict.fromkeys(('partitioner', 'compiler_options'), 'rounding'),
    'num_microbatches': 'masks',
    **dict.fromkeys(('batch_size', 'sequence_length', 'seed', 'data_seed', 'prng_impl'), 'told'),
}
# The classes and functions that gin files name, whose settings have another effect than 'result'.
_CONFIGURABLES: Mapping[str, Effect] = {
    **dict.fromkeys(
        (
            *('CheckpointConfig', 'RestoreConfig', 'WatchdogConfig', 'Prefetch', 'JsonWriter'),
            *('TensorBoardWriter', 'WeightsAndBiasesWriter', 'HeldOut', 'Samples'),
            *('PredictionFiles', 'DecodedText', 'bleu', 'rouge', 'exact_match', 'squad'),
        ),
        'none',
    ),
    **dict.fromkeys(('EarlyStopping', 'StopIfNotFinite'), 'end'),
    **dict.fromkeys(
        (
            *('PjitPartitioner', 'MoePjitPartitioner', 'MeshConfig', 'AxisRules', 'Remat'),
            *('standard_logical_axis_rules', 'fsdp_logical_axis_rules', 'AttentionSettings'),
            *('num_partitions_that_fit', 'SplashBlocks', 'OutputSettings', 'load_plan'),
        ),
        'rounding',
    ),
}
_ORDER: Sequence[Effect] = ('result', 'masks', 'end', 'rounding', 'none', 'told')
_LONGEST = 60  # characters of a value in a line
_DEEPEST, _MOST = 12, 5000  # functions inside functions, and values in all of them


def settings_of(config: TrainConfig, *, closures: bool = False) -> dict[str, str]:
    """The settings of a run by name: those that gin has used, or else the fields of the config.

    `closures` adds the values that functions hold, if gin has configured nothing.
    """
    if found := parse_settings(operative_text()):
        return found
    walk = _Walk(closures)
    return dict(walk.values('TrainConfig', config))


def parse_settings(text: str) -> dict[str, str]:
    """The settings in the text of a gin file that gin has written."""
    found: dict[str, str] = {}
    name = ''
    for line in text.splitlines():
        if line.startswith((' ', '\t')) and name:  # a value continues
            found[name] = f'{found[name]} {line.strip()}'.strip()
        elif ' = ' in line and not line.startswith('#'):
            name, _, value = line.partition(' = ')
            found[name] = value.strip(' \\')
    return found


class _Walk:
    """Finds the simple values in settings, by their paths."""

    def __init__(self, closures: bool):
        self._closures, self._left = closures, _MOST

    def values(self, name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
        """Yields the path and the text of each simple value."""
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST:
            return
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                if not field.compare:  # It is not a setting.
                    continue
                yield from self.values(f'{name}.{field.name}', getattr(value, field.name), depth)
        elif isinstance(value, Mapping):
            for key, one in value.items():
                yield from self.values(f'{name}[{key!r}]', one, depth + 1)
        elif isinstance(value, list | tuple):
            names = getattr(value, '_fields', range(len(value)))  # of a named tuple
            for key, one in zip(names, value, strict=True):
                path = f'{name}.{key}' if isinstance(key, str) else f'{name}[{key}]'
                yield from self.values(path, one, depth + 1)
        elif value is None or isinstance(value, bool | int | float | str):
            yield name, repr(value)
        elif self._closures and isinstance(value, functools.partial):
            arguments: list[tuple[Any, Any]] = [*enumerate(value.args), *value.keywords.items()]
            for key, one in arguments:
                yield from self.values(f'{name}({key})', one, depth + 1)
            yield from self.values(name, value.func, depth + 1)
        elif self._closures and inspect.isfunction(value):
            yield name, f'the function {value.__module__}.{value.__qualname__}'
            held = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            for variable, cell in held:
                try:
                    content = cell.cell_contents
                except ValueError:  # It is not set yet.
                    continue
                yield from self.values(f'{name}({variable})', content, depth + 1)
        else:
            yield name, type(value).__name__


# ---- what changed


def read_settings(folder: epath.Path, config_file: epath.Path) -> dict[str, str]:
    """The settings with which a run was last started, or nothing if they are unknown."""
    try:
        if config_file.exists():
            return parse_settings(config_file.read_text())
        if (file := folder / FILE).exists():
            found = parse_json(file.read_text())
            return {str(name): str(value) for name, value in found.items()}
    except (OSError, ValueError, AttributeError):  # Nothing depends on them.
        pass
    return {}


def write_settings(folder: epath.Path, settings: Mapping[str, str]) -> None:
    """Writes the settings of a run that gin has not configured."""
    with replacing(folder / FILE) as unfinished:
        unfinished.write_text(json.dumps(dict(settings), indent=1) + '\n')


def describe_changes(
    before: Mapping[str, str], now: Mapping[str, str], names: Collection[str] | None = None
) -> list[str]:
    """Says which settings of a run changed, and which of them matter to the result.

    Args:
      before, now: the settings by name.
      names: the settings to compare; by default, all.

    Returns:
      A line for each setting, those that change the result first, under a heading; or nothing.
    """
    changed: list[tuple[Effect, str, str]] = []
    if not before or not now:
        return []
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name, 'not set'), now.get(name, 'not set')
        effect = effect_of(name, {**before, **now})
        if old != new and effect != 'told' and (names is None or name in names):
            changed.append((effect, name, f'{_short(old)} -> {_short(new)}'))
    if not changed:
        return []
    changed.sort(key=lambda one: _ORDER.index(one[0]))
    return [
        'settings that changed since the run was last started:',
        *(f'  {name}: {values} ({EFFECTS[effect]})' for effect, name, values in changed),
    ]


def effect_of(name: str, settings: Mapping[str, str]) -> Effect:
    """What a change of a setting does to the result.

    `name` is the setting, such as `optax.adamw.b1`, `TrainConfig.task.source` or a macro.
    """
    parts = name.rpartition('/')[2].split('.')
    if len(parts) == 1:
        use = re.compile(rf'%{re.escape(parts[0])}\b')
        users = [effect_of(one, settings) for one, v in settings.items() if use.search(v)]
        return min(users, key=_ORDER.index, default='result')
    if parts[0] == 'TrainConfig' or parts[-2] in ('TrainConfig', 'train'):
        field = re.split(r'[\[(]', parts[1] if parts[0] == 'TrainConfig' else parts[-1])[0]
        return _FIELDS.get(field, 'result')
    return _CONFIGURABLES.get(parts[-2], 'result')


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f'{text[: _LONGEST - 3]}...'

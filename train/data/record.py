"""The record of a run's data: written next to its checkpoints, and compared when it resumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from partitioning.untrusted_text import parse_json
from train.data.rows.open_task import OpenTask
from train.errors import ConfigError
from train.paths import absolute, replacing
from train.processes.disagreements import digest
from train.processes.together import check_same

FILE = 'data.json'
STARTS_AFTER = 'starts_after'
# What else than the rows of later steps depends on a setting.
_EFFECTS = dict.fromkeys(('random_seed', 'prng_impl'), 'later steps use other random numbers')


def data_record(
    task: OpenTask, evaluations: Mapping[str, OpenTask], **settings: Any
) -> dict[str, Any]:
    """Describes all that determines the training rows of each step and the evaluated rows, as JSON.

    `evaluations` are the tasks whose held-out parts are evaluated, by name. The other settings
    determine, together with the data, the rows and the random numbers of a step.
    """
    return {
        'tokenizer': task.tokenizer_identity,
        'parts': task.record(),
        'evaluations': {name: evaluated.record() for name, evaluated in evaluations.items()},
        'settings': settings,
    }


def recorded_setting(directory: epath.Path, name: str) -> Any:
    """Returns a setting of the earlier run in a directory, or None if there is no record of it.

    Raises a ConfigError if the record cannot be read.
    """
    return _read(directory / FILE, lambda before: before['settings'].get(name))


def recorded_start(directory: epath.Path) -> int:
    """Returns the step after which the data of the earlier run in a directory began.

    Raises a ConfigError if the record cannot be read.
    """
    return _read(directory / FILE, lambda before: int(before.get(STARTS_AFTER, 0))) or 0


def _read(path: epath.Path, find: Callable[[Any], Any]) -> Any:
    """What a function finds in the record of an earlier run, or None if there is no record."""
    if not path.exists():
        return None
    try:
        return find(parse_json(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f'{path} cannot be read ({error}): delete it to resume') from error


def record_of(checkpoints: epath.Path) -> epath.Path:
    """The record of the run that a directory of checkpoints belongs to.

    It lies next to the directory, or in it if the checkpoints are in the folder of the run.
    """
    inside = absolute(checkpoints) / FILE
    return inside if inside.exists() else absolute(checkpoints).parent / FILE


def check_same_everywhere(record: Mapping[str, Any]) -> None:
    """Checks that all processes read the same data. Every process must call it.

    Raises a Disagreement if some processes read other data than the others, with a table.
    """
    values: dict[str, Any] = {'tokenizer': record['tokenizer'], **record['settings']}
    parts = {'training data': record['parts'], **record['evaluations']}
    for name, these in parts.items():
        for part in these:
            count = f'{part["documents"]:,} and {part["held_out_documents"]:,} documents'
            values[f'{name} {part["source"]}'] = f'{count}, hash {digest(part)}'
    check_same('opening the data', values, 'all hosts must have the same files and settings')


def check_same_as_before(directory: epath.Path, record: dict[str, Any], step: int) -> list[str]:
    """Checks that a resumed run reads the data that it began with.

    Raises a ConfigError if the documents, the tokenizer, the rows or the weights have changed, or
    if the record of the run cannot be read. Returns one sentence for each changed setting. Such a
    change is allowed, but the run's later steps see different rows.
    """
    path = directory / FILE
    before = _read(path, lambda r: (_identity(r), _summary(r), {**r['settings']}))
    if before is None:
        return []
    identity, then, settings = before
    if identity != _identity(json.loads(json.dumps(record))):
        raise ConfigError(
            f'the data has changed since this run began: it was {then}, and is now '
            f'{_summary(record)}. Use the original data or another MODEL_DIR, or delete {path} to '
            'resume with the new data'
        )
    changes = []
    for name, value in record['settings'].items():
        if name in settings and settings[name] != value:
            effect = _EFFECTS.get(name, 'later steps see different rows')
            if name == 'batch_size':
                last, following = step * settings[name] - 1, step * value
                effect += f' (row {following} follows row {last})'
            changes.append(f'{name} changed from {settings[name]} to {value}: {effect}')
    return changes


def check_restored_tokenizer(
    checkpoints: epath.Path, tasks: Mapping[str, OpenTask], setting: str
) -> None:
    """Checks that a restored checkpoint was trained with the tokenizer of the tasks.

    Without a record next to the checkpoints, nothing is checked. Raises a ConfigError if the
    tokenizers differ, or if the record cannot be read.
    """
    path = record_of(checkpoints)
    if not path.exists():
        return
    before = _read(path, lambda record: record['tokenizer'])
    for name, task in tasks.items():
        if (now := task.tokenizer_identity) != before:
            raise ConfigError(
                f'the checkpoint was trained with the tokenizer {before!r} ({path}), but the task '
                f'{name + " " if name else ""}has {now!r}: use the same tokenizer, or another '
                f'{setting}'
            )


def write_record(directory: epath.Path, record: dict[str, Any]) -> None:
    """Writes the record of a run. The file is replaced in one step, so it is never half-written."""
    with replacing(directory / FILE) as unfinished:
        unfinished.write_text(json.dumps(record, indent=1) + '\n')


def _identity(record: dict[str, Any]) -> Any:
    """The part of a record that must not change: everything except the names of the sources."""
    parts = [{k: v for k, v in part.items() if k != 'source'} for part in record['parts']]
    return record['tokenizer'], parts


def _summary(record: dict[str, Any]) -> str:
    parts = [
        f'{part["source"]} with {part["documents"]:,} training and {part["held_out_documents"]:,} '
        f'held-out documents, {part["bytes"]:,} bytes (hash {part["content_hash"][:8]}, '
        f'weight {part["weight"]:.3g}, '
        + ' '.join(str(v) if k == 'task' else f'{k}={v}' for k, v in part['rows'].items())
        + ')'
        for part in record['parts']
    ]
    return f'{", ".join(parts)}, tokenizer {str(record["tokenizer"])[:28]}'

"""What data a run learns from: noted beside its checkpoints, and compared when it goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from train.data.rows.open_task import OpenTask
from train.errors import ConfigError

FILE = 'data.json'


def data_record(
    task: OpenTask, evaluations: Mapping[str, OpenTask], **settings: int | None
) -> dict[str, Any]:
    """What decides the rows of every step, and those that are evaluated.

    Args:
      task: the training data.
      evaluations: the tasks whose held-out parts are evaluated, by name.
      settings: the numbers that decide, with the data, which rows a step has.
    """
    return {
        'tokenizer': task.tokenizer.identity,
        'parts': _parts(task),
        'evaluations': {name: _parts(evaluated) for name, evaluated in evaluations.items()},
        'settings': settings,
    }


def _parts(task: OpenTask) -> list[dict[str, Any]]:
    return [
        {
            'source': part.name,
            'documents': part.index.training.num_documents,
            'held_out_documents': part.index.held_out.num_documents,
            'bytes': part.index.training.num_bytes,
            'content_hash': part.index.content_hash,
            'weight': part.weight,
            'rows': dict(part.settings),
        }
        for part in task.parts
    ]


def check_same_everywhere(record: dict[str, Any]) -> None:
    """Each process reads the same data; all of them call this together.

    Raises:
      ConfigError: naming the processes that read other data than the first.
    """
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    digest = hashlib.blake2b(json.dumps(record).encode(), digest_size=16).digest()
    digests = np.asarray(multihost_utils.process_allgather(np.frombuffer(digest, np.uint8)))
    differing = np.flatnonzero((digests != digests[0]).any(axis=1)).tolist()
    if differing:
        raise ConfigError(
            f'processes {differing} read other data, to train on or to evaluate, than process 0: '
            'the same files must be on all hosts, and the same settings; process '
            f'{jax.process_index()} has {_summary(record)}'
        )


def check_same_as_before(directory: Path, record: dict[str, Any], step: int) -> list[str]:
    """The data of a run that goes on is what it was when the run began.

    Args:
      directory: of the run.
      record: its data now.
      step: the one it goes on from.

    Returns:
      The settings that have changed, in words: rows of later steps are others than they would have
      been.

    Raises:
      ConfigError: documents, tokenizer or weights have changed.
    """
    path = directory / FILE
    if not path.exists():
        return []
    try:
        before = json.loads(path.read_text())
        same = _what_decides(before) == _what_decides(json.loads(json.dumps(record)))
        then, settings = _summary(before), {**before['settings']}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f'{path} cannot be read ({error}): delete it to go on') from error
    if not same:
        raise ConfigError(
            f'the data has changed since this run began: {then} then, {_summary(record)} now. Use '
            f'the data it was trained on, or another MODEL_DIR; without {path} it goes on with the '
            'new data'
        )
    changes = []
    for name, value in record['settings'].items():
        if name in settings and settings[name] != value:
            rows = ''
            if name == 'batch_size':
                rows = (
                    f' (it goes on with row {step * value}, after row {step * settings[name] - 1})'
                )
            changes.append(f'{name} was {settings[name]}, and is {value}{rows}')
    return changes


def check_restored_tokenizer(
    checkpoints: Path, tasks: Mapping[str, OpenTask], setting: str
) -> None:
    """A restored checkpoint was trained on the tokens of the tasks, as far as its run says so.

    Args:
      checkpoints: the folder of checkpoints, beside which its run has noted its data.
      tasks: to train or to evaluate on, by name.
      setting: what names the checkpoint.

    Raises:
      ConfigError: with both tokenizers.
    """
    path = checkpoints.resolve().parent / FILE
    if not path.exists():
        return
    try:
        before = json.loads(path.read_text())['tokenizer']
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'{path} cannot be read ({error}): delete it to go on') from error
    for name, task in tasks.items():
        if (now := task.tokenizer.identity) != before:
            raise ConfigError(
                f'the checkpoint was trained with the tokenizer {before!r} ({path}), but the task '
                f'{name + " " if name else ""}has {now!r}: use the same, or another {setting}'
            )


def write_record(directory: Path, record: dict[str, Any]) -> None:
    """Notes the data of a run; whatever happens, the file is whole."""
    unfinished = directory / f'{FILE}.unfinished'
    unfinished.write_text(json.dumps(record, indent=1) + '\n')
    os.replace(unfinished, directory / FILE)


def _what_decides(record: dict[str, Any]) -> Any:
    """The part of a record that must not change: all but how patterns are spelled."""
    parts = [{k: v for k, v in part.items() if k != 'source'} for part in record['parts']]
    return record['tokenizer'], parts


def _summary(record: dict[str, Any]) -> str:
    parts = [
        f'{part["source"]} with {part["documents"]} + {part["held_out_documents"]} documents, '
        f'{part["bytes"]:,} bytes (hash {part["content_hash"][:8]}, weight {part["weight"]:.3g}, '
        f'{_settings(part["rows"])})'
        for part in record['parts']
    ]
    return f'{", ".join(parts)}, tokenizer {record["tokenizer"][:28]}'


def _settings(rows: dict[str, Any]) -> str:
    return ' '.join(str(value) if k == 'task' else f'{k}={value}' for k, value in rows.items())

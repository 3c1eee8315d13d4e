"""Writes a folder that `transformers` loads: `config.json` and safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from train.checkpoints.huggingface.architectures import (
    ARCHITECTURES,
    Architecture,
    ModelConfig,
    describe_model,
    find_architecture,
    is_tied,
    model_config,
)
from train.checkpoints.huggingface.config_json import FILE, read_config
from train.checkpoints.huggingface.mapping import Target, find_targets, write_targets
from train.checkpoints.safetensors_files import Place, list_places
from train.checkpoints.safetensors_writer import MAX_FILE_BYTES, SafetensorsWriter
from train.checkpoints.stored import StoredArray
from train.errors import ConfigError
from train.paths import as_path

# Files next to the weights that belong to the tokenizer, or to the generation of text.
COPIED = (
    'tokenizer.json',
    'tokenizer_config.json',
    'tokenizer.model',
    'spiece.model',
    'special_tokens_map.json',
    'added_tokens.json',
    'vocab.json',
    'merges.txt',
    'chat_template.jinja',
    'generation_config.json',
)


class _Form(NamedTuple):
    """What a model of Hugging Face looks like.

    Attributes:
      architecture: its architecture.
      settings: its `config.json`.
      is_tied: whether its output layer is its embedding.
      places: the arrays of the model that decides names and dtypes, or none.
    """

    architecture: Architecture
    settings: dict[str, Any]
    is_tied: bool
    places: Mapping[str, Place]


def write_model(
    arrays: Mapping[str, StoredArray],
    folder: Any,
    *,
    model: ModelConfig | None = None,
    like: Any = None,
    dtype: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes our parameters as a model of Hugging Face.

    Each array is read once, and the arrays of one fused matrix are in memory at the same time.

    Args:
      arrays: the arrays of a checkpoint by our names. Parameters, which are below 'params/', are
        written, and others are not.
      folder: the local folder to write, which may not exist yet.
      model: the settings of our model, from which the architecture and `config.json` follow.
      like: in place of `model`, the folder of the model from which the run has started. Its
        `config.json` and tokenizer are copied, and arrays have the names, the dtypes and the
        vocabulary that they have there.
      dtype: the dtype of floating-point arrays, by default their own, or that in `like`.
      max_file_bytes: the size from which another file is begun.

    Raises:
      ConfigError: if no architecture computes what our model does, or if the arrays are not those
        of the architecture.
    """
    if (model is None) == (like is None):
        raise ConfigError('a Hugging Face model needs either model or like: give one of them')
    folder = as_path('the folder of a Hugging Face model', folder)
    source = None if like is None else as_path('like', like)
    form = _form_of(model) if source is None else _form_like(source)
    targets = find_targets(form.architecture.table, arrays, form.settings['vocab_size'])
    if source is not None:
        targets = _named_like(source, form, targets)
    structs = {name: _struct(name, target, form, dtype) for name, target in targets.items()}
    dtypes = {struct.dtype for struct in structs.values()}
    settings = form.settings
    if len(dtypes) == 1:
        settings = {**settings, 'torch_dtype': str(next(iter(dtypes)))}
        settings.pop('dtype', None)  # the newer name of the same setting
    with SafetensorsWriter(
        folder, structs, max_file_bytes=max_file_bytes, metadata={'format': 'pt'}
    ) as writer:

        def write(name: str, values: np.ndarray) -> None:
            writer.write(name, values.astype(structs[name].dtype))

        write_targets(targets, arrays, write)
        (folder / FILE).write_text(json.dumps(settings, indent=2) + '\n')
        for file in [] if source is None else [source / name for name in COPIED]:
            if file.exists():
                file.copy(folder / file.name, overwrite=True)


def _form_of(model: ModelConfig | None) -> _Form:
    """The form of the architecture that computes what our model does."""
    assert model is not None
    name, settings = describe_model(model)
    architecture = ARCHITECTURES[name]
    known = {'architectures': [architecture.class_name], 'model_type': name}
    return _Form(architecture, known | settings, is_tied(model), {})


def _form_like(source: epath.Path) -> _Form:
    """The form of the model in a folder."""
    config = read_config(source)
    tied = is_tied(model_config(config))
    return _Form(find_architecture(config), dict(config.values), tied, list_places(source))


def _named_like(
    source: epath.Path, form: _Form, targets: Mapping[str, Target]
) -> dict[str, Target]:
    """The arrays by their names in another model, which may leave out the prefix of the table."""
    table, places = form.architecture.table, form.places
    if not any(name.startswith(table.prefix) for name in places):
        targets = {name.removeprefix(table.prefix): target for name, target in targets.items()}
    differing = {
        name: f'{places[name].shape if name in places else "absent"} there, {target.shape} here'
        for name, target in targets.items()
        if name not in places or places[name].shape != target.shape
    }
    for name in places.keys() - targets.keys():
        if not table.ignores(name, is_tied=form.is_tied):
            differing[name] = f'{places[name].shape} there, absent here'
    if differing:
        first = min(differing)
        raise ConfigError(
            f'the parameters are not those of {source}: {len(differing):,} arrays differ. The '
            f'first is {first}: {differing[first]}. Give the folder of the model from which the '
            'run has started'
        )
    return dict(targets)


def _struct(name: str, target: Target, form: _Form, dtype: str | None) -> jax.ShapeDtypeStruct:
    chosen = form.places[name].dtype if name in form.places else target.dtype
    if dtype is not None and jnp.issubdtype(target.dtype, jnp.floating):
        chosen = jnp.dtype(dtype)
    return jax.ShapeDtypeStruct(target.shape, chosen)

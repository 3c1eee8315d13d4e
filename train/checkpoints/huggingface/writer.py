"""Writes a folder that `transformers` loads: `config.json` and safetensors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from train.checkpoints.arrays.stored import StoredArray
from train.checkpoints.formats.safetensors_files import Place, list_places
from train.checkpoints.formats.safetensors_writer import MAX_FILE_BYTES, SafetensorsWriter
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
from train.checkpoints.huggingface.mapping import PARAMS, Target, find_targets, write_targets
from train.errors import ConfigError

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """The folder that is to be written for a model.

    Attributes:
      arrays: our parameters by name.
      targets: the arrays to write, and how ours become them.
      structs: their shapes and dtypes.
      settings: the content of `config.json`.
      files: files that are copied.
      max_file_bytes: the size from which another file is begun.
    """

    arrays: Mapping[str, StoredArray]
    targets: Mapping[str, Target]
    structs: Mapping[str, jax.ShapeDtypeStruct]
    settings: Mapping[str, Any]
    files: Sequence[epath.Path]
    max_file_bytes: int = MAX_FILE_BYTES

    def write(self, folder: epath.Path, report: Callable[[int], None] = lambda size: None) -> None:
        """Writes the folder. The arrays of one fused matrix are in memory at the same time.

        Args:
          folder: the local folder, which may not exist yet.
          report: receives the size of each of our arrays after it has been written, in bytes.
        """
        writer = SafetensorsWriter(
            folder,
            self.structs,
            max_file_bytes=self.max_file_bytes,
            metadata={'format': 'pt'},
        )
        with writer:

            def write(name: str, values: np.ndarray) -> None:
                writer.write(name, values.astype(self.structs[name].dtype))

            write_targets(self.targets, self.arrays, write, report)
            (folder / FILE).write_text(json.dumps(self.settings, indent=2) + '\n')
            for file in self.files:
                file.copy(folder / file.name, overwrite=True)


def plan_model(
    arrays: Mapping[str, StoredArray],
    *,
    model: ModelConfig | None = None,
    like: epath.Path | None = None,
    dtype: str | None = None,
) -> PlannedModel:
    """Finds out how our parameters become a model of Hugging Face. No array is read.

    Args:
      arrays: our parameters by name, below 'params/'. Other arrays are left out.
      model: the settings of our model, from which the architecture and `config.json` follow.
      like: in place of `model`, the folder of the model from which the run has started. Its
        `config.json` and tokenizer are copied, and arrays have the names, the dtypes and the
        vocabulary that they have there.
      dtype: the dtype of floating-point arrays, by default their own dtype, or the dtype in `like`.

    Raises:
      ConfigError: if no architecture computes what our model does, or if the arrays do not match
        the architecture.
    """
    if (model is None) == (like is None):
        raise ConfigError('a Hugging Face model needs either model or like: give one of them')
    form = _form_of(model) if like is None else _form_like(like)
    params = {name: array for name, array in arrays.items() if name.startswith(PARAMS)}
    targets = find_targets(form.architecture.table, params, form.settings['vocab_size'])
    if like is not None:
        targets = _named_like(like, form, targets)
    structs = {name: _struct(name, target, form, dtype) for name, target in targets.items()}
    dtypes = {struct.dtype for struct in structs.values()}
    settings = form.settings
    if len(dtypes) == 1:
        settings = {**settings, 'torch_dtype': str(next(iter(dtypes)))}
        settings.pop('dtype', None)  # the newer name of the same setting
    files = [] if like is None else [like / name for name in COPIED if (like / name).exists()]
    return PlannedModel(
        arrays=params, targets=targets, structs=structs, settings=settings, files=files
    )


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

"""Writes a folder that `transformers` loads: `config.json` and safetensors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from train.checkpoints.arrays.stored import StoredArray, is_floating
from train.checkpoints.formats.safetensors_files import Place, list_places
from train.checkpoints.formats.safetensors_writer import MAX_FILE_BYTES, SafetensorsWriter
from train.checkpoints.huggingface.architectures import (
    ARCHITECTURES,
    ModelConfig,
    describe_model,
    find_architecture,
    is_tied,
    model_config,
)
from train.checkpoints.huggingface.config_json import FILE, ConfigJson, read_config
from train.checkpoints.huggingface.mapping import PARAMS, Target, find_targets, make_target
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """The folder that is to be written for a model: how our parameters become its arrays.

    `settings` are the content of `config.json`; `files` are copied.
    """

    arrays: Mapping[str, StoredArray]
    targets: Mapping[str, Target]
    structs: Mapping[str, jax.ShapeDtypeStruct]
    settings: Mapping[str, Any]
    files: Sequence[epath.Path]
    max_file_bytes: int = MAX_FILE_BYTES

    def write(self, folder: epath.Path, report: Callable[[int], None] = lambda size: None) -> None:
        """Writes a local folder, and reports the bytes of each of our arrays when it is written.

        The arrays of one fused matrix are in memory at the same time.
        """
        writer = SafetensorsWriter(
            folder,
            self.structs,
            max_file_bytes=self.max_file_bytes,
            metadata={'format': 'pt'},
        )
        groups = dict[tuple[str, ...], list[str]]()
        for name, target in self.targets.items():
            groups.setdefault(tuple(pair.ours for pair, _ in target.parts), []).append(name)
        with writer:
            for sources, names in groups.items():
                values = {source: self.arrays[source].read() for source in sources}
                for name in names:
                    made = make_target(self.targets[name], values)
                    writer.write(name, made.astype(self.structs[name].dtype))
                report(sum(array.nbytes for array in values.values()))
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
    """Finds out how our parameters become a Hugging Face model. No array is read.

    Raises a ConfigError if no architecture computes what our model does, or if the arrays do not
    match the architecture.

    Args:
      arrays: our parameters by name, below 'params/'. Other arrays are left out.
      model: the settings of our model, from which the architecture and `config.json` follow.
      like: in place of `model`, the folder of the model from which the run has started. Its
        `config.json` and tokenizer are copied, and arrays have the names, the dtypes and the
        vocabulary that they have there.
      dtype: the dtype of floating-point arrays, by default their own dtype, or the dtype in `like`.
    """
    if (model is None) == (like is None):
        raise ConfigError('a Hugging Face model needs either model or like: give one of them')
    places: Mapping[str, Place] = {}
    if like is not None:
        config = read_config(like)
        architecture, settings = find_architecture(config), dict(config.values)
        places = list_places(like)
    else:
        assert model is not None
        name, described = describe_model(model)
        architecture = ARCHITECTURES[name]
        settings = {'architectures': [architecture.class_name], 'model_type': name} | described
    params = {name: array for name, array in arrays.items() if name.startswith(PARAMS)}
    targets = find_targets(architecture.table, params, settings['vocab_size'])
    if like is not None:
        targets = _named_like(like, config, places, targets)
    structs = dict[str, jax.ShapeDtypeStruct]()
    for name, target in targets.items():
        chosen = places[name].dtype if name in places else target.dtype
        if dtype is not None and is_floating(target):
            chosen = np.dtype(dtype)
        structs[name] = jax.ShapeDtypeStruct(target.shape, chosen)
    dtypes = {struct.dtype for struct in structs.values()}
    if len(dtypes) == 1:
        settings['torch_dtype'] = str(next(iter(dtypes)))
        settings.pop('dtype', None)  # the newer name of the same setting
    files = [] if like is None else [like / name for name in COPIED if (like / name).exists()]
    return PlannedModel(
        arrays=params, targets=targets, structs=structs, settings=settings, files=files
    )


def _named_like(
    source: epath.Path,
    config: ConfigJson,
    places: Mapping[str, Place],
    targets: Mapping[str, Target],
) -> dict[str, Target]:
    """The arrays by their names in another model, which may leave out the prefix of the table."""
    table, tied = find_architecture(config).table, is_tied(model_config(config))
    if not any(name.startswith(table.prefix) for name in places):
        targets = {name.removeprefix(table.prefix): target for name, target in targets.items()}
    differing = {
        name: f'{places[name].shape if name in places else "absent"} there, {target.shape} here'
        for name, target in targets.items()
        if name not in places or places[name].shape != target.shape
    }
    for name in places.keys() - targets.keys():
        if not table.ignores(name, is_tied=tied):
            differing[name] = f'{places[name].shape} there, absent here'
    if differing:
        first = min(differing)
        raise ConfigError(
            f'these are not the parameters of {source}: {len(differing):,} arrays differ. The '
            f'first is {first}: {differing[first]}. Give the folder of the model from which the '
            'run has started'
        )
    return dict(targets)

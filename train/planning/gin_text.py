"""Settings as gin, for people: what a candidate changes, and whole files that train a run."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from partitioning.amounts import bytes_str, seconds_str
from train.errors import ConfigError
from train.models.config import RopeScaling, TransformerConfig
from train.models.experts import ExpertsConfig
from train.models.t5 import T5Config
from train.planning.candidates import Candidate, RunSizes, join_options
from train.planning.fits import Fit
from train.planning.huggingface.models import FoundModel

# A run that other files include and complete.
PRETRAIN = 'configs/runs/pretrain.gin'
# The default settings that are written, too, because this run has others.
_OF_PRETRAIN = {
    *('remat', 'tie_embeddings', 'dtype', 'rope_max_wavelength'),
    *(f.name for f in dataclasses.fields(TransformerConfig) if f.default is dataclasses.MISSING),
}
# Settings that a layout decides.
_NOT_WRITTEN = {'pipeline', 'attention', 'vocab_size'}


def list_includes(candidate: Candidate) -> list[str]:
    """Returns the statements that include what a candidate adds to the files of a run."""
    preset = candidate.layout.preset
    return [f"include 'configs/partitioning/{preset}.gin'"] if preset else []


def list_bindings(candidate: Candidate, run: RunSizes) -> list[str]:
    """Returns the statements of a candidate that follow its includes."""
    lines = [f'{name} = {size}' for name, size in candidate.layout.sizes]
    if candidate.num_microbatches is not None:
        lines.append(f'TrainConfig.num_microbatches = {candidate.num_microbatches}')
        if candidate.num_microbatches == 1:  # nothing is summed
            lines.append("TrainConfig.accumulation_dtype = 'float32'")
    if candidate.remat == 'offload':
        lines += [
            'TransformerConfig.remat = @Remat()',
            'Remat.save = []',
            "Remat.offload = ['residual']",
        ]
    elif candidate.remat is not None:
        lines.append(f'TransformerConfig.remat = {candidate.remat!r}')
    if candidate.output_chunks is not None and run.output:
        lines += [
            f'{run.output}.output = @OutputSettings()',
            f'OutputSettings.num_chunks = {candidate.output_chunks}',
        ]
    if candidate.compiler_options:
        options = join_options(run.compiler_options, candidate)
        lines.append(f'TrainConfig.compiler_options = {options!r}')
    return lines


def write_gin(
    candidate: Candidate,
    run: RunSizes,
    files: Sequence[str],
    bindings: Sequence[str],
    comment: Sequence[str] = (),
) -> str:
    """Returns the text of a gin file that trains a run with the settings of a candidate."""
    head = [f'# {line}' for line in comment]
    includes = [f'include {_place(file)!r}' for file in files]
    imports = ['import train.models.remat'] if candidate.remat == 'offload' else []
    of_run = ['', '# The run.', *includes, *bindings]
    changed = [*imports, *list_includes(candidate), *list_bindings(candidate, run)]
    return '\n'.join([*head, *of_run, '', '# What the search has changed.', *changed]) + '\n'


def _place(file: str) -> str:
    """The name by which a gin file is found from other folders, too."""
    path = Path(file)
    return str(path.resolve()) if path.exists() and not file.startswith('configs/') else file


def write_pretraining(
    model: TransformerConfig | T5Config, *, batch_size: int, sequence_length: int
) -> list[str]:
    """Returns the lines that follow `PRETRAIN` to train another model. Set TEXT, the data.

    `sequence_length` is the number of tokens in a row; for an encoder and a decoder, of the inputs.
    """
    writes = _write_t5 if isinstance(model, T5Config) else _write_decoder
    return [
        "MODEL_DIR = 'runs/pretrain'",
        f'BATCH_SIZE = {batch_size}',
        f'VOCAB_SIZE = {model.vocab_size:_}',
        *writes(model, sequence_length),
    ]


def write_fit(model: FoundModel, fit: Fit, lines: Sequence[str], file: str = 'run.gin') -> str:
    """Returns the text of a gin file that trains a model with the settings of a fit.
    `lines` are from `write_pretraining`, and `file` is where the text will be.
    """
    assert fit.candidate is not None and fit.forecast is not None
    memory, time = fit.forecast.memory, fit.forecast.time
    step = f', {seconds_str(time.seconds)} per step' if time else ''
    head = [
        f'{model.kind} with {model.num_parameters:,} parameters, for {fit.machine}: '
        f'{bytes_str(memory.peak)} per device{step}, by forecast.',
        '',
        f"  meshwright train {shlex.quote(file)} --gin.TEXT='corpus/**/*.txt'",
        f'  meshwright forecast {shlex.quote(file)} --topology={fit.machine}',
    ]
    comment = [f'# {line}'.rstrip() for line in head]
    of_fit = [*list_includes(fit.candidate), *list_bindings(fit.candidate, fit.sizes)]
    replaced = {line.partition(' = ')[0] for line in of_fit if ' = ' in line}
    kept = [line for line in lines if line.partition(' = ')[0] not in replaced]
    return '\n'.join([*comment, f'include {PRETRAIN!r}', '', *kept, '', *of_fit, ''])


def _write_decoder(model: Any, sequence_length: int) -> list[str]:
    lines = [f'SEQUENCE_LENGTH = {sequence_length}', '']
    for field in dataclasses.fields(TransformerConfig):
        value = getattr(model, field.name)
        is_default = value == field.default and field.name not in _OF_PRETRAIN
        if field.name in _NOT_WRITTEN or is_default:
            continue
        if isinstance(value, RopeScaling | ExpertsConfig):
            kind = type(value).__name__
            lines += [f'TransformerConfig.{field.name} = @{kind}()', *_bind(kind, _changed(value))]
        else:
            lines += _bind('TransformerConfig', {field.name: value})
    return lines


def _write_t5(model: Any, sequence_length: int) -> list[str]:
    settings = {k: v for k, v in _changed(model).items() if k not in _NOT_WRITTEN}
    return [
        f"SEQUENCE_LENGTH = {{'inputs': {sequence_length}}}",
        '',
        'TrainConfig.objective = @EncoderDecoder()',
        'EncoderDecoder.model = @T5()',
        'T5.config = @T5Config()',
        'T5Config.vocab_size = %VOCAB_SIZE',
        *_bind('T5Config', settings | {'dtype': str(model.dtype)}),
        '',
        'TrainConfig.task = @SpanCorruption()',
        'SpanCorruption.source = @TextFiles()',
    ]


def _changed(settings: Any) -> dict[str, Any]:
    """The settings that differ from their defaults."""
    pairs = ((field, getattr(settings, field.name)) for field in dataclasses.fields(settings))
    return {field.name: value for field, value in pairs if value != field.default}


def _bind(name: str, settings: Mapping[str, Any]) -> list[str]:
    for key, value in settings.items():
        if not isinstance(value, str | int | float | tuple | None) or callable(value):
            raise ConfigError(f'{name}.{key} is {value!r}, which a gin file cannot say')
    return [f'{name}.{key} = {value!r}' for key, value in settings.items()]

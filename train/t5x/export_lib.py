"""T5X's `export_lib`: a checkpoint as a program that needs neither this code nor TensorFlow.

T5X writes a SavedModel for TensorFlow Serving. Here, `save` writes StableHLO through jax.export,
the parameters, and a description in JSON; see `train.exporting`, whose `load_program` reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import optax

from partitioning import BasePartitioner, PjitPartitioner, TrainState
from train.checkpoints import find_checkpoint, open_restored
from train.errors import ConfigError, check_counts
from train.exporting import export_program
from train.paths import as_path
from train.reporting.console import RunConsole
from train.t5x.checkpoint_configs import RestoreCheckpointConfig
from train.t5x.models import BaseTransformerModel, DecoderOnlyModel
from train.t5x.refusals import check_off, check_one_of, expect, expect_class, refusal
from train.t5x.seqio import get_mixture_or_task

KEY = 'export_lib.save'
ENCODER = ('encoder_input_tokens', 'decoder_input_tokens')
DECODER = ('decoder_input_tokens', 'decoder_causal_attention')
SCORED = ('decoder_target_tokens', 'decoder_loss_weights')
_SERVING = 'it is a part of TensorFlow Serving'
OFF = {
    'create_decoding_state_callback_fn': 'the model decodes with its own decode_fn',
    'trailing_shapes': 'all features have one dimension',
    'warmup_examples': _SERVING,
    'validation_examples': _SERVING,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportableModule:
    """T5X's module with the parameters.

    Attributes:
      jit_compile: must be True; a program is always compiled.
      use_batch_function: must be False, like the settings of its batches.
      num_batch_threads: has no effect without `use_batch_function`.
      max_enqueued_batches: has no effect without `use_batch_function`.
      batch_timeout_micros: has no effect without `use_batch_function`.
      max_batch_size: must be None.
      allowed_batch_sizes: must be None.
      use_gpu: has no effect; the program runs on every platform.
      enable_large_batch_splitting: has no effect without `use_batch_function`.
    """

    jit_compile: bool = True
    use_batch_function: bool = False
    num_batch_threads: int = 8
    max_enqueued_batches: int = 64
    batch_timeout_micros: int = 1_000_000
    max_batch_size: int | None = None
    allowed_batch_sizes: Sequence[int] | None = None
    use_gpu: bool = False
    enable_large_batch_splitting: bool = True

    def __post_init__(self) -> None:
        key = 'export_lib.ExportableModule'
        why = 'a program is always compiled'
        check_one_of(f'{key}.jit_compile', self.jit_compile, (True,), why)
        why = 'requests are batched by what serves the program'
        for name in ('use_batch_function', 'max_batch_size', 'allowed_batch_sizes'):
            check_off(f'{key}.{name}', getattr(self, name), why)


# The functions around the model, which TensorFlow Serving runs in T5X's exports. A program takes
# and returns tokens, so each of these only checks its settings, and returns what takes its place.


def create_preprocessor(
    batch_size: int | None = None,
    output_features: Mapping[str, Any] | None = None,
    task_feature_lengths: Mapping[str, int] | None = None,
    tokenized_inputs: bool = False,
    *,
    input_tensor_name: str = 'text_batch',
    split_separator: str | None = None,
    bucket_keys: Mapping[str, Sequence[int]] | None = None,
) -> str:
    """Stands for the step from texts to tokens, which may neither be split nor have many lengths.

    `save` has its features and lengths.
    """
    key = 'export_lib.create_preprocessor'
    why = 'the program takes tokens, and its caller makes them'
    check_off(f'{key}.split_separator', split_separator, why)
    check_off(f'{key}.bucket_keys', bucket_keys, 'the rows of a program have one length')
    return 'texts are not an input; the description names the vocabularies'


def create_preprocessor_from_task(
    batch_size: int | None = None,
    output_features: Mapping[str, Any] | None = None,
    task_feature_lengths: Mapping[str, int] | None = None,
    tokenized_inputs: bool = False,
    *,
    model: Any = None,
    task_name: str = '',
    serialized_examples: bool = True,
    run_precache: bool = False,
    input_tensor_name: str = 'inputs',
) -> str:
    """Stands for the preprocessors of a task, which T5X runs inside of the exported model."""
    return 'serialized tf.Examples are not an input; the description names the vocabularies'


def create_postprocessor(
    vocab: Any = None,
    inference_mode: str = 'predict',
    decode_outputs: bool = True,
    output_feature_names: Sequence[str] | None = None,
) -> str:
    """Stands for the step from tokens to texts. Outputs cannot be renamed."""
    key = 'export_lib.create_postprocessor.output_feature_names'
    check_off(key, output_feature_names, 'the outputs are tokens and scores')
    return 'the outputs are tokens, not texts'


def create_inference_function(output_len: int | None = None, **settings: Any) -> str:
    """Stands for the choice of the model's method, which `inference_mode` determines."""
    for name, value in {'output_len': output_len, **settings}.items():
        key = f'export_lib.create_inference_function.{name}'
        check_off(key, value, 'inference_mode determines the outputs')
    return ''


def create_batch_polymorphic_shapes(overrides: Any = None, **settings: Any) -> str:
    """Stands for the shapes of inputs: without a `batch_size`, the number of rows is open."""
    for name, value in {'overrides': overrides, **settings}.items():
        key = f'export_lib.create_batch_polymorphic_shapes.{name}'
        check_off(key, value, 'only the number of rows can be open')
    return ''


def write_warmup_examples(*args: Any, **settings: Any) -> str:
    """Stands for the first requests of TensorFlow Serving, of which there are none."""
    return ''


# The settings of `save` that name such a function, and what they may name.
PARTS: Mapping[str, tuple[Any, ...]] = {
    'create_preprocessor_fn': (create_preprocessor, create_preprocessor_from_task),
    'create_inference_function_fn': (create_inference_function,),
    'create_postprocessor_fn': (create_postprocessor,),
    'write_warmup_example_fn': (write_warmup_examples,),
    'create_polymorphic_shapes_fn': (create_batch_polymorphic_shapes,),
}


def save(
    *,
    model: BaseTransformerModel,
    inference_mode: str,
    restore_checkpoint_cfg: RestoreCheckpointConfig,
    exportable_module_cls: type[ExportableModule] = ExportableModule,
    create_preprocessor_fn: Callable[..., Any] = create_preprocessor,
    create_inference_function_fn: Callable[..., Any] = create_inference_function,
    create_postprocessor_fn: Callable[..., Any] = create_postprocessor,
    partitioner: BasePartitioner | None = None,
    create_decoding_state_callback_fn: Any = None,
    output_features: Mapping[str, Any] | None = None,
    task_feature_lengths: Mapping[str, int],
    batch_size: int | None,
    output_dir: str,
    model_name: str,
    warmup_examples: Sequence[Any] | None = None,
    tokenized_inputs: bool = False,
    write_warmup_example_fn: Callable[..., Any] = write_warmup_examples,
    mixture_or_task_name: str | None = None,
    validation_examples: Sequence[Any] | None = None,
    native_lowering: bool = False,
    enable_xla: bool = True,
    decode_outputs: bool | None = None,
    trailing_shapes: Mapping[str, Any] | None = None,
    output_vocab_feature_name: str | None = 'targets',
    signature_name: str | None = 'serving_default',
    create_polymorphic_shapes_fn: Callable[..., Any] = create_batch_polymorphic_shapes,
) -> dict[str, Any]:
    """Writes the prediction or the scores of a checkpoint as a program, with its parameters.

    The inputs of the program have T5X's names: 'encoder_input_tokens' and 'decoder_input_tokens',
    or 'decoder_input_tokens' and 'decoder_causal_attention' of a decoder, int32 [batch, length];
    for scores, 'decoder_target_tokens' and 'decoder_loss_weights' as well. The outputs are 'tokens'
    and 'scores' of `predict_batch_with_aux`, or 'scores' of `score_batch`. Returns the description
    of the program. Raises a ConfigError if a setting cannot be honoured, or if there is no such
    checkpoint.

    Args:
      model: the network, its vocabularies and its decoding.
      inference_mode: 'predict' or 'score'.
      restore_checkpoint_cfg: the checkpoint. Its `dtype` is the dtype of the exported parameters.
      exportable_module_cls: the class `export_lib.ExportableModule`.
      create_preprocessor_fn: checked and reported; the program takes tokens.
      create_inference_function_fn: checked only.
      create_postprocessor_fn: checked and reported; the program returns tokens.
      partitioner: lays out the parameters while they are read. The program does not depend on it.
      create_decoding_state_callback_fn: must be off.
      output_features: 'inputs' and 'targets' with their vocabularies, which must be the model's.
      task_feature_lengths: the numbers of 'inputs' and 'targets' tokens in a row.
      batch_size: the number of rows; with None, the caller of the program decides.
      output_dir: the folder to write.
      model_name: a name for the description.
      warmup_examples: must be off.
      tokenized_inputs: has no effect; inputs are always tokens.
      write_warmup_example_fn: checked only.
      mixture_or_task_name: a task, whose vocabularies must be the model's.
      validation_examples: must be off.
      native_lowering: has no effect; programs are always StableHLO.
      enable_xla: must be True.
      decode_outputs: must not be True; outputs are tokens.
      trailing_shapes: must be off.
      output_vocab_feature_name: has no effect; the description names both vocabularies.
      signature_name: a name for the description.
      create_polymorphic_shapes_fn: checked only.
    """
    settings, console = dict(locals()), RunConsole()
    for note in _check(settings):
        console.say(note)
    if (restore := restore_checkpoint_cfg.translated()) is None:
        raise ConfigError('utils.RestoreCheckpointConfig.path is empty: give a checkpoint')
    lengths = _lengths(model, task_feature_lengths)
    folder, step = find_checkpoint(restore)
    with (
        console.phase('restoring the checkpoint'),
        closing(open_restored(restore, folder)) as checkpoints,
    ):
        abstract = _abstract_state(model, lengths, partitioner or PjitPartitioner(num_partitions=1))
        state = checkpoints.restore(step, abstract, variables_only=True)
    with console.phase('exporting the program'):
        description = export_program(
            _function(model, inference_mode, state.flax_mutables),
            state.params,
            _inputs(model, inference_mode, lengths),
            output_dir,
            batch_size=batch_size,
            description={
                'model_name': model_name,
                'signature_name': signature_name,
                'inference_mode': inference_mode,
                'checkpoint': str(checkpoints.path(step)),
                'step': step,
                'task_feature_lengths': dict(task_feature_lengths),
                'vocabularies': {
                    'inputs': _describe_vocabulary(model.input_vocabulary),
                    'targets': _describe_vocabulary(model.output_vocabulary),
                },
            },
        )
    console.files({'program': as_path(f'{KEY}.output_dir', output_dir)})
    return description


def _check(settings: Mapping[str, Any]) -> list[str]:
    """Checks the settings of `save`, and returns what is different from T5X."""
    model, modes = settings['model'], ('predict', 'score')
    expect(f'{KEY}.model', model, BaseTransformerModel, '@models.EncoderDecoderModel()')
    kind, written = RestoreCheckpointConfig, '@utils.RestoreCheckpointConfig()'
    expect(f'{KEY}.restore_checkpoint_cfg', settings['restore_checkpoint_cfg'], kind, written)
    why = 'a program predicts or scores'
    check_one_of(f'{KEY}.inference_mode', settings['inference_mode'], modes, why)
    module = settings['exportable_module_cls']
    written = '@export_lib.ExportableModule'
    expect_class(f'{KEY}.exportable_module_cls', module, ExportableModule, written)
    module()  # gin provides its settings, which are checked
    for name, reason in OFF.items():
        check_off(f'{KEY}.{name}', settings[name], reason)
    check_off(f'{KEY}.decode_outputs', settings['decode_outputs'], 'the program returns tokens')
    why = 'programs are StableHLO, which XLA compiles'
    check_one_of(f'{KEY}.enable_xla', settings['enable_xla'], (True,), why)
    if settings['batch_size'] is not None:
        check_counts(**{f'{KEY}.batch_size': settings['batch_size']})
    if not isinstance(settings['output_dir'], str):
        why = 'one program runs on all platforms; write one folder'
        raise refusal(f'{KEY}.output_dir', settings['output_dir'], why)
    _check_vocabularies(model, settings['output_features'], settings['mixture_or_task_name'])
    notes = []
    for name, allowed in PARTS.items():
        # gin wraps what its files set parameters of, so it is not always the same object.
        if getattr(settings[name], '__name__', '') not in {part.__name__ for part in allowed}:
            written = ' or '.join(f'@export_lib.{part.__name__}' for part in allowed)
            raise refusal(f'{KEY}.{name}', settings[name], f'it needs TensorFlow; write {written}')
        if note := settings[name]():
            notes.append(f'export_lib.{settings[name].__name__} has no equivalent: {note}')
    return notes


def _check_vocabularies(
    model: BaseTransformerModel, features: Mapping[str, Any] | None, task: str | None
) -> None:
    if features is not None and task is not None:
        why = 'output_features already gives the features; leave one of them out'
        raise refusal(f'{KEY}.mixture_or_task_name', task, why)
    if task is not None:
        model.check_vocabulary(get_mixture_or_task(task))
    wanted = {'inputs': model.input_vocabulary, 'targets': model.output_vocabulary}
    for name, feature in (features or {}).items():
        if name in wanted and feature.vocabulary.identity != wanted[name].identity:
            why = f"the vocabulary of {name} is not the model's"
            raise refusal(f'{KEY}.output_features', sorted(features or {}), why)


def _lengths(model: BaseTransformerModel, lengths: Mapping[str, int]) -> dict[str, int]:
    """The number of tokens in a row of each part: 'encoder' and 'decoder'."""
    key, is_decoder = f'{KEY}.task_feature_lengths', isinstance(model, DecoderOnlyModel)
    needed = {'targets'} if is_decoder else {'inputs', 'targets'}
    if not isinstance(lengths, Mapping) or not needed <= lengths.keys():
        raise refusal(key, lengths, "write {'inputs': ..., 'targets': ...}")
    check_counts(**{f'{key}[{name!r}]': length for name, length in lengths.items()})
    if is_decoder:
        return {'decoder': sum(lengths.values())}
    return {'encoder': lengths['inputs'], 'decoder': lengths['targets']}


def _inputs(
    model: BaseTransformerModel, mode: str, lengths: Mapping[str, int]
) -> dict[str, jax.ShapeDtypeStruct]:
    """The inputs of a program: one row of each."""
    predicted = DECODER if isinstance(model, DecoderOnlyModel) else ENCODER
    names = [*predicted, *(SCORED if mode == 'score' else ())]
    return {name: jax.ShapeDtypeStruct((lengths[name[:7]],), jnp.int32) for name in names}


def _abstract_state(
    model: BaseTransformerModel, lengths: Mapping[str, int], partitioner: BasePartitioner
) -> Any:
    """The state that is restored: the variables of the network, with their shardings."""

    def init(key: jax.Array) -> TrainState:
        rows = _inputs(model, 'score', lengths)
        size = partitioner.data_mesh_size
        batch = {name: jnp.zeros((size, *x.shape), x.dtype) for name, x in rows.items()}
        return TrainState.create(model.objective().init(key, batch), optax.identity())

    return partitioner.plan(init, jax.random.key(0)).abstract_state


def _function(model: BaseTransformerModel, mode: str, variables: Any) -> Any:
    """The function of the program: (parameters, batch) -> outputs."""

    def predict(params: Any, batch: Any) -> dict[str, jax.Array]:
        if mode == 'score':
            return {'scores': model.score_batch(params, batch)}
        tokens, aux = model.predict_batch_with_aux(params, batch, flax_mutables=variables)
        return {'tokens': tokens, 'scores': aux['scores']}

    return predict


def _describe_vocabulary(vocabulary: Any) -> dict[str, Any]:
    """A tokenizer as JSON data: what it is, and its settings, such as the path of its file."""
    fields = dataclasses.fields(vocabulary) if dataclasses.is_dataclass(vocabulary) else ()
    settings = {field.name: getattr(vocabulary, field.name) for field in fields}
    return {
        'type': type(vocabulary).__name__,
        'identity': vocabulary.identity,
        'num_tokens': vocabulary.num_tokens,
        'end_token': vocabulary.separator,
        **{k: v for k, v in settings.items() if isinstance(v, str | int | float | bool | None)},
    }

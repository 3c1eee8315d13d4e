"""The functions around the model in T5X's exports, which TensorFlow Serving runs there.

An exported program takes tokens and returns tokens. What turns text into tokens is not part of it,
so these functions only check their settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from train.t5x.refusals import check_off, check_one_of

_TEXT = 'the program takes tokens, and its caller makes them'
_SERVING = 'requests are batched by what serves the program'


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
        for name in ('use_batch_function', 'max_batch_size', 'allowed_batch_sizes'):
            check_off(f'{key}.{name}', getattr(self, name), _SERVING)


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
    """Stands for the step from texts to tokens. `save` has its features and lengths.

    Returns:
      What takes its place.

    Raises:
      ConfigError: if texts are split, or padded to several lengths.
    """
    key = 'export_lib.create_preprocessor'
    check_off(f'{key}.split_separator', split_separator, _TEXT)
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
    """Stands for the preprocessors of a task, which T5X runs inside of the exported model.

    Returns:
      What takes its place.
    """
    return 'serialized tf.Examples are not an input; the description names the vocabularies'


def create_postprocessor(
    vocab: Any = None,
    inference_mode: str = 'predict',
    decode_outputs: bool = True,
    output_feature_names: Sequence[str] | None = None,
) -> str:
    """Stands for the step from tokens to texts.

    Returns:
      What takes its place.

    Raises:
      ConfigError: if outputs are renamed.
    """
    key = 'export_lib.create_postprocessor.output_feature_names'
    check_off(key, output_feature_names, 'the outputs are tokens and scores')
    return 'the outputs are tokens, not texts'


def create_inference_function(output_len: int | None = None, **settings: Any) -> str:
    """Stands for the choice of the model's method, which `inference_mode` determines.

    Returns:
      What takes its place.

    Raises:
      ConfigError: if it has settings.
    """
    key = 'export_lib.create_inference_function'
    for name, value in {'output_len': output_len, **settings}.items():
        check_off(f'{key}.{name}', value, 'inference_mode determines the outputs')
    return ''


def create_batch_polymorphic_shapes(overrides: Any = None, **settings: Any) -> str:
    """Stands for the shapes of inputs: without a `batch_size`, the number of rows is open.

    Returns:
      What takes its place.

    Raises:
      ConfigError: if other shapes are given.
    """
    key = 'export_lib.create_batch_polymorphic_shapes'
    for name, value in {'overrides': overrides, **settings}.items():
        check_off(f'{key}.{name}', value, 'only the number of rows can be open')
    return ''


def write_warmup_examples(*args: Any, **settings: Any) -> str:
    """Stands for the first requests of TensorFlow Serving, of which there are none.

    Returns:
      What takes its place.
    """
    return ''


# The settings of `save` that name such a function, and what they may name.
PARTS: Mapping[str, tuple[Any, ...]] = {
    'create_preprocessor_fn': (create_preprocessor, create_preprocessor_from_task),
    'create_inference_function_fn': (create_inference_function,),
    'create_postprocessor_fn': (create_postprocessor,),
    'write_warmup_example_fn': (write_warmup_examples,),
    'create_polymorphic_shapes_fn': (create_batch_polymorphic_shapes,),
}

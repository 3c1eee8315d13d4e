"""What a Hugging Face folder has for a run: a model, its weights, and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from etils import epath
from flax import traverse_util

from partitioning import unbox
from train.checkpoints.arrays.stored import HasShape, StoredArray
from train.checkpoints.formats.safetensors_files import list_places
from train.checkpoints.huggingface.architectures import (
    ModelConfig,
    find_architecture,
    is_tied,
    model_config,
)
from train.checkpoints.huggingface.config_json import read_config
from train.checkpoints.huggingface.mapping import PARAMS, as_ours
from train.data.text.tokenizers import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)
from train.errors import ConfigError, check_counts
from train.models.parameters import list_parameters
from train.models.t5 import T5, T5Config
from train.models.transformer import Transformer
from train.paths import as_path

Kind = Literal['decoder', 'encoder_decoder']
TOKENIZER = 'tokenizer.json'
SENTENCEPIECE = ('tokenizer.model', 'spiece.model', 'sentencepiece.bpe.model')


def load_huggingface_model(
    path: str, *, kind: Kind | None = None, vocab_multiple: int = 1, **settings: Any
) -> Transformer | T5:
    """Returns the model that the `config.json` of a folder describes, without its weights.

    Usage:
      model = load_huggingface_model('Llama-3.2-1B', dtype='bfloat16', remat='full')
      config = TrainConfig(
          objective=NextToken(model=model), restore=RestoreConfig(path='Llama-3.2-1B'), ...
      )

    Args:
      path: the folder, local, gs:// or s3://.
      kind: 'decoder' or 'encoder_decoder', if a run can train only one of them.
      vocab_multiple: rounds the vocabulary up to a multiple of this number, for meshes that do not
        divide it. The weights of the added tokens start as zeros.
      **settings: settings of `TransformerConfig` or `T5Config` that `config.json` does not have,
        such as `dtype`, `param_dtype`, `remat` and `scan_layers`.

    Raises:
      ConfigError: if the model is not one that can be computed here, or a setting is wrong.
    """
    check_counts(vocab_multiple=vocab_multiple)
    config = read_config(as_path('the path of a Hugging Face model', path))
    found = 'encoder_decoder' if find_architecture(config).kind is T5Config else 'decoder'
    if kind not in (None, found):
        run = {'decoder': 'finetune', 'encoder_decoder': 'finetune_pairs'}[found]
        raise ConfigError(
            f'{path} is of kind {found!r}, but this run trains a model of kind {kind!r}: use '
            f'another model, or the run {run}'
        )
    made = model_config(config, **settings)
    if made.vocab_size % vocab_multiple:
        padded = -(-made.vocab_size // vocab_multiple) * vocab_multiple
        made = model_config(config, **{**settings, 'vocab_size': padded})
    return T5(made) if isinstance(made, T5Config) else Transformer(made)


def open_parameters(
    folder: epath.Path, wanted: Mapping[str, HasShape] | None = None
) -> dict[str, StoredArray]:
    """Opens the weights of a model under our names. What `wanted` does not have keeps its name.

    `wanted` are our arrays, if they have other forms than in the model that
    `load_huggingface_model` returns, such as separate layers. Raises a ConfigError if the model
    is not one that can be computed here, or a file is malformed.
    """
    config = read_config(folder)
    model = model_config(config)
    return as_ours(
        find_architecture(config).table,
        list_places(folder),
        _list_parameters(model) if wanted is None else wanted,
        where=str(folder),
        is_tied=is_tied(model),
    )


def _list_parameters(model: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of the parameters of a model, by their names in a checkpoint."""
    if isinstance(model, T5Config):
        tokens = jnp.zeros((1, 1), jnp.int32)
        variables = jax.eval_shape(T5(model).init, jax.random.key(0), tokens, tokens, tokens)
        tree: Any = unbox(variables['params'])
    else:
        tree = list_parameters(model)
    found = traverse_util.flatten_dict(tree, sep='/')
    return {PARAMS + n: jax.ShapeDtypeStruct(x.shape, jnp.float32) for n, x in found.items()}


def load_huggingface_tokenizer(path: str, *, separator_token: str | None = None) -> Tokenizer:
    """Returns the tokenizer in a folder: its `tokenizer.json`, or else its SentencePiece model.

    Args:
      path: the folder, local, gs:// or s3://.
      separator_token: the token between documents; see `HuggingFaceTokenizer`.

    Raises:
      ConfigError: if the folder has no tokenizer.
    """
    folder = as_path('the path of a Hugging Face model', path)
    if (file := folder / TOKENIZER).exists():
        return HuggingFaceTokenizer(path=str(file), separator_token=separator_token)
    for name in SENTENCEPIECE:
        if (file := folder / name).exists():
            if separator_token is not None:
                raise ConfigError(
                    f'separator_token is {separator_token!r}, but {file} has its own end-of-text '
                    'token: remove separator_token'
                )
            return SentencePieceTokenizer(path=str(file))
    raise ConfigError(
        f'{folder} has no tokenizer (expected {TOKENIZER} or {" or ".join(SENTENCEPIECE)}): '
        'download it too, or set the tokenizer of the task'
    )

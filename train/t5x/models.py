"""T5X's `models` and `contrib.moe.models`: a network, vocabularies, optimizer, loss, decoding."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import optax

from train.data import Mixture, Task, Tokenizer
from train.data.rows.pair_tasks import Architecture
from train.decoding import Predictions, predict
from train.errors import ConfigError, check_number
from train.models.experts import ExpertsConfig
from train.objectives import EncoderDecoder, PrefixLanguageModel
from train.optimizers import Optimizer
from train.t5x.decoding import as_search, beam_search, temperature_sample
from train.t5x.metrics import T5XEncoderDecoder, T5XPrefixLanguageModel
from train.t5x.optimizers import OptimizerDef, check_optimizer, with_learning_rate
from train.t5x.refusals import check_off, expect, refusal

# T5X's names of the divisors of a loss -> their names here.
_DIVISORS: dict[str, Any] = {
    'NUM_REAL_TARGET_TOKENS': 'weights',
    'NUM_TOTAL_TARGET_TOKENS': 'targets',
    'AVERAGE_PER_SEQUENCE': 'sequences',
}
DecodeFn = Callable[..., Any]
Predicted = tuple[jax.Array, dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class DecoderParams:
    """What `predict_batch_with_aux` returns by default.

    Attributes:
      return_all_decodes: whether all decodes are returned, or only the best one.
      num_decodes: the number of decodes per row.
    """

    return_all_decodes: bool = False
    num_decodes: int = 1


class BaseTransformerModel:
    """What the models have in common. Their attributes are T5X's arguments."""

    architecture: ClassVar[Architecture] = 'encoder_decoder'
    module: nn.Module
    input_vocabulary: Tokenizer
    output_vocabulary: Tokenizer
    optimizer_def: OptimizerDef
    decode_fn: DecodeFn
    feature_converter_cls: Any
    label_smoothing: float
    z_loss: float
    loss_normalizing_factor: float | str | None

    def __post_init__(self) -> None:
        key, written = self._key, '@seqio.SentencePieceVocabulary()'
        for name in ('input', 'output'):
            vocabulary = self._vocabulary_name(name)
            expect(f'{key}.{vocabulary}', getattr(self, vocabulary), Tokenizer, written)
        expect(f'{key}.module', self.module, nn.Module, '@network.Transformer()')
        check_optimizer(f'{key}.optimizer_def', self.optimizer_def)
        if not callable(self.decode_fn):
            why = 'write @decoding.temperature_sample, without parentheses'
            raise refusal(f'{key}.decode_fn', self.decode_fn, why)
        why = 'tasks of train.data make the rows'
        check_off(f'{key}.feature_converter_cls', self.feature_converter_cls, why)
        check_number(f'{key}.label_smoothing', self.label_smoothing, '[0, 1)')
        check_number(f'{key}.z_loss', self.z_loss, '[0, inf)')
        _ = self._divisor

    @property
    def _key(self) -> str:
        return f'models.{type(self).__name__}'

    @property
    def _divisor(self) -> Any:
        """The trainer's name of the divisor of the loss."""
        key, factor = f'{self._key}.loss_normalizing_factor', self.loss_normalizing_factor
        if not isinstance(factor, str):
            check_number(key, factor, '(0, inf) or None')
            return 1.0 if factor is None else factor
        if (name := factor.rpartition('.')[2].upper()) not in _DIVISORS:
            raise refusal(key, factor, f'use one of {", ".join(_DIVISORS)}, a number, or None')
        return _DIVISORS[name]

    def optimizer(self, learning_rate: optax.Schedule) -> Optimizer | optax.GradientTransformation:
        """The optimizer, with the learning rate of the trainer unless it has its own."""
        return with_learning_rate(self.optimizer_def, learning_rate)

    def objective(self) -> EncoderDecoder | PrefixLanguageModel:
        """The network and its loss, for the trainer."""
        raise NotImplementedError

    def score_batch(self, params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        """The log-probability of the targets of each row, float32 [batch]."""
        return self.objective().score(params, batch)

    def predict(
        self,
        objective: Any,
        params: Any,
        batch: Mapping[str, jax.Array],
        rng: jax.Array | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        end_token: int | None = None,
    ) -> Predictions:
        """Predicts a batch with the settings of `predict_batch_with_aux`.

        It is what evaluators take as `predict`. The objective and the end token are the model's
        own.
        """
        del objective, end_token
        tokens, aux = self.predict_batch_with_aux(params, batch, rng, flax_mutables=variables)
        return Predictions(tokens, aux['scores'])

    def predict_batch_with_aux(
        self,
        params: Any,
        batch: Mapping[str, jax.Array],
        rng: jax.Array | None = None,
        decoder_params: Mapping[str, Any] | None = None,
        return_all_decodes: bool | None = None,
        num_decodes: int | None = None,
        prompt_with_targets: bool = False,
        flax_mutables: Mapping[str, Any] | None = None,
    ) -> Predicted:
        """Decodes the targets of each row.

        Args:
          params: the parameters.
          batch: the arrays of the batch.
          rng: the random key of sampling.
          decoder_params: more arguments of `decode_fn`.
          return_all_decodes: whether all decodes are returned, or only the best one.
          num_decodes: the number of decodes per row, the beams of a beam search.
          prompt_with_targets: whether the targets of the batch are forced and only continued.
          flax_mutables: the other variables of the network.

        Returns:
          Tokens int32 [batch, length], or [batch, num_decodes, length] with the best one last; and
          {'scores': float32 [batch] or [batch, num_decodes]}.
        """
        default = getattr(self, 'default_decoder_params', None) or DecoderParams()
        if return_all_decodes is None:
            return_all_decodes = default.return_all_decodes
        found = predict(
            self.objective(),
            params,
            batch,
            rng,
            decode_fn=as_search(self.decode_fn, **(decoder_params or {})),
            num_decodes=default.num_decodes if num_decodes is None else num_decodes,
            return_all_decodes=return_all_decodes,
            prompt_with_targets=prompt_with_targets,
            end_token=self.output_vocabulary.separator,
            variables=flax_mutables,
        )
        return found.tokens, {'scores': found.scores}

    def check_vocabulary(self, task: Task) -> None:
        """Checks that the tokenizers of a task are the vocabularies of this model."""
        parts: Sequence[Any] = task.tasks if isinstance(task, Mixture) else [task]
        for part in parts:
            if isinstance(part, Mixture):
                self.check_vocabulary(part)
                continue
            tokenizer = getattr(part, 'tokenizer', None)
            inputs = getattr(part, 'inputs_tokenizer', None) or tokenizer
            pairs = {'input': (self.input_vocabulary, inputs)}
            pairs['output'] = (self.output_vocabulary, tokenizer)
            for name, (ours, theirs) in pairs.items():
                if theirs is not None and ours.identity != theirs.identity:
                    raise ConfigError(
                        f'{self._key}.{self._vocabulary_name(name)} is {ours.identity[:28]}, but '
                        f'the task has {theirs.identity[:28]}: set both to the same tokenizer'
                    )

    def _vocabulary_name(self, name: str) -> str:
        return f'{name}_vocabulary'


def _own_method(owner: str) -> Any:
    """A copy of `predict_batch_with_aux`: gin files set its arguments separately for each class."""
    method = BaseTransformerModel.predict_batch_with_aux
    parts = method.__code__, method.__globals__, method.__name__, method.__defaults__
    copied: Any = functools.update_wrapper(types.FunctionType(*parts), method)
    copied.__qualname__ = f'{owner}.{method.__name__}'
    del copied.__wrapped__
    return copied


# The arguments can be given by position, in T5X's order.
@dataclasses.dataclass(frozen=True)
class EncoderDecoderModel(BaseTransformerModel):
    """An encoder-decoder with its loss.

    Attributes:
      module: the network.
      input_vocabulary: the tokenizer of the inputs; tasks must have the same one.
      output_vocabulary: the tokenizer of the targets.
      optimizer_def: the optimizer, or an optax transformation with its own learning rate.
      decode_fn: how targets are decoded: `decoding.beam_search`, `decoding.temperature_sample`, or
        a function with their arguments.
      feature_converter_cls: must be off.
      label_smoothing: the share of a target's probability that is spread over the other tokens.
      z_loss: the weight of the squared logarithm of the softmax's normalizer.
      loss_normalizing_factor: the divisor of the summed loss of a batch: a number,
        'NUM_REAL_TARGET_TOKENS', 'NUM_TOTAL_TARGET_TOKENS', 'AVERAGE_PER_SEQUENCE', or None for 1.
      default_decoder_params: the defaults of `predict_batch_with_aux`.
    """

    module: nn.Module
    input_vocabulary: Tokenizer
    output_vocabulary: Tokenizer
    optimizer_def: OptimizerDef
    decode_fn: DecodeFn = beam_search
    feature_converter_cls: Any = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    loss_normalizing_factor: float | str | None = None
    default_decoder_params: DecoderParams | None = None

    def objective(self) -> EncoderDecoder:
        return T5XEncoderDecoder(
            model=self.module,
            z_loss=self.z_loss,
            label_smoothing=self.label_smoothing,
            loss_divisor=self._divisor,
        )

    predict_batch_with_aux = _own_method('EncoderDecoderModel')


@dataclasses.dataclass(frozen=True)
class DecoderOnlyModel(BaseTransformerModel):
    """A decoder with its loss.

    Attributes:
      module: the network.
      vocabulary: the tokenizer; tasks must have the same one.
      inputs_bidirectional_attention: whether the inputs of a row see each other in both directions.

    `EncoderDecoderModel` describes the other attributes.
    """

    architecture = 'decoder_only'
    module: nn.Module
    vocabulary: Tokenizer
    optimizer_def: OptimizerDef
    decode_fn: DecodeFn = temperature_sample
    inputs_bidirectional_attention: bool = False
    feature_converter_cls: Any = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    loss_normalizing_factor: float | str | None = None

    @property
    def input_vocabulary(self) -> Tokenizer:  # type: ignore[override]
        return self.vocabulary

    @property
    def output_vocabulary(self) -> Tokenizer:  # type: ignore[override]
        return self.vocabulary

    def _vocabulary_name(self, name: str) -> str:
        return 'vocabulary'

    def objective(self) -> PrefixLanguageModel:
        return T5XPrefixLanguageModel(
            model=self.module,
            z_loss=self.z_loss,
            label_smoothing=self.label_smoothing,
            loss_divisor=self._divisor,
            bidirectional_prefix=self.inputs_bidirectional_attention,
        )

    predict_batch_with_aux = _own_method('DecoderOnlyModel')


@dataclasses.dataclass(frozen=True)
class _WithExperts(BaseTransformerModel):
    """The factors of the losses of experts, which replace the factors in the network's settings."""

    aux_loss_factor: float = 0.0
    router_z_loss_factor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        factors: dict[str, Any] = {
            'auxiliary_loss_factor': self.aux_loss_factor,
            'router_z_loss_factor': self.router_z_loss_factor,
        }
        check_number(f'{self._key}.aux_loss_factor', self.aux_loss_factor, '[0, inf)')
        check_number(f'{self._key}.router_z_loss_factor', self.router_z_loss_factor, '[0, inf)')
        config: Any = getattr(self.module, 'config', None)
        if not isinstance(experts := getattr(config, 'experts', None), ExpertsConfig):
            raise ConfigError(
                f'{self._key}.module has no experts: write experts = @experts.ExpertsConfig() '
                'among its settings, after `from train.models import experts`'
            )
        config = dataclasses.replace(config, experts=dataclasses.replace(experts, **factors))
        object.__setattr__(self, 'module', self.module.clone(config=config))


@dataclasses.dataclass(frozen=True)
class MoeEncoderDecoderModel(_WithExperts, EncoderDecoderModel):
    """An encoder-decoder with experts.

    Attributes:
      aux_loss_factor: the coefficient of the load-balance loss. It replaces the
        coefficient in the network's `ExpertsConfig`.
      router_z_loss_factor: the coefficient of the router's z-loss. It also replaces the coefficient
        in `ExpertsConfig`.

    `models.EncoderDecoderModel` describes the other attributes.
    """

    default_decoder_params: Any = dataclasses.field(default=None, init=False, repr=False)
    predict_batch_with_aux = _own_method('MoeEncoderDecoderModel')


@dataclasses.dataclass(frozen=True)
class MoeDecoderOnlyModel(_WithExperts, DecoderOnlyModel):
    """A decoder with experts. `MoeEncoderDecoderModel` describes its own attributes."""

    predict_batch_with_aux = _own_method('MoeDecoderOnlyModel')


def get_input_vocabulary(model: BaseTransformerModel) -> Tokenizer:
    return model.input_vocabulary


def get_output_vocabulary(model: BaseTransformerModel) -> Tokenizer:
    """The tokenizer of the targets."""
    return model.output_vocabulary

"""T5X's `models`: a network with its vocabulary, optimizer and loss."""

from __future__ import annotations

import dataclasses
from typing import Any

import optax

from train.data import Mixture, Task, Tokenizer
from train.errors import ConfigError
from train.objectives import NextToken
from train.optimizers import Optimizer
from train.t5x.network import ONLY_DECODER, DecoderWrapper
from train.t5x.optimizers import OptimizerDef, check_optimizer, with_learning_rate
from train.t5x.refusals import check_off, expect, refusal

# T5X's names of the divisors of a loss -> their names here.
_DIVISORS: dict[str, Any] = {
    'NUM_REAL_TARGET_TOKENS': 'weights',
    'NUM_TOTAL_TARGET_TOKENS': 'targets',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOnlyModel:
    """A decoder-only language model.

    Attributes:
      module: the network.
      vocabulary: the tokenizer; tasks must have the same one.
      optimizer_def: the optimizer, or an optax transformation with its own learning rate.
      decode_fn: has no effect, because nothing is decoded.
      inputs_bidirectional_attention: must be False.
      feature_converter_cls: must be off.
      label_smoothing: the share of a target's probability that is spread over the other tokens.
      z_loss: the weight of the squared logarithm of the softmax's normalizer.
      loss_normalizing_factor: the divisor of the summed loss of a batch: a number,
        'NUM_REAL_TARGET_TOKENS', 'NUM_TOTAL_TARGET_TOKENS', or None for 1.
    """

    module: DecoderWrapper
    vocabulary: Tokenizer
    optimizer_def: OptimizerDef
    decode_fn: Any = None
    inputs_bidirectional_attention: bool = False
    feature_converter_cls: Any = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    loss_normalizing_factor: float | str | None = None

    def __post_init__(self) -> None:
        key = 'models.DecoderOnlyModel'
        expect(f'{key}.module', self.module, DecoderWrapper, '@network.DecoderWrapper()')
        written = '@seqio.SentencePieceVocabulary()'
        expect(f'{key}.vocabulary', self.vocabulary, Tokenizer, written)
        check_optimizer(f'{key}.optimizer_def', self.optimizer_def)
        why = 'the model attends only to earlier tokens'
        bidirectional = self.inputs_bidirectional_attention
        check_off(f'{key}.inputs_bidirectional_attention', bidirectional, why)
        why = 'tasks of train.data make the rows'
        check_off(f'{key}.feature_converter_cls', self.feature_converter_cls, why)

    def optimizer(self, learning_rate: optax.Schedule) -> Optimizer | optax.GradientTransformation:
        """The optimizer, with the learning rate of the trainer unless it has its own."""
        return with_learning_rate(self.optimizer_def, learning_rate)

    def objective(self) -> NextToken:
        """The network and its loss.

        Raises:
          ConfigError: if `loss_normalizing_factor` has no equivalent here.
        """
        factor = self.loss_normalizing_factor
        if isinstance(factor, str):
            if factor.upper() not in _DIVISORS:
                raise refusal(
                    'models.DecoderOnlyModel.loss_normalizing_factor',
                    factor,
                    f'use one of {", ".join(_DIVISORS)}, a number, or None',
                )
            divisor = _DIVISORS[factor.upper()]
        else:
            divisor = 1.0 if factor is None else factor
        try:
            return NextToken(
                model=self.module.config.transformer(),
                z_loss=self.z_loss,
                label_smoothing=self.label_smoothing,
                loss_divisor=divisor,
            )
        except ConfigError as error:
            raise ConfigError(f'models.DecoderOnlyModel: {error}') from error

    def predict_batch_with_aux(
        self, num_decodes: int = 1, return_all_decodes: bool = False
    ) -> None:
        """Stands for T5X's method, so that gin files can set its parameters. It is never called."""

    def check_vocabulary(self, task: Task) -> None:
        """Checks that the tokenizer of a task is the vocabulary of this model.

        Raises:
          ConfigError: if they differ.
        """
        for part in task.tasks if isinstance(task, Mixture) else [task]:
            if isinstance(part, Mixture):
                self.check_vocabulary(part)
            elif (tokenizer := getattr(part, 'tokenizer', None)) is not None:
                ours, theirs = self.vocabulary.identity, tokenizer.identity
                if ours != theirs:
                    raise ConfigError(
                        f'models.DecoderOnlyModel.vocabulary is {ours[:28]}, but the task has '
                        f'{theirs[:28]}: set both to the same tokenizer'
                    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderModel:
    """Stands for T5X's encoder-decoder model, which is refused."""

    module: Any = None
    input_vocabulary: Any = None
    output_vocabulary: Any = None
    optimizer_def: Any = None
    decode_fn: Any = None
    feature_converter_cls: Any = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    loss_normalizing_factor: float | str | None = None

    def __post_init__(self) -> None:
        raise ConfigError(f'models.EncoderDecoderModel: {ONLY_DECODER}')

"""Language modeling: the cross-entropy of each token, given the tokens before it."""

from __future__ import annotations

import dataclasses

import jax

from train.objectives.objective import Batch
from train.objectives.token_loss import TokenLoss, check_arrays

ARRAYS = ('decoder_input_tokens', 'decoder_target_tokens', 'decoder_loss_weights')
# The arguments of the model that describe packed documents, and their arrays.
PACKED = {'positions_BL': 'decoder_positions', 'segments_BL': 'decoder_segment_ids'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextToken(TokenLoss):
    """Minimizes the cross-entropy of the next token, in nats per target.

    The attributes are those of `TokenLoss`. The model maps tokens [batch, length] to logits [batch,
    length, vocab]. To train on packed documents, it also takes `positions_BL` and `segments_BL`.
    """

    def model_inputs(self, batch: Batch) -> tuple[tuple[jax.Array], dict[str, jax.Array]]:
        check_arrays(type(self).__name__, batch, ARRAYS, 'CausalLM', (*PACKED.values(),))
        packed = {k: batch[name] for k, name in PACKED.items() if name in batch}
        return (batch['decoder_input_tokens'],), packed

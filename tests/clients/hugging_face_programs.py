"""The Flax models of transformers: GPT-2, and Llama with regex rules."""

from functools import partial

import jax
import optax
from client_runs import LENGTH, functional, token_batches
from flax.training import train_state
from jax.sharding import PartitionSpec as P
from transformers import FlaxGPT2LMHeadModel, FlaxLlamaForCausalLM, GPT2Config, LlamaConfig

from partitioning import PjitPartitioner


class TrainState(train_state.TrainState):
    dropout_key: jax.Array


def language_model_step(state, tokens):
    dropout_key, rest = jax.random.split(state.dropout_key)

    def loss_fn(params):
        logits = state.apply_fn(tokens, params=params, dropout_rng=dropout_key, train=True)[0]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads, dropout_key=rest), loss


# GPT-2 with a vocabulary that no mesh axis divides.

gpt2 = FlaxGPT2LMHeadModel(
    GPT2Config(vocab_size=257, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=8, attn_pdrop=0),
    input_shape=(1, LENGTH),
    _do_init=False,
)


def gpt2_init(key):
    params = gpt2.init_weights(key, (1, LENGTH))
    return TrainState.create(
        apply_fn=gpt2.__call__, params=params, tx=optax.adamw(1e-2), dropout_key=key
    )


HF_GPT2 = functional(gpt2_init, language_model_step, partial(token_batches, 257))


# Llama with regular expressions for paths and specs of mesh axes, as EasyLM's users write them.

llama = FlaxLlamaForCausalLM(
    LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        num_attention_heads=8,
        num_hidden_layers=1,
    ),
    input_shape=(1, LENGTH),
    _do_init=False,
)


def llama_init(key):
    params = llama.init_weights(key, (1, LENGTH))
    return TrainState.create(
        apply_fn=llama.__call__, params=params, tx=optax.lion(1e-3), dropout_key=key
    )


# A part of the program: EasyLM keeps such a list next to each model.
LLAMA_RULES = [
    ('embed_tokens/embedding', P('model', 'data')),
    ('self_attn/(q|k|v)_proj/kernel', P('data', 'model')),
    ('self_attn/o_proj/kernel', P('model', 'data')),
    ('mlp/(gate|up)_proj/kernel', P('data', 'model')),
    ('mlp/down_proj/kernel', P('model', 'data')),
    ('lm_head/kernel', P('data', 'model')),
    ('.*', P()),
]


def llama_partitioner(mesh):
    return PjitPartitioner.from_partition_rules(LLAMA_RULES, mesh=mesh)


HF_LLAMA = functional(
    llama_init, language_model_step, partial(token_batches, 32), partitioner=llama_partitioner
)

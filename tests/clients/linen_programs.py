"""flax.linen: two decoders, a ResNet and a ViT, in the style of public examples."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from client_runs import LENGTH, by_names, functional, image_batches, token_batches
from flax.training import train_state
from flax.training.train_state import TrainState

from partitioning import AxisRules, PjitPartitioner

VOCAB, WIDTH, HEADS, HIDDEN, CLASSES = 32, 16, 8, 32, 8
logical = nn.with_logical_partitioning
xavier, normal, ones, zeros = (
    nn.initializers.xavier_uniform(),
    nn.initializers.normal(1.0),
    nn.initializers.ones,
    nn.initializers.zeros,
)


def next_token_loss(logits, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses.mean()


# A language model like flax's example lm1b: attention kernels of three dimensions have two names.


class Lm1bBlock(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        norm = partial(
            nn.LayerNorm,
            scale_init=logical(ones, ('embed',)),
            bias_init=logical(zeros, ('embed',)),
        )
        x = x + nn.MultiHeadDotProductAttention(
            num_heads=HEADS,
            qkv_features=WIDTH,
            kernel_init=logical(xavier, ('embed', 'kv')),
            bias_init=logical(nn.initializers.normal(1e-6), ('kv',)),
            use_bias=False,
        )(norm()(x), mask=mask)
        y = nn.Dense(
            HIDDEN,
            kernel_init=logical(xavier, ('embed', 'mlp')),
            bias_init=logical(zeros, ('mlp',)),
        )(norm()(x))
        y = nn.Dense(
            WIDTH,
            kernel_init=logical(xavier, ('mlp', 'embed')),
            bias_init=logical(zeros, ('embed',)),
        )(nn.relu(y))
        return nn.with_logical_constraint(x + y, ('batch', 'length', 'embed'))


class Lm1b(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCAB, WIDTH, embedding_init=logical(normal, ('vocab', 'embed')))
        positions = self.param('positions', logical(normal, (None, 'embed')), (LENGTH, WIDTH))
        x = embed(tokens) + positions
        x = Lm1bBlock()(x, nn.make_causal_mask(tokens))
        return embed.attend(x) / WIDTH**0.5


def lm1b_init(key):
    model = Lm1b()
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
    variables = model.init(key, jnp.ones((1, LENGTH), jnp.int32))
    return TrainState.create(
        apply_fn=model.apply, params=variables['params'], tx=optax.adamw(schedule)
    )


def decoder_step(state, tokens):
    def loss_fn(params):
        return next_token_loss(state.apply_fn({'params': params}, tokens), tokens)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


LINEN_LM1B = functional(
    lm1b_init, decoder_step, partial(token_batches, VOCAB), partitioner=by_names
)


# A decoder whose boxes hold mesh axes, and whose optimizer accumulates gradients.


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        boxed = nn.with_partitioning
        x = nn.Embed(VOCAB, WIDTH, embedding_init=boxed(normal, ('model', None)))(tokens)
        y = nn.RMSNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(
            num_heads=HEADS,
            kernel_init=boxed(xavier, (None, 'model', None)),
            out_kernel_init=boxed(xavier, ('model', None, None)),
            bias_init=boxed(zeros, ('model', None)),
            out_bias_init=boxed(zeros, (None,)),
        )(y, mask=nn.make_causal_mask(tokens))
        y = nn.Dense(HIDDEN, use_bias=False, kernel_init=boxed(xavier, (None, 'model')))(x)
        y = nn.Dense(WIDTH, use_bias=False, kernel_init=boxed(xavier, ('model', None)))(nn.silu(y))
        return nn.DenseGeneral(VOCAB, kernel_init=boxed(xavier, (None, 'model')))(x + y)


def decoder_init(key):
    model = Decoder()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    variables = model.init(key, jnp.ones((1, LENGTH), jnp.int32))
    tx = optax.MultiSteps(tx, every_k_schedule=2).gradient_transformation()
    return TrainState.create(apply_fn=model.apply, params=variables['params'], tx=tx)


def decoder_partitioner(mesh):
    whole = [('DenseGeneral_0/bias', (None,)), ('RMSNorm_0/scale', (None,))]
    return PjitPartitioner(mesh, AxisRules(names=whole))


LINEN_DECODER = functional(
    decoder_init, decoder_step, partial(token_batches, VOCAB), partitioner=decoder_partitioner
)


# A ResNet like flax's example imagenet: BatchNorm's statistics are in the train state.


class ResNetBlock(nn.Module):
    filters: int
    strides: tuple[int, int]
    norm: Callable[..., Any]

    @nn.compact
    def __call__(self, x):
        conv = partial(nn.Conv, use_bias=False)
        y = nn.relu(self.norm()(conv(self.filters, (3, 3), self.strides)(x)))
        y = self.norm(scale_init=zeros)(conv(self.filters, (3, 3))(y))
        if x.shape != y.shape:
            x = self.norm(name='norm_proj')(conv(self.filters, (1, 1), self.strides)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        x = nn.Conv(16, (3, 3), use_bias=False, name='conv_init')(x)
        x = nn.max_pool(nn.relu(norm(name='bn_init')(x)), (2, 2), (2, 2))
        x = ResNetBlock(32, (2, 2), norm)(x)
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class ResNetState(train_state.TrainState):
    batch_stats: Any


def resnet_init(key):
    model = ResNet()
    variables = model.init(key, jnp.ones((1, 8, 8, 3)))
    return ResNetState.create(
        apply_fn=model.apply,
        params=variables['params'],
        tx=optax.sgd(0.1, momentum=0.9, nesterov=True),
        batch_stats=variables['batch_stats'],
    )


def resnet_step(state, batch):
    def loss_fn(params):
        variables = {'params': params, 'batch_stats': state.batch_stats}
        logits, changed = state.apply_fn(variables, batch['image'], mutable=['batch_stats'])
        labels = optax.smooth_labels(jax.nn.one_hot(batch['label'], CLASSES), 0.1)
        return optax.softmax_cross_entropy(logits, labels).mean(), changed['batch_stats']

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss


LINEN_RESNET = functional(resnet_init, resnet_step, partial(image_batches, 8, CLASSES))


# A ViT in the style of big_vision: parameters of all layers are stacked, and the state is a dict.


class EncoderBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(num_heads=HEADS)(y)
        x = x + y
        y = nn.Dense(WIDTH)(nn.gelu(nn.Dense(HIDDEN)(nn.LayerNorm()(x))))
        return x + y, None


class ViT(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.Conv(WIDTH, (4, 4), strides=(4, 4), padding='VALID', name='embedding')(images)
        x = x.reshape(x.shape[0], -1, WIDTH)
        x = x + self.param('pos_embedding', nn.initializers.normal(0.02), (1, *x.shape[1:]))
        blocks = nn.scan(
            nn.remat(EncoderBlock, prevent_cse=False),
            variable_axes={'params': 0},
            split_rngs={'params': True},
            length=2,
        )
        x, _ = blocks(name='encoderblock')(x, None)
        return nn.Dense(CLASSES, name='head')(nn.LayerNorm()(x).mean(1))


vit = ViT()
vit_tx = optax.chain(
    optax.trace(0.9, accumulator_dtype='bfloat16'),
    optax.add_decayed_weights(1e-4, lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
    optax.scale_by_learning_rate(optax.cosine_decay_schedule(1e-2, 10)),
)


def vit_init(key):
    params = vit.init(key, jnp.ones((1, 8, 8, 3)))['params']
    return {'params': params, 'opt': vit_tx.init(params)}


def vit_step(state, batch):
    def loss_fn(params):
        logits = vit.apply({'params': params}, batch['image'])
        labels = jax.nn.one_hot(batch['label'], CLASSES)
        return optax.sigmoid_binary_cross_entropy(logits, labels).sum(-1).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state['params'])
    updates, opt = vit_tx.update(grads, state['opt'], state['params'])
    params = optax.apply_updates(state['params'], updates)
    return {'params': params, 'opt': opt}, loss


LINEN_VIT = functional(vit_init, vit_step, partial(image_batches, 8, CLASSES))

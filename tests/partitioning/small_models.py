"""A small model with linen boxes, T5X's params_axes, nnx, and in jax without names."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, traverse_util
from flax.linen.partitioning import param_with_axes, scan_with_axes
from flax.training import train_state

from partitioning import TrainState, unbox

BATCH, LENGTH, VOCAB, EMBED, MLP, LAYERS = 8, 4, 16, 8, 16, 3
FRONT_ENDS = ('boxes', 't5x', 'nnx', 'paths')
PARAMETERS = {  # shape, logical axes
    'embed/embedding': ((VOCAB, EMBED), ('vocab', 'embed')),
    'layers/up/kernel': ((LAYERS, EMBED, MLP), ('layers', 'embed', 'mlp')),
    'layers/up/bias': ((LAYERS, MLP), ('layers', 'mlp')),
    'layers/down/kernel': ((LAYERS, MLP, EMBED), ('layers', 'mlp', 'embed')),
    'layers/down/bias': ((LAYERS, EMBED), ('layers', 'embed')),
}


def values() -> dict[str, np.ndarray]:
    """The initial parameters of every front-end."""
    rng = np.random.default_rng(0)
    return {
        k: rng.normal(0, 0.5 / math.sqrt(s[-1]), s).astype('float32')
        for k, (s, _) in PARAMETERS.items()
    }


def batches(number: int) -> list[dict[str, np.ndarray]]:
    """The global batches of a number of steps."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, VOCAB, (number, BATCH, LENGTH), np.int32)
    return [{'x': t, 'y': (t + 1) % VOCAB} for t in tokens]


def nested(flat: dict[str, Any]) -> Any:
    return traverse_util.unflatten_dict(flat, sep='/')


def loss_of(out: Any, batch: Any, xp: Any = jnp) -> Any:
    """The loss of an output, logits [batch, length, vocab]."""
    logs = out - xp.log(xp.sum(xp.exp(out), -1, keepdims=True))
    return -xp.mean(xp.sum(logs * xp.eye(VOCAB)[batch['y']], -1))


# The reference: plain loops on one device or in numpy.


def plain_loss(flat: dict[str, Any], batch: Any, xp: Any = jnp) -> Any:
    x = flat['embed/embedding'][batch['x']]
    for i in range(LAYERS):
        p = {k: flat[k][i] for k in flat if k.startswith('layers')}
        h = xp.tanh(x @ p['layers/up/kernel'] + p['layers/up/bias'])
        x = x + h @ p['layers/down/kernel'] + p['layers/down/bias']
    return loss_of(x @ flat['embed/embedding'].T, batch, xp)


def plain_losses(tx: Any, data: list[Any]) -> list[float]:
    """The losses of a training on one device, without partitioning."""

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(plain_loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params, losses = jax.device_put(values(), jax.devices()[0]), []
    opt_state = tx.init(params)
    for batch in data:
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses


# linen, with names in boxes or in params_axes.


def boxed(module: nn.Module, name: str, shape: Any, axes: Any) -> Any:
    zeros = nn.with_logical_partitioning(nn.initializers.zeros, axes)
    return module.param(name, zeros, shape)


def with_axes(module: nn.Module, name: str, shape: Any, axes: Any) -> Any:
    return param_with_axes(name, nn.initializers.zeros, shape, axes=axes, module=module)


class Dense(nn.Module):
    declare: Callable[..., Any]
    shape: tuple[int, int]
    axes: tuple[str, str]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kernel = self.declare(self, 'kernel', self.shape, self.axes)
        return x @ kernel + self.declare(self, 'bias', self.shape[1:], self.axes[1:])


class Block(nn.Module):
    declare: Callable[..., Any]

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        up = Dense(self.declare, (EMBED, MLP), ('embed', 'mlp'), name='up')
        down = Dense(self.declare, (MLP, EMBED), ('mlp', 'embed'), name='down')
        return x + down(jnp.tanh(up(x))), None


class Embed(nn.Module):
    declare: Callable[..., Any]

    @nn.compact
    def __call__(self) -> Any:
        return self.declare(self, 'embedding', (VOCAB, EMBED), ('vocab', 'embed'))


LIFT = {'variable_axes': {'params': 0}, 'split_rngs': {'params': True}}


class Linen(nn.Module):
    declare: Callable[..., Any]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        if self.declare is boxed:
            scan = functools.partial(nn.scan, metadata_params={nn.PARTITION_NAME: 'layers'})
        else:
            scan = functools.partial(scan_with_axes, axis_name='layers')
        table = Embed(self.declare, name='embed')()
        layers = scan(Block, **LIFT, length=LAYERS)(self.declare, name='layers')
        return layers(table[x], None)[0] @ table.T


def linen_variables(front_end: str, key: Any) -> Any:
    """The variables that init makes, with the initial parameters of all front-ends."""
    made = Linen({'boxes': boxed, 't5x': with_axes}[front_end])
    variables = made.init(key, batches(1)[0]['x'])
    flat = nested({k: jnp.asarray(v) for k, v in values().items()})
    return {**variables, 'params': nn.meta.replace_boxed(variables['params'], flat)}


# jax, with parameters in nested dicts.


def nameless(params: Any, x: Any) -> Any:
    def block(x: Any, p: Any) -> Any:
        h = jnp.tanh(x @ p['up']['kernel'] + p['up']['bias'])
        return x + h @ p['down']['kernel'] + p['down']['bias']

    table = params['embed']['embedding']
    y, _ = jax.lax.scan(lambda x, p: (block(x, p), None), table[x], params['layers'])
    return y @ table.T


PATH_RULES = [(path, names) for path, (_, names) in PARAMETERS.items()]


# nnx, with names in the metadata of variables.


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        def linear(*names: str) -> nnx.Linear:
            sizes = [{'embed': EMBED, 'mlp': MLP}[name] for name in names]
            kernel, bias = {'out_sharding': names}, {'out_sharding': names[1:]}
            return nnx.Linear(*sizes, rngs=rngs, kernel_metadata=kernel, bias_metadata=bias)

        self.up, self.down = linear('embed', 'mlp'), linear('mlp', 'embed')

    def __call__(self, x: Any) -> Any:
        return x + self.down(jnp.tanh(self.up(x)))


class NnxStack(nnx.Module):
    def __init__(self) -> None:
        names = {'out_sharding': ('vocab', 'embed')}
        self.embed = nnx.Embed(VOCAB, EMBED, rngs=nnx.Rngs(0), embedding_metadata=names)
        make = nnx.vmap(NnxBlock, transform_metadata={nnx.PARTITION_NAME: 'layers'})
        self.layers = make(nnx.Rngs(0).split(LAYERS))

    def __call__(self, x: Any) -> Any:
        axes = {'in_axes': (nnx.Carry, 0), 'out_axes': nnx.Carry}
        named = {'transform_metadata': {nnx.PARTITION_NAME: 'layers'}}
        y = nnx.scan(lambda x, layer: layer(x), **axes, **named)(self.embed(x), self.layers)
        return self.embed.attend(y)


def make_nnx() -> nnx.Module:
    made = NnxStack()
    nnx.update(made, nested({k: jnp.asarray(v) for k, v in values().items()}))
    return made


# Each of them as a state and a step.


class Program(NamedTuple):
    """`init(key)` makes a state; `step(state, batch)` returns the next state and the loss."""

    init: Callable[[Any], Any]
    step: Callable[[Any, Any], Any]


def nnx_program(tx: Any) -> Program:
    def make() -> Any:
        made = make_nnx()
        return made, nnx.Optimizer(made, tx, wrt=nnx.Param)

    with nnx.use_eager_sharding(False):
        graphdef = nnx.graphdef(nnx.eval_shape(make))

    def step(state: Any, batch: Any) -> Any:
        made, optimizer = nnx.merge(graphdef, state)
        value_and_grad = nnx.value_and_grad(lambda m: loss_of(m(batch['x']), batch))
        loss, grads = value_and_grad(made)
        optimizer.update(made, grads)
        return nnx.state((made, optimizer)), loss

    return Program(lambda key: nnx.state(make()), step)


def program(front_end: str, kind: str, tx: Any) -> Program:
    """A training program. The kind of its state is ours, flax's or a dict; nnx has only one."""
    if front_end == 'nnx':
        return nnx_program(tx)

    def variables(key: Any) -> Any:
        if front_end == 'paths':
            return {'params': nested({k: jnp.asarray(v) for k, v in values().items()})}
        return linen_variables(front_end, key)

    def apply(params: Any, x: Any) -> Any:
        if front_end == 'paths':
            return nameless(params, x)
        module = Linen(boxed if front_end == 'boxes' else with_axes)
        return module.apply({'params': params}, x)

    def init(key: Any) -> Any:
        made = variables(key)
        if kind == 'ours':
            return TrainState.create(made, tx)
        if kind == 'flax':
            return train_state.TrainState.create(apply_fn=apply, params=made['params'], tx=tx)
        return {**made, 'opt_state': tx.init(unbox(made['params'])), 'step': jnp.int32(0)}

    def step(state: Any, batch: Any) -> Any:
        params = state['params'] if kind == 'dict' else state.params
        objective = lambda p: loss_of(apply(p, batch['x']), batch)  # noqa: E731
        loss, grads = jax.value_and_grad(objective)(params)
        if kind == 'ours':
            return state.apply_gradients(grads, tx), loss
        if kind == 'flax':
            return state.apply_gradients(grads=grads), loss
        updates, opt_state = tx.update(grads, state['opt_state'], params)
        changed = {'params': optax.apply_updates(params, updates), 'opt_state': opt_state}
        return {**state, **changed, 'step': state['step'] + 1}, loss

    return Program(init, step)

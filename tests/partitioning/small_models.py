"""Two small models, each with linen boxes, T5X's params_axes, nnx, and in jax without names."""

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
from flax.linen.partitioning import param_with_axes, scan_with_axes, vmap_with_axes
from flax.training import train_state

from partitioning import TrainState, unbox

BATCH, LENGTH, VOCAB, EMBED, MLP, LAYERS, MEMBERS = 8, 4, 16, 8, 16, 3, 4
FRONT_ENDS = ('boxes', 't5x', 'nnx', 'paths')
_BLOCK = {
    'up/kernel': ((EMBED, MLP), ('embed', 'mlp')),
    'up/bias': ((MLP,), ('mlp',)),
    'down/kernel': ((MLP, EMBED), ('mlp', 'embed')),
    'down/bias': ((EMBED,), ('embed',)),
}


def _stacked(below: str, size: int) -> dict[str, Any]:
    return {f'{below}/{k}': ((size, *s), (below, *names)) for k, (s, names) in _BLOCK.items()}


PARAMETERS = {  # model: parameter: shape, logical axes
    'stack': {
        'embed/embedding': ((VOCAB, EMBED), ('vocab', 'embed')),
        **_stacked('layers', LAYERS),
    },
    'ensemble': _stacked('members', MEMBERS),
}


def values(model: str) -> dict[str, np.ndarray]:
    """The initial parameters of every front-end."""
    rng = np.random.default_rng(0)
    scale = {k: 0.5 / math.sqrt(s[-1]) for k, (s, _) in PARAMETERS[model].items()}
    return {
        k: rng.normal(0, scale[k], s).astype('float32') for k, (s, _) in PARAMETERS[model].items()
    }


def batches(model: str, number: int) -> list[dict[str, np.ndarray]]:
    """The global batches of a number of steps."""
    rng = np.random.default_rng(1)
    if model == 'stack':
        tokens = rng.integers(0, VOCAB, (number, BATCH, LENGTH), np.int32)
        return [{'x': t, 'y': (t + 1) % VOCAB} for t in tokens]
    rows = rng.normal(0, 1, (number, BATCH, EMBED)).astype('float32')
    return [{'x': x, 'y': x[:, ::-1]} for x in rows]


def nested(flat: dict[str, Any]) -> Any:
    return traverse_util.unflatten_dict(flat, sep='/')


def loss_of(model: str, out: Any, batch: Any, xp: Any = jnp) -> Any:
    """The loss of an output: logits [batch, length, vocab], or the rows of one or all members."""
    if model != 'stack':
        return xp.mean(xp.square(out - batch['y']))
    logs = out - xp.log(xp.sum(xp.exp(out), -1, keepdims=True))
    return -xp.mean(xp.sum(logs * xp.eye(VOCAB)[batch['y']], -1))


# The reference: plain loops on one device or in numpy.


def plain_loss(model: str, flat: dict[str, Any], batch: Any, xp: Any = jnp) -> Any:
    def block(x: Any, p: Callable[[str], Any]) -> Any:
        return x + xp.tanh(x @ p('up/kernel') + p('up/bias')) @ p('down/kernel') + p('down/bias')

    x = batch['x']
    if model == 'stack':
        x = flat['embed/embedding'][x]
        for i in range(LAYERS):
            x = block(x, lambda k, i=i: flat[f'layers/{k}'][i])
        out = x @ flat['embed/embedding'].T
    else:
        members = range(MEMBERS)
        out = xp.stack([block(x, lambda k, i=i: flat[f'members/{k}'][i]) for i in members])
    return loss_of(model, out, batch, xp)


def plain_losses(model: str, tx: Any, data: list[Any]) -> list[float]:
    """The losses of a training on one device, without partitioning."""

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: plain_loss(model, p, batch))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params, losses = jax.device_put(values(model), jax.devices()[0]), []
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
    model: str
    declare: Callable[..., Any]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        in_boxes = self.declare is boxed
        if self.model == 'stack':
            if in_boxes:
                scan = functools.partial(nn.scan, metadata_params={nn.PARTITION_NAME: 'layers'})
            else:
                scan = functools.partial(scan_with_axes, axis_name='layers')
            table = Embed(self.declare, name='embed')()
            layers = scan(Block, **LIFT, length=LAYERS)(self.declare, name='layers')
            return layers(table[x], None)[0] @ table.T
        if in_boxes:
            vmap = functools.partial(nn.vmap, metadata_params={nn.PARTITION_NAME: 'members'})
        else:
            named = {'params': 'members'}
            vmap = functools.partial(vmap_with_axes, partitioning_axis_names=named)
        members = vmap(Block, **LIFT, in_axes=None, axis_size=MEMBERS)
        return members(self.declare, name='members')(x)[0]


def linen_variables(model: str, front_end: str, key: Any) -> Any:
    """The variables that init makes, with the initial parameters of all front-ends."""
    made = Linen(model, {'boxes': boxed, 't5x': with_axes}[front_end])
    variables = made.init(key, batches(model, 1)[0]['x'])
    flat = nested({k: jnp.asarray(v) for k, v in values(model).items()})
    return {**variables, 'params': nn.meta.replace_boxed(variables['params'], flat)}


# jax, with parameters in nested dicts.


def nameless(model: str, params: Any, x: Any) -> Any:
    def block(x: Any, p: Any) -> Any:
        h = jnp.tanh(x @ p['up']['kernel'] + p['up']['bias'])
        return x + h @ p['down']['kernel'] + p['down']['bias']

    if model == 'ensemble':
        return jax.vmap(block, (None, 0))(x, params['members'])
    table = params['embed']['embedding']
    y, _ = jax.lax.scan(lambda x, p: (block(x, p), None), table[x], params['layers'])
    return y @ table.T


PATH_RULES = {
    model: [(path, names) for path, (_, names) in table.items()]
    for model, table in PARAMETERS.items()
}


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


def _many(name: str, size: int) -> NnxBlock:
    make = nnx.vmap(NnxBlock, transform_metadata={nnx.PARTITION_NAME: name})
    return make(nnx.Rngs(0).split(size))


class NnxStack(nnx.Module):
    def __init__(self) -> None:
        names = {'out_sharding': ('vocab', 'embed')}
        self.embed = nnx.Embed(VOCAB, EMBED, rngs=nnx.Rngs(0), embedding_metadata=names)
        self.layers = _many('layers', LAYERS)

    def __call__(self, x: Any) -> Any:
        axes = {'in_axes': (nnx.Carry, 0), 'out_axes': nnx.Carry}
        named = {'transform_metadata': {nnx.PARTITION_NAME: 'layers'}}
        y = nnx.scan(lambda x, layer: layer(x), **axes, **named)(self.embed(x), self.layers)
        return self.embed.attend(y)


class NnxEnsemble(nnx.Module):
    def __init__(self) -> None:
        self.members = _many('members', MEMBERS)

    def __call__(self, x: Any) -> Any:
        named = {'transform_metadata': {nnx.PARTITION_NAME: 'members'}}
        return nnx.vmap(lambda m, x: m(x), in_axes=(0, None), **named)(self.members, x)


def make_nnx(model: str) -> nnx.Module:
    classes = {'stack': NnxStack, 'ensemble': NnxEnsemble}
    made = classes[model]()
    nnx.update(made, nested({k: jnp.asarray(v) for k, v in values(model).items()}))
    return made


# Each of them as a state and a step.


class Program(NamedTuple):
    """`init(key)` makes a state; `step(state, batch)` returns the next state and the loss."""

    init: Callable[[Any], Any]
    step: Callable[[Any, Any], Any]


def nnx_program(model: str, tx: Any) -> Program:
    def make() -> Any:
        made = make_nnx(model)
        return made, nnx.Optimizer(made, tx, wrt=nnx.Param)

    with nnx.use_eager_sharding(False):
        graphdef = nnx.graphdef(nnx.eval_shape(make))

    def step(state: Any, batch: Any) -> Any:
        made, optimizer = nnx.merge(graphdef, state)
        value_and_grad = nnx.value_and_grad(lambda m: loss_of(model, m(batch['x']), batch))
        loss, grads = value_and_grad(made)
        optimizer.update(made, grads)
        return nnx.state((made, optimizer)), loss

    return Program(lambda key: nnx.state(make()), step)


def program(model: str, front_end: str, kind: str, tx: Any) -> Program:
    """A training program. The kind of its state is ours, flax's or a dict; nnx has only one."""
    if front_end == 'nnx':
        return nnx_program(model, tx)

    def variables(key: Any) -> Any:
        if front_end == 'paths':
            return {'params': nested({k: jnp.asarray(v) for k, v in values(model).items()})}
        return linen_variables(model, front_end, key)

    def apply(params: Any, x: Any) -> Any:
        if front_end == 'paths':
            return nameless(model, params, x)
        module = Linen(model, boxed if front_end == 'boxes' else with_axes)
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
        objective = lambda p: loss_of(model, apply(p, batch['x']), batch)  # noqa: E731
        loss, grads = jax.value_and_grad(objective)(params)
        if kind == 'ours':
            return state.apply_gradients(grads, tx), loss
        if kind == 'flax':
            return state.apply_gradients(grads=grads), loss
        updates, opt_state = tx.update(grads, state['opt_state'], params)
        changed = {'params': optax.apply_updates(params, updates), 'opt_state': opt_state}
        return {**state, **changed, 'step': state['step'] + 1}, loss

    return Program(init, step)

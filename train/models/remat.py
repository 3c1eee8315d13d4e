"""What the backward pass of a layer keeps, and what it recomputes.

Layers name their arrays with `named`; a `Remat` lists the names that are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

import jax
from flax.core import spmd
from jax.ad_checkpoint import checkpoint_name

from partitioning.rules import nearest, sharding_axes
from train.errors import ConfigError

# 'residual' is the input of a layer, 'attended' what attention returns before its projection, and
# 'mlp_gate' and 'mlp_up' the two halves of the hidden layer before the activation function.
Name = Literal[
    'residual',
    'query',
    'key',
    'value',
    'attended',
    'attention_out',
    'mlp_gate',
    'mlp_up',
    'mlp_out',
]
NAMES: tuple[Name, ...] = get_args(Name)
PRODUCTS: Literal['dots'] = 'dots'
# The results of products with parameters.
_RESULTS = tuple(name for name in NAMES if name not in ('residual', 'attended'))
# TPUs, GPUs and CPUs all have this kind of host memory.
HOST = 'pinned_host'

F = TypeVar('F', bound=Callable[..., Any])


def _check_names(setting: str, value: Any, known: Iterable[str]) -> None:
    listed = ', '.join(map(repr, known))
    if not isinstance(value, list | tuple):
        raise ConfigError(f'{setting} is {value!r}: use a list of {listed}')
    for i, name in enumerate(value):
        if name not in known:
            hint = nearest(str(name), known)
            raise ConfigError(f'{setting} has {name!r}.{hint} Use names of {listed}')
        if name in value[:i]:
            raise ConfigError(f'{setting} has {name!r} twice: keep one of them')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remat:
    """What is kept of a layer for the backward pass, which recomputes everything else.

    Usage in a gin file:
      TransformerConfig.remat = @Remat()
      Remat.save = ['attended', 'attention_out']
      Remat.offload = ['residual']

    By default, only the input of the layer is kept, so that everything is recomputed.

    Attributes:
      save: the names of arrays that stay in the memory of the device. 'dots' stands for the results
        of all products with parameters.
      offload: the names of arrays that are copied to the memory of the host, and back for the
        backward pass. 'residual' is the input of the layer, which is kept in any case.
    """

    save: Sequence[Name | Literal['dots']] = ()
    offload: Sequence[Name] = ()

    def __post_init__(self) -> None:
        for field, known in (('save', (PRODUCTS, *NAMES)), ('offload', NAMES)):
            _check_names(f'Remat.{field}', getattr(self, field), known)
            object.__setattr__(self, field, tuple(getattr(self, field)))  # models are hashed
        for name in sorted({*self.save} & {*self.offload}):
            raise ConfigError(f'Remat.save and Remat.offload both have {name!r}: keep one of them')

    @property
    def policy(self) -> Callable[..., Any] | None:
        """The policy of `jax.checkpoint`; None recomputes everything."""
        if not self.save and not self.offload:
            return None
        saved = {name for name in self.save if name != PRODUCTS}
        if PRODUCTS in self.save:
            # jax does not see products in functions with gradients of their own, such as those
            # that scatter their gradients. Their results have names.
            saved |= {*_RESULTS} - {*self.offload}
        by_name = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=sorted(saved),
            names_which_can_be_offloaded=list(self.offload),
            offload_src='device',
            offload_dst=HOST,
        )
        if PRODUCTS not in self.save:
            return by_name
        products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return lambda *args, **params: products(*args, **params) or by_name(*args, **params)


# The words for the most common settings, which configurations translate by `list_remats`. A run
# replaces 'auto' when it is planned; elsewhere it is 'full'.
WORDS: Mapping[str, Remat | None] = {
    'none': None,
    'dots': Remat(save=(PRODUCTS,)),
    'full': Remat(),
    'auto': Remat(),
}


def list_remats(
    setting: str, value: Any, words: Mapping[str, Remat | None] = WORDS
) -> tuple[Remat | None, ...]:
    """Returns what the layers of a model keep: layer n entry n modulo the length, None everything.

    Raises a ConfigError if the value is not a word, a `Remat`, or a list of them.
    """
    values = value if isinstance(value, list | tuple) and value else [value]
    for entry in values:
        if not isinstance(entry, Remat) and not (isinstance(entry, str) and entry in words):
            listed = ', '.join(map(repr, words))
            raise ConfigError(
                f'{setting} is {value!r}: use {listed}, a Remat (@Remat() in a gin file), or a '
                'list of these'
            )
    return tuple(entry if isinstance(entry, Remat) else words[entry] for entry in values)


def check_placed(setting: str, remats: Iterable[Remat | None], missing: Mapping[str, str]) -> None:
    """Checks that a model has all arrays that it shall keep.

    Raises a ConfigError if a `Remat` has a name in `missing`, which gives the reason for each.
    """
    for remat in remats:
        for name in (*remat.save, *remat.offload) if remat else ():
            if name in missing:
                raise ConfigError(f'{setting} keeps {name!r}, but {missing[name]}: remove the name')


def named(x: jax.Array, name: Name) -> jax.Array:
    """Returns an array of a layer under the name by which a `Remat` can keep it."""
    return checkpoint_name(x, name)


def name_of_part(index: int, count: int) -> Name:
    """Returns the name of part `index` of a hidden layer that is the product of `count` parts."""
    return 'mlp_up' if index == count - 1 else 'mlp_gate'


def with_input(remat: Remat) -> Remat:
    """Returns a `Remat` that names the input of a layer, which is kept in any case.

    A function of several layers needs the name, because it does not know where a layer begins.
    """
    if 'residual' in (*remat.save, *remat.offload):
        return remat
    return dataclasses.replace(remat, save=(*remat.save, 'residual'))


# Operations on elements, which compilers fuse into what reads their results. A loop would copy the
# results of each layer. Weights are behind a barrier.
_ARITHMETIC = ('add', 'sub', 'mul', 'div', 'neg', 'max', 'min', 'square', 'integer_pow')
_FUNCTIONS = ('sqrt', 'rsqrt', 'logistic', 'tanh', 'erf', 'reduce_precision', 'select_n')
_MOVES = ('broadcast_in_dim', 'reshape', 'squeeze', 'transpose', 'concatenate', 'slice', 'split')
_ELEMENTWISE = {*_ARITHMETIC, *_FUNCTIONS, *_MOVES, 'name', 'optimization_barrier'}


def _keep_costly(primitive: Any, *arrays: Any, **params: Any) -> bool:
    """Keeps what costs more than to read its arguments: products, exponentials, sums and exchanges.

    Where no mesh axis shards more than the batch, constraints exchange nothing.
    """
    kind = str(primitive)
    if kind == 'convert_element_type':
        return params['new_dtype'].itemsize < arrays[0].dtype.itemsize
    if kind == 'sharding_constraint':
        return not _shards_only_rows()
    return kind not in _ELEMENTWISE


def _shards_only_rows() -> bool:
    """Whether the mesh that is set has no axis but those that shard the batch."""
    mesh, rules = jax.sharding.get_abstract_mesh(), spmd.get_logical_axis_rules()
    of_batch = {axis for name, axes in rules if name == 'batch' for axis in sharding_axes(axes)}
    return all(size == 1 or axis in of_batch for axis, size in mesh.shape.items())


def recompute(function: F, remat: Remat | None, *, prevent_cse: bool) -> F:
    """Returns a function whose backward pass recomputes what `remat` does not keep.

    Args:
      remat: what is kept. None keeps all that a loop would not compute as fast as read.
      prevent_cse: whether XLA could merge the recomputation with the first computation. Loops
        prevent it, because their forward and backward passes are separate programs.
    """
    if remat is None and prevent_cse:
        return function
    policy = _keep_costly if remat is None else remat.policy
    recomputed: Any = jax.checkpoint(function, prevent_cse=prevent_cse, policy=policy)
    return recomputed

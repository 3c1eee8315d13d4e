"""Outputs of modules laid out as a plan says, whenever the modules run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.compat.pytorch.sharding_plan import ShardingPlan
from partitioning.compat.pytorch.trees import is_nnx_module, subtree
from partitioning.compat.torch_xla import mark_sharding
from partitioning.constraints import with_sharding_constraint
from partitioning.rules import (
    AxisRules,
    LogicalAxisRules,
    boundary_spec,
    check_layout,
    describe_axes,
    dimension_axes,
    nearest,
    resolve_axes,
    to_spec,
)
from partitioning.state import Path

Outputs = Mapping[Path, tuple[str, Any]]


@contextlib.contextmanager
def constrain_outputs(
    plan: ShardingPlan, mesh: Mesh | None = None, rules: LogicalAxisRules | None = None
) -> Iterator[None]:
    """Inside it, linen modules lay out what they return as the plan's `output_plan` says.

    Usage:
      @jax.jit
      def loss(params, x):
          with constrain_outputs(plan, mesh):
              return jnp.mean(model.apply({'params': params}, x))

    The outputs keep their global shapes.

    Args:
      plan: the plan.
      mesh: by default the one around, of a partitioned function or of `jax.set_mesh`; without
        either nothing is laid out.
      rules: for logical names, of which one may be a mesh axis; by default those around.

    Raises:
      TypeError: no plan, or an entry of output_plan that is no layout.
      ValueError: a layout that an output cannot have; on leaving, a module of output_plan that was
        not called, with the nearest that was.
    """
    import flax.linen as nn  # heavy, and only those who have linen modules need it

    if not isinstance(plan, ShardingPlan):
        raise TypeError(
            f'constrain_outputs takes a ShardingPlan, which has an output_plan, not a '
            f'{type(plan).__name__}'
        )
    outputs, own = plan.outputs(), AxisRules(rules or ())
    called: dict[Path, None] = {}

    def laid_out(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        output = next_fun(*args, **kwargs)
        if context.method_name != '__call__':
            return output
        path = tuple(context.module.path)
        called[path] = None
        return _lay_out(*outputs[path], output, mesh, own) if path in outputs else output

    with nn.intercept_methods(laid_out):
        yield
    for path, (name, _) in outputs.items():
        if path not in called:
            raise ValueError(f'output_plan names {name!r}, {_not_called(name, called)}')


def check_submodules(module: Any, outputs: Outputs) -> None:
    """Raises ValueError unless an nnx module has all of these submodules, to be called."""
    for path, (name, _) in outputs.items():
        _submodule(module, path, name)


def constrain_submodules(module: Any, outputs: Outputs, mesh: Mesh, rules: AxisRules) -> None:
    """Makes submodules of an nnx module lay out their outputs, by classes of their own.

    nnx looks for `__call__` in the class, and rebuilds modules from their classes.
    """
    for path, (name, layout) in outputs.items():
        submodule = _submodule(module, path, name)
        kind: Any = type(submodule)
        submodule.__class__ = _laying_out(kind, name, layout, mesh, rules)


def _submodule(module: Any, path: Path, name: str) -> Any:
    from flax import nnx  # imported already, or there would be no such module

    try:
        found = subtree(module, path)
    except LookupError:
        found = None
    if is_nnx_module(found) and callable(found):
        return found
    known = ['/'.join(map(str, p)) for p, m in nnx.iter_modules(module) if callable(m)]
    raise ValueError(
        f'output_plan names {name!r}, but the model has no such module that is called.'
        f'{nearest(name, known)} It has {", ".join(map(repr, known))}'
    )


@functools.cache
def _laying_out(cls: Any, name: str, layout: Any, mesh: Mesh, rules: AxisRules) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _lay_out(name, layout, cls.__call__(self, *args, **kwargs), mesh, rules)

    return type(cls.__name__, (cls,), {'__call__': __call__, '__module__': cls.__module__})


def _lay_out(name: str, layout: Any, output: Any, mesh: Mesh | None, rules: AxisRules) -> Any:
    """The arrays of an output, each laid out; what is no array stays as it is."""

    def one(x: Any) -> Any:
        try:
            return _constrained(x, layout, mesh, rules) if isinstance(x, jax.Array) else x
        except ValueError as error:
            raise ValueError(f'output_plan of {name!r}: {error}') from error

    return jax.tree.map(one, output)


def _constrained(x: jax.Array, layout: Any, mesh: Mesh | None, rules: AxisRules) -> jax.Array:
    from flax.core import spmd  # the rules around; imported already by those who have modules

    around = jax.sharding.get_abstract_mesh()
    if isinstance(layout, NamedSharding):
        for other in (around, mesh):
            if other is not None and not other.empty and other.shape != layout.mesh.shape:
                raise ValueError(
                    f'its NamedSharding is for the mesh {describe_axes(layout.mesh.shape)}, but '
                    f'this one is {describe_axes(other.shape)}'
                )
        if mesh is None and around.empty and isinstance(layout.mesh, Mesh):
            mesh = layout.mesh
        layout = layout.spec
    sizes = around if mesh is None else mesh
    if sizes.empty:
        return x
    if not isinstance(layout, PartitionSpec):
        known = rules or AxisRules(spmd.get_logical_axis_rules())
        dims = resolve_axes(layout, known, mesh=sizes, shape=x.shape, axes_as_names=True)
        layout = boundary_spec(to_spec(dims))
    check_layout(layout, sizes, 'its output', x.shape)
    if mesh is None:
        return with_sharding_constraint(x, layout)
    return mark_sharding(x, mesh, dimension_axes(layout, x.ndim))


def _not_called(name: str, called: Mapping[Path, None]) -> str:
    if not called:
        return (
            'but no such module was called, and no other: a function that jax has traced before '
            'is not traced again, so enter constrain_outputs within the function that is jitted'
        )
    names = ['/'.join(path) for path in called]
    return (
        f'but no such module was called.{nearest(name, names)} Called were '
        f'{", ".join(map(repr, names))}'
    )

"""Lays out the outputs of modules by the `output_plan` of a plan, whenever the modules run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.compat.pytorch.sharding_plan import ShardingPlan
from partitioning.compat.pytorch.trees import is_nnx_module, subtree
from partitioning.constraints import lay_out
from partitioning.rules import (
    AxisRules,
    LogicalAxisRules,
    boundary_spec,
    describe_axes,
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
    """A context in which linen modules lay out their outputs by the plan's `output_plan`.

    Usage:
      @jax.jit
      def loss(params, x):
          with constrain_outputs(plan, mesh):
              return jnp.mean(model.apply({'params': params}, x))

    The outputs keep their global shapes.

    Args:
      plan: the plan.
      mesh: the mesh; by default the one that a partitioned function or `jax.set_mesh` has set.
        Without a mesh nothing is laid out.
      rules: the rules for logical names, which may also be mesh axes; by default the rules of the
        context.

    Raises:
      TypeError: if `plan` is not a ShardingPlan, or if an entry of `output_plan` is not a layout.
      ValueError: if an output cannot have its layout, or, on leaving the context, if a module of
        `output_plan` was not called; the message names the nearest module that was.
    """
    import flax.linen as nn  # heavy, and needed only for linen modules

    if not isinstance(plan, ShardingPlan):
        raise TypeError(
            'constrain_outputs takes a ShardingPlan, which has an output_plan, not a '
            f'{type(plan).__name__}'
        )
    outputs, own = plan.outputs(), AxisRules(rules or ())
    called: dict[Path, None] = {}

    def intercept(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        output = next_fun(*args, **kwargs)
        if context.method_name != '__call__':
            return output
        path = tuple(context.module.path)
        called[path] = None
        return _lay_out_all(output, *outputs[path], mesh, own) if path in outputs else output

    with nn.intercept_methods(intercept):
        yield
    for path, (name, _) in outputs.items():
        if path not in called:
            raise ValueError(f'output_plan names {name!r}, {_not_called(name, called)}')


def find_submodules(module: Any, outputs: Outputs) -> list[Any]:
    """The submodules of an nnx module that have a layout in `output_plan`.

    Raises:
      ValueError: if one of them does not exist or is not called.
    """
    from flax import nnx  # already imported, because the module is an nnx module

    found = []
    for path, (name, _) in outputs.items():
        try:
            found.append(subtree(module, path))
        except LookupError:
            found.append(None)
        if not is_nnx_module(found[-1]) or not callable(found[-1]):
            known = ['/'.join(map(str, p)) for p, m in nnx.iter_modules(module) if callable(m)]
            raise ValueError(
                f'output_plan names {name!r}, but the model has no such module with a __call__.'
                f'{nearest(name, known)} It has {", ".join(map(repr, known))}'
            )
    return found


def constrain_submodules(module: Any, outputs: Outputs, mesh: Mesh, rules: AxisRules) -> None:
    """Makes submodules of an nnx module lay out their outputs, by giving them subclasses.

    nnx looks up `__call__` in the class of a module, and rebuilds modules from their classes.
    """
    found = find_submodules(module, outputs)
    for submodule, (name, layout) in zip(found, outputs.values(), strict=True):
        kind: Any = type(submodule)
        submodule.__class__ = _subclass(kind, name, layout, mesh, rules)


@functools.cache
def _subclass(cls: Any, name: str, layout: Any, mesh: Mesh, rules: AxisRules) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _lay_out_all(cls.__call__(self, *args, **kwargs), name, layout, mesh, rules)

    return type(cls.__name__, (cls,), {'__call__': __call__, '__module__': cls.__module__})


def _lay_out_all(output: Any, name: str, layout: Any, mesh: Mesh | None, rules: AxisRules) -> Any:
    """An output with each of its arrays laid out; other leaves are left as they are."""

    def one(x: Any) -> Any:
        try:
            return _lay_out_one(x, layout, mesh, rules) if isinstance(x, jax.Array) else x
        except ValueError as error:
            raise ValueError(f'output_plan of {name!r}: {error}') from error

    return jax.tree.map(one, output)


def _lay_out_one(x: jax.Array, layout: Any, mesh: Mesh | None, rules: AxisRules) -> jax.Array:
    from flax.core import spmd  # the rules of the context; flax is imported, as modules exist

    around = jax.sharding.get_abstract_mesh()
    if isinstance(layout, NamedSharding):
        for other in (around, mesh):
            if other is not None and not other.empty and other.shape != layout.mesh.shape:
                raise ValueError(
                    f'its NamedSharding is for the mesh {describe_axes(layout.mesh)}, but this '
                    f'mesh is {describe_axes(other)}'
                )
        if mesh is None and around.empty and isinstance(layout.mesh, Mesh):
            mesh = layout.mesh
        layout = layout.spec
    over = around if mesh is None else mesh
    if over.empty:
        return x
    if not isinstance(layout, PartitionSpec):
        known = rules or AxisRules(spmd.get_logical_axis_rules())
        dimensions = resolve_axes(layout, known, mesh=over, shape=x.shape, axes_as_names=True)
        layout = boundary_spec(to_spec(dimensions))
    return lay_out(x, layout, mesh)


def _not_called(name: str, called: Mapping[Path, None]) -> str:
    if not called:
        return (
            'but no such module was called, and no other module: a function that jax has already '
            'traced is not traced again, so enter constrain_outputs inside the jitted function'
        )
    names = ['/'.join(path) for path in called]
    return (
        f'but no such module was called.{nearest(name, names)} These were called: '
        f'{", ".join(map(repr, names))}'
    )

"""A model laid out by a plan: its parameters now, its outputs whenever it runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.constrain import constrain, with_sharding_constraint
from partitioning.plans.resolved import ResolvedPlan
from partitioning.plans.sharding_plan import ShardingPlan, apply_sharders, check_output
from partitioning.plans.trees import is_nnx_module, subtree
from partitioning.rules import AxisRules, LogicalAxisRules, OnIndivisible, OnUnmatched, nearest
from partitioning.state import key_names, unbox
from partitioning.state.boxes import array_of, is_carrier


def shard_module(
    module: Any,
    plan: ShardingPlan | ResolvedPlan,
    mesh: Mesh,
    rules: LogicalAxisRules | None = None,
    *,
    on_unmatched: OnUnmatched | None = None,
    on_indivisible: OnIndivisible | None = None,
) -> Any:
    """A model with its parameters laid out over a mesh.

    Where parameters are too large to be whole anywhere, have them born in their shards:
    `PjitPartitioner(mesh=mesh, plan=plan.resolve(...)).init`.

    Args:
      module: parameters, which may be linen variables; or an nnx module.
      plan: for them, resolved or not.
      mesh: the mesh.
      rules, on_unmatched, on_indivisible: as of `ShardingPlan.resolve`.

    Returns:
      The parameters, without linen boxes. An nnx module is changed in place: its variables hold
      the sharded arrays, and its submodules lay out their outputs by the plan's `output_plan`,
      which of linen modules `constrain_outputs` does.

    Raises:
      TypeError, ValueError: as `ShardingPlan.resolve`; output_plan names a module that is not
        there.
    """
    if isinstance(plan, ResolvedPlan):
        return _place(module, plan, mesh)
    _check_local(plan)
    policies = AxisRules(rules or (), on_unmatched, on_indivisible)
    planned = apply_sharders(plan, module, mesh)
    placed = _place(planned.module, planned.resolve(mesh, policies), mesh)
    if is_nnx_module(placed):
        for name, layout in (plan.output_plan or {}).items():
            _constrain_submodule(placed, name, layout)
    return placed


@contextlib.contextmanager
def constrain_outputs(plan: ShardingPlan) -> Iterator[None]:
    """Inside it, linen modules lay out what they return as the plan's `output_plan` says.

    Usage:
      def loss(params, x):
          with constrain_outputs(plan):
              return jnp.mean(model.apply({'params': params}, x))

    The outputs keep their global shapes. It takes a mesh around it, that of a partitioned function
    or of `jax.set_mesh`; without one nothing is laid out. Logical names also take its rules.

    Raises:
      TypeError: an entry of output_plan that is no layout.
      ValueError: on leaving, a module of output_plan that was not called, with the nearest that
        was.
    """
    import flax.linen as nn  # heavy, and only those who have linen modules need it

    _check_local(plan)
    layouts = dict(plan.output_plan or {})
    for name, layout in layouts.items():
        check_output(name, layout)
    waiting = {_module_path(name): name for name in layouts}
    called: dict[tuple[str, ...], None] = {}

    def laid_out(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        output = next_fun(*args, **kwargs)
        if context.method_name != '__call__':
            return output
        path = tuple(context.module.path)
        called[path] = None
        return (
            _lay_out(waiting[path], output, layouts[waiting[path]]) if path in waiting else output
        )

    with nn.intercept_methods(laid_out):
        yield
    for path, name in waiting.items():
        if path not in called:
            names = ['/'.join(p) for p in called]
            raise ValueError(
                f'output_plan names {name!r}, but no such module was called.{nearest(name, names)} '
                f'Called were {", ".join(repr(n) for n in names)}'
            )


def _check_local(plan: ShardingPlan) -> None:
    for name in plan.return_local_tensor or ():
        if name not in (plan.output_plan or {}):
            raise ValueError(
                f'return_local_tensor names {name!r}, which has no layout in output_plan: add '
                f"{{'{name}': P('data')}}, and each process reads its rows of the output"
            )


def _place(module: Any, plan: ResolvedPlan, mesh: Mesh) -> Any:
    if not is_nnx_module(module):
        held = unbox(module)
        return jax.device_put(held, plan.resolve_state(held, mesh).shardings)
    from flax import nnx  # imported already, or there would be no such module

    def placed(path: Any, variable: Any) -> Any:
        sharding = NamedSharding(mesh, plan['/'.join(key_names(path))].spec)
        return variable.replace(jax.device_put(array_of(variable), sharding))

    held = nnx.state(module, nnx.Param)
    nnx.update(module, jax.tree_util.tree_map_with_path(placed, held, is_leaf=is_carrier))
    return module


def _module_path(name: str) -> tuple[str, ...]:
    return tuple(name.replace('.', '/').split('/')) if name else ()


def _lay_out(name: str, output: Any, layout: Any) -> Any:
    """The arrays of an output, laid out; their rank must be that of the layout at least."""

    def one(x: Any) -> Any:
        if len(layout) > x.ndim:
            raise ValueError(
                f'output_plan gives {name!r} {tuple(layout)}, but it returns an array of '
                f'{x.ndim} dimensions {x.shape}'
            )
        if isinstance(layout, PartitionSpec):
            return with_sharding_constraint(x, layout)
        return constrain(x, layout)

    layout = layout.spec if isinstance(layout, NamedSharding) else layout
    return jax.tree.map(one, output)


def _constrain_submodule(module: Any, name: str, layout: Any) -> None:
    """Makes a submodule lay out its output, by a class of its own.

    nnx looks for `__call__` in the class, and rebuilds modules from their classes.
    """
    path = _module_path(name)
    try:
        below = subtree(module, path)
    except (AttributeError, LookupError, ValueError) as error:
        from flax import nnx

        known = ['/'.join(map(str, p)) for p, _ in nnx.iter_modules(module)]
        raise ValueError(
            f'output_plan names {name!r}, but the model has no such module.{nearest(name, known)} '
            f'It has {", ".join(repr(n) for n in known)}'
        ) from error
    frozen = layout if isinstance(layout, PartitionSpec | NamedSharding) else tuple(layout)
    below.__class__ = _laying_out(type(below), name, frozen)  # type: ignore[arg-type]


@functools.cache
def _laying_out(cls: Any, name: str, layout: Any) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _lay_out(name, cls.__call__(self, *args, **kwargs), layout)

    return type(cls.__name__, (cls,), {'__call__': __call__, '__module__': cls.__module__})

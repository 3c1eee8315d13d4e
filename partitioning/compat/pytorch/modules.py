"""ShardingPlan, the layout of a model: of its parameters now, of its outputs whenever it runs."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.compat.pytorch.entries import check_mesh_of, is_layout, resolve_entries
from partitioning.compat.pytorch.trees import (
    is_array,
    is_nnx_module,
    nnx_state,
    parameters_of_state,
    subtree,
)
from partitioning.constraints import lay_out
from partitioning.plan import Plan, impose_plan
from partitioning.rules import (
    AxisRules,
    LogicalAxisRules,
    OnIndivisible,
    OnUnmatched,
    boundary_spec,
    nearest,
    resolve_axes,
    to_spec,
)
from partitioning.state import Path, unbox
from partitioning.state.boxes import array_of, is_carrier, is_metadata


class ShardingPlanner(abc.ABC):
    """Makes a plan for a model and a mesh."""

    @abc.abstractmethod
    def build_plan(self, module: Any, mesh: Mesh) -> ShardingPlan:
        """Makes the plan.

        `module` has parameters, abstract or not: a pytree, linen variables, or an nnx module;
        `parameters(module)` has the arrays by path.
        """


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """The layout of a model: of its parameters or modules, and of the outputs of modules.

    Nothing is checked until the plan is resolved.

    Usage:
      plan = ShardingPlan(
          {'fc1/kernel': P(None, 'model'), 'fc2/kernel': ('mlp', 'embed'), 'tables': MySharder()},
          output_plan={'fc2': P('data')})
      params = shard_module(params, plan, mesh)
      print(plan.resolve(jax.eval_shape(model.init, key, x), mesh))

    Attributes:
      plan: an entry per parameter, by its path with '/' or '.' between the keys: a PartitionSpec, a
        tuple of logical names, a NamedSharding, or an object with `to_partition_spec(mesh, shape)`,
        such as a PartitionerConfig. A Sharder can be the entry of a parameter or of a module. A
        path may be a pattern, as in PyTorch's `parallelize_module`: `*` and `?` stand for parts of
        one key, `layers.*.kernel`, and `**` for any number of keys, `**/kernel`. Exact paths win
        over patterns, and the first pattern that matches wins. An empty plan replicates every
        parameter (data parallelism).
      output_plan: the layout of the output per module, by its path; '' is the whole model. See
        `constrain_outputs`.
      return_local_tensor: modules of `output_plan`. Each process needs only its own rows of their
        outputs, and `partitioner.to_local` returns these rows. The outputs stay global arrays.
    """

    plan: Mapping[str, Any]
    output_plan: Mapping[str, Any] | None = None
    return_local_tensor: Sequence[str] | None = None

    def resolve(
        self,
        module: Any,
        mesh: Mesh,
        rules: LogicalAxisRules | None = None,
        *,
        on_unmatched: OnUnmatched | None = None,
        on_indivisible: OnIndivisible | None = None,
    ) -> Plan:
        """The layout of each array.

        Args:
          module: parameters, abstract or not; see `ShardingPlanner.build_plan`.
          rules: the rules for the logical names in the plan and on parameters that the plan does
            not name. A mesh axis can also be used as a name.
          on_unmatched: the policy for names without a rule, and for arrays above 16 KiB that
            neither the plan nor a name covers: 'error', or 'replicate'.
          on_indivisible: the policy for sizes that their mesh axes do not divide; see
            `resolve_axes`.

        Returns:
          A plan with the parameters and buffers, but without the outputs of modules.

        Raises:
          TypeError: if an entry is not a layout.
          ValueError: if a path does not exist, with the nearest one; if two entries are for the
            same array; if a layout does not fit the mesh or the array.
        """
        self.outputs()
        policies = AxisRules(rules or (), on_unmatched, on_indivisible)
        if is_nnx_module(module):
            from flax import nnx  # already imported, because the module is an nnx module

            module = nnx.clone(module)  # Sharders change it in place
        return resolve_entries(self.plan, module, mesh, policies)[1]

    def plan_state(self, state: Any, mesh: Mesh, rules: AxisRules) -> Plan:
        """The plan of a train state, for `PjitPartitioner(mesh, plan)`; see `resolve`."""
        return self.resolve(parameters_of_state(state), mesh, rules)

    def outputs(self) -> dict[Path, tuple[str, Any]]:
        """The name and the layout of each module of `output_plan`, by path.

        Raises:
          TypeError: if an entry is not a layout.
          ValueError: if a module appears twice, or if a module of `return_local_tensor` has no
            layout.
        """
        layouts, local = self.output_plan or {}, self.return_local_tensor or ()
        if not isinstance(layouts, Mapping):
            raise TypeError(f'output_plan={layouts!r} must map paths to layouts')
        found: dict[Path, tuple[str, Any]] = {}
        for name, layout in layouts.items():
            if not isinstance(name, str):
                raise TypeError(f'output_plan must name modules by path, not by {name!r}')
            if not is_layout(layout):
                raise TypeError(
                    'Only a PartitionSpec, logical names or a NamedSharding is supported as '
                    f'output_plan for {name!r}, not {layout!r}'
                )
            path = tuple(name.replace('.', '/').split('/')) if name else ()
            if path in found:
                raise ValueError(
                    f'output_plan entries {found[path][0]!r} and {name!r} are for the same module: '
                    'keep one'
                )
            found[path] = (name, tuple(layout) if isinstance(layout, list) else layout)
        if not isinstance(local, list | tuple):
            raise ValueError(f'return_local_tensor={local!r} must be a list')
        for name in local:
            if name not in layouts:
                raise ValueError(
                    f'return_local_tensor names {name!r}, which has no layout in output_plan: add '
                    f"{{'{name}': P('data')}} there, so that each process reads its own rows"
                )
        return found


Outputs = Mapping[Path, tuple[str, Any]]


def shard_module(
    module: Any,
    plan: ShardingPlan | Plan,
    mesh: Mesh,
    rules: LogicalAxisRules | None = None,
    *,
    on_unmatched: OnUnmatched | None = None,
    on_indivisible: OnIndivisible | None = None,
) -> Any:
    """Lays out the arrays of a model over a mesh.

    If the parameters do not fit on one device, create them in their shards instead:
    `PjitPartitioner(mesh, plan).init`.

    Args:
      module: parameters, which may be linen variables; or an nnx module.
      plan: a ShardingPlan; or a Plan, which takes no `rules` and no policies.
      rules, on_unmatched, on_indivisible: as in `ShardingPlan.resolve`.

    Returns:
      The parameters, without linen boxes. Buffers next to them are laid out too, and replicated if
      the plan does not name them. An nnx module is changed in place: its variables hold the sharded
      arrays, and its submodules lay out their outputs by the plan's `output_plan`. (For linen
      modules `constrain_outputs` does that.) A submodule with a layout of its output becomes an
      instance of a generated subclass, which pickle does not find.

    Raises:
      TypeError: if `plan` is not a plan, and as `ShardingPlan.resolve`.
      ValueError: if `ShardingPlan.resolve` raises it, or if `output_plan` names an absent module.
    """
    if isinstance(plan, Plan):
        settings = {'rules': rules, 'on_unmatched': on_unmatched, 'on_indivisible': on_indivisible}
        if given := [name for name, value in settings.items() if value is not None]:
            raise ValueError(f'the plan already determines {", ".join(given)}: remove it')
        return _place(module, plan, mesh)
    if not isinstance(plan, ShardingPlan):
        raise TypeError(f'plan={plan!r} must be a ShardingPlan: write ShardingPlan({{...}})')
    outputs = plan.outputs()
    if outputs and is_nnx_module(module):
        _find_submodules(module, outputs)  # raises before anything is changed
    policies = AxisRules(rules or (), on_unmatched, on_indivisible)
    made, resolved = resolve_entries(plan.plan, module, mesh, policies)
    made = _place(made, resolved, mesh)
    if outputs and is_nnx_module(made):
        # nnx looks up `__call__` in the class of a module, and rebuilds modules from their classes.
        found = _find_submodules(made, outputs)
        for submodule, (name, layout) in zip(found, outputs.values(), strict=True):
            kind: Any = type(submodule)
            submodule.__class__ = _subclass(kind, name, layout, mesh, policies)
    return made


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
        raise TypeError(f'plan={plan!r} must be a ShardingPlan, which has an output_plan')
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
    names = ['/'.join(path) for path in called]
    for path, (name, _) in outputs.items():
        if path not in called:
            others = (
                ', and no other module: functions that were already traced do not count, so '
                'enter constrain_outputs inside the jitted function'
            )
            if names:
                listed = ', '.join(map(repr, names))
                others = f'.{nearest(name, names)} These were called: {listed}'
            raise ValueError(f'output_plan names {name!r}, but no such module was called{others}')


def _place(module: Any, plan: Plan, mesh: Mesh) -> Any:
    state = nnx_state(module)
    leaves = jax.tree.leaves(state, is_leaf=is_carrier)
    if any(isinstance(array_of(x), jax.ShapeDtypeStruct) for x in leaves):
        raise ValueError(
            'the parameters are ShapeDtypeStructs, which have no arrays to lay out: '
            'plan.resolve(params, mesh) gives their layouts'
        )
    held = unbox(state)
    shardings = impose_plan(plan, held, mesh).shardings

    def move(x: Any, sharding: Any) -> Any:
        if is_metadata(x) or not is_array(x):
            return x  # a text, or names of another array
        array = jax.device_put(array_of(x), sharding)
        return x.replace(array) if is_carrier(x) else array

    placed = jax.tree.map(move, held, shardings, is_leaf=is_carrier)
    if not is_nnx_module(module):
        return placed
    from flax import nnx  # already imported, because the module is an nnx module

    nnx.update(module, placed)
    return module


def _find_submodules(module: Any, outputs: Outputs) -> list[Any]:
    """The submodules of an nnx module that have a layout; one that is absent is a ValueError."""
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
            if other is not None and not other.empty:
                check_mesh_of(layout, other)
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

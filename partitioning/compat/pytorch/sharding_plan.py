"""ShardingPlan and ShardingPlanner: the layout of a model, and the object that chooses one."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from partitioning.compat.pytorch.entries import is_layout, resolve_entries
from partitioning.compat.pytorch.trees import is_nnx_module
from partitioning.plan import Plan
from partitioning.rules import AxisRules, LogicalAxisRules, OnIndivisible, OnUnmatched
from partitioning.state import Path


class ShardingPlanner(abc.ABC):
    """Makes a plan for a model and a mesh."""

    @abc.abstractmethod
    def build_plan(self, module: Any, mesh: Mesh) -> ShardingPlan:
        """Makes the plan.

        Args:
          module: parameters, abstract or not: a pytree, linen variables, or an nnx module;
            `parameters(module)` has the arrays by path.
          mesh: the mesh.
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
          mesh: the mesh.
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

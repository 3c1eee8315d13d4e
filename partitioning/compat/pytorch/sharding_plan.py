"""PyTorch's words: what a plan says, and who makes one."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.compat.pytorch.entries import apply_entries, are_names
from partitioning.compat.pytorch.sharder import Sharder
from partitioning.compat.pytorch.trees import is_nnx_module
from partitioning.plan.resolved import ResolvedPlan
from partitioning.rules import AxisRules, LogicalAxisRules, OnIndivisible, OnUnmatched
from partitioning.state import Path


class ShardingPlanner(abc.ABC):
    """Makes a plan for a model and a mesh."""

    @abc.abstractmethod
    def build_plan(self, module: Any, mesh: Mesh) -> ShardingPlan:
        """The plan.

        Args:
          module: parameters, abstract or not: a pytree, linen variables, or an nnx module;
            `parameters(module)` are their arrays by path.
          mesh: the mesh.
        """


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """How a model is laid out: by parameter or module, and the outputs of modules.

    Nothing is checked before it is resolved.

    Usage:
      plan = ShardingPlan(
          {'fc1/kernel': P(None, 'model'), 'fc2/kernel': ('mlp', 'embed'), 'tables': MySharder()},
          output_plan={'fc2': P('data')})
      params = shard_module(params, plan, mesh)
      print(plan.resolve(jax.eval_shape(model.init, key, x), mesh))

    Attributes:
      plan: for a parameter, by its path with '/' or '.' between the keys, its PartitionSpec, its
        logical names (a tuple), a NamedSharding, or anything with `to_partition_spec(mesh, shape)`,
        such as a PartitionerConfig; for a parameter or a module, a Sharder.
      output_plan: for a module, by its path ('' is the whole model), the layout of its output; see
        `constrain_outputs`.
      return_local_tensor: modules of `output_plan` whose outputs each process reads its own rows
        of. They stay global arrays of their global shape; `partitioner.to_local` returns the rows.
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
    ) -> ResolvedPlan:
        """What the plan comes to, array by array.

        Args:
          module: parameters, abstract or not; see `ShardingPlanner.build_plan`.
          mesh: the mesh.
          rules: for logical names, in the plan and of parameters that it does not name. A name may
            be a mesh axis.
          on_unmatched: of names without a rule, and of parameters above 16 KiB that nothing names:
            'error', or 'replicate'.
          on_indivisible: of sizes that their mesh axes do not divide; see `resolve_axes`.

        Returns:
          The layouts of the parameters. Of outputs it says nothing.

        Raises:
          TypeError: an entry that is no layout.
          ValueError: a path that does not exist, with the nearest ones; entries for the same
            array; a layout that the mesh or the array cannot have.
        """
        self.outputs()
        policies = AxisRules(rules or (), on_unmatched, on_indivisible)
        sharders = isinstance(self.plan, Mapping) and any(
            isinstance(entry, Sharder) for entry in self.plan.values()
        )
        if sharders and is_nnx_module(module):
            from flax import nnx  # imported already, or there would be no such module

            module = nnx.clone(module)  # which Sharders change
        return apply_entries(self.plan, module, mesh).resolve(mesh, policies)

    def outputs(self) -> dict[Path, tuple[str, Any]]:
        """The modules of output_plan by path, each with its name there and its layout.

        Raises:
          TypeError: what is no layout.
          ValueError: a module twice; one of return_local_tensor without a layout.
        """
        if not isinstance(self.output_plan, Mapping | None):
            raise TypeError(f'output_plan has layouts by path, not {self.output_plan!r}')
        found: dict[Path, tuple[str, Any]] = {}
        for name, layout in (self.output_plan or {}).items():
            if not isinstance(name, str):
                raise TypeError(f'output_plan names modules by path, not {name!r}')
            if not isinstance(layout, PartitionSpec | NamedSharding) and not are_names(layout):
                raise TypeError(
                    'Only a PartitionSpec, logical names or a NamedSharding is supported as '
                    f'output_plan for {name!r}, not {layout!r}'
                )
            path = tuple(name.replace('.', '/').split('/')) if name else ()
            if path in found:
                raise ValueError(
                    f'output_plan has {found[path][0]!r} and {name!r}, the same module'
                )
            found[path] = (name, tuple(layout) if isinstance(layout, list) else layout)
        if not isinstance(self.return_local_tensor, list | tuple | None):
            raise ValueError(f'return_local_tensor={self.return_local_tensor!r} must be a list')
        for name in self.return_local_tensor or ():
            if name not in (self.output_plan or {}):
                raise ValueError(
                    f'return_local_tensor names {name!r}, which has no layout in output_plan: add '
                    f"{{'{name}': P('data')}}, and each process reads its rows of the output"
                )
        return found

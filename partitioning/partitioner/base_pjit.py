"""A partitioner on jax.jit without rules: its mesh, its chunks, and partitioned functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

from jax.sharding import Mesh

from partitioning.hardware import OptionValue, check_options
from partitioning.hardware.compilers import check_memory, own_compiler_errors
from partitioning.layout import LocalChunker
from partitioning.mesh import MeshConfig
from partitioning.partitioner.base import BasePartitioner
from partitioning.partitioner.keyword_hints import explain_keywords
from partitioning.partitioner.t5x_settings import MISSING, Positions, either_name
from partitioning.plan import Plan
from partitioning.programs.boundary import PartitionSettings
from partitioning.programs.partitioned_function import (
    CompiledPartitionedCallable,
    PartitionedCallable,
    PartitionedFunction,
)
from partitioning.programs.trace_log import OnRecompile
from partitioning.rules import LogicalAxisRules, check_has_devices

CompilerOptions = Mapping[str, OptionValue] | None


class BasePjitPartitioner(BasePartitioner):
    """A partitioner on `jax.jit` without logical axis rules."""

    @functools.cached_property
    def _local_chunker(self) -> LocalChunker:
        return LocalChunker(self.mesh)

    @property
    def _gradient_rules(self) -> LogicalAxisRules | None:
        """The rules that lay out gradients, if they differ from the rules of the parameters."""
        return None

    @functools.cached_property
    def mesh(self) -> Mesh:
        source = self._mesh_source
        # An AbstractMesh has what plans and specs need; check_has_devices refuses everything else.
        return source.build() if isinstance(source, MeshConfig) else cast(Mesh, source)

    def _plan_state(self, train_state: Any) -> Plan:
        raise ValueError(
            f'{type(self).__name__} has no logical axis rules to lay out a state: use '
            'PjitPartitioner'
        )

    @explain_keywords(
        in_specs='write in_shardings, with the same specs',
        out_specs='write out_shardings, with the same specs',
        static_argnames='write static_argnums, the positions of the arguments, such as 2',
        donate_argnames='write donate_argnums, the positions of the arguments, such as 0',
    )
    def partition(
        self,
        fn: Callable[..., Any],
        in_shardings: Any = MISSING,
        out_shardings: Any = MISSING,
        static_argnums: Positions = (),
        donate_argnums: Positions = (),
        *,
        on_recompile: OnRecompile = 'allow',
        compiler_options: CompilerOptions = None,
        in_axis_resources: Any = MISSING,
        out_axis_resources: Any = MISSING,
    ) -> PartitionedCallable:
        """`jax.jit` over the mesh: `fn` as a function of global arrays.

        For each argument that is not static, and for the result, shardings are a tree or a prefix
        of one: PartitionSpecs, Shardings or None, which replicates. UNCONSTRAINED leaves dimensions
        as they are. on_recompile='error' refuses a second compilation, and says what changed.
        """
        ins = either_name('in_shardings', in_shardings, 'in_axis_resources', in_axis_resources)
        outs = either_name('out_shardings', out_shardings, 'out_axis_resources', out_axis_resources)
        settings = PartitionSettings(
            fn=fn,
            in_shardings=self._with_batch(ins),
            out_shardings=self._with_batch(outs),
            static_argnums=static_argnums,
            donate_argnums=donate_argnums,
            on_recompile=on_recompile,
            compiler_options=compiler_options,
        )
        function = PartitionedFunction(
            settings, self.mesh, self.logical_axis_rules, self._gradient_rules
        )
        function.partitioner = self
        return function

    def _with_batch(self, shardings: Any) -> Any:
        """The shardings of a function, in which a subclass may replace what means the batch."""
        return shardings

    def compile(
        self,
        partitioned_fn: PartitionedCallable,
        *args: Any,
        compiler_options: CompilerOptions = None,
    ) -> CompiledPartitionedCallable:
        check_has_devices(self.mesh, 'compile')
        options: Any = check_options(compiler_options)
        if not hasattr(partitioned_fn, 'lower'):
            name = getattr(partitioned_fn, '__name__', 'fn')
            raise ValueError(
                f'{name} is not partitioned: write compile(partition({name}, in_shardings, '
                'out_shardings), ...)'
            )
        lowered = partitioned_fn.lower(*args)
        name = getattr(partitioned_fn, '__name__', 'the function')
        with own_compiler_errors(name, self.mesh):
            compiled = lowered.compile(compiler_options=options)
        check_memory(compiled, name, self.mesh)
        return compiled

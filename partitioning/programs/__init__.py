"""Functions compiled over a mesh: as fast as plain `jax.jit`, and with errors that name arguments.

`partitioned` has the contexts in which functions are traced, `partitioned_calls` makes a function,
and `partitioned_methods` has its methods. What `partition` accepts is in `resources`, `arguments`
and `inner_layouts`, and `boundary` puts it together. `recompilation` knows why a function was
compiled again.

After an exception, `call_errors` looks for the cause with `argument_checks`, `placement_checks`,
`pmap_leftovers` and `donation`. `trace_errors` and `explicit_axes` help while a function is traced.
"""

from partitioning.programs.partitioned import (
    CompiledPartitionedCallable as CompiledPartitionedCallable,
    PartitionedCallable as PartitionedCallable,
    PjittedFnWithContext as PjittedFnWithContext,
)
from partitioning.programs.recompilation import (
    check_compiled_once as check_compiled_once,
)

"""Finds what is wrong or wasteful in the layouts of a function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.calls.compiled_call import check_no_trace_needed, is_compiled
from meshwright.calls.compiling import Progress
from meshwright.examining import examine
from meshwright.findings.program_findings import Findings, lint_program, with_exchanges
from partitioning.hardware import OptionValue
from partitioning.tracebacks import hide_own_frames


@hide_own_frames
def lint(
    fn: Any,
    *args: Any,
    topology: str | None = None,
    num_slices: int = 1,
    axes: Mapping[str, int] | None = None,
    compile: bool = True,
    compiler_options: Mapping[str, OptionValue] | None = None,
    on_cpu: bool = False,
    progress: Progress | None = None,
) -> Findings:
    """Returns the findings of a call: each with a line or an argument, figures, and what to write.

    It finds large arrays that are whole along an axis which shards others like them, batches whose
    rows are not divided, constraints that do not divide a size or that gather the rows, parameters
    whose layout cuts their product, optimizer states that are laid out unlike their parameters,
    exchanges that another way of writing the same avoids,
    large constants, states that come back with another sharding or type so that the next call
    compiles again, states that are not donated, and work of the host.

    Usage:
      for finding in mw.lint(train_step, state, batch):
          print(finding.where, finding.message)
      assert not mw.lint(train_step, state, batch)  # in a test

    Args:
      fn, *args, topology, num_slices, axes, compiler_options, on_cpu, progress: as for `forecast`.
      compile: whether to compile, which tells the shardings of results that the function does not
        state. The other findings need only a trace.

    Raises:
      ValueError: as in `forecast`, and for a function that is lowered or compiled already.
    """
    if is_compiled(fn):
        check_no_trace_needed(fn, args, question='lint')
    made = examine(
        fn,
        args,
        topology=topology,
        num_slices=num_slices,
        axes=axes,
        compile=compile,
        compiler_options=compiler_options,
        on_cpu=on_cpu,
        progress=progress,
    )
    found = lint_program(made.program.traced, made.target.mesh, made.held, made.results)
    return with_exchanges(found, made.program.traced, made.target.mesh, made.held)

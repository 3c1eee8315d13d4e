"""Finds the line of Python, the array and the rule that cause an exchange or a buffer.

A *cause* says why an exchange or a buffer exists. A *change* is what to write instead. *Evidence*
is what was read from the compiled program and the trace. `explaining` finds the causes, and
`choosing` compiles with their changes to find the one that saves the most.
"""

from meshwright.causes.buffers import explain_estimate as explain_estimate
from meshwright.causes.cause import Cause as Cause, Change as Change
from meshwright.causes.choosing import BestChange as BestChange, find_change as find_change
from meshwright.causes.explaining import (
    Explanation as Explanation,
    explain_program as explain_program,
)
from meshwright.causes.layouts import describe_arguments as describe_arguments
from meshwright.causes.recompiling import compile_partitioned as compile_partitioned
from meshwright.causes.trying import (
    CompiledFunction as CompiledFunction,
    TriedChange as TriedChange,
    try_change as try_change,
)

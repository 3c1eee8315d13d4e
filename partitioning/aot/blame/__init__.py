"""Which line of Python, which array and which rule an exchange or a buffer comes from."""

from partitioning.aot.blame.cause import Cause as Cause
from partitioning.aot.blame.changes import Change as Change
from partitioning.aot.blame.confirming import (
    CompiledFunction as CompiledFunction,
    Confirmation as Confirmation,
    confirm_change as confirm_change,
    try_change as try_change,
)
from partitioning.aot.blame.described_arguments import describe_arguments as describe_arguments
from partitioning.aot.blame.estimated_buffers import (
    explain_estimate as explain_estimate,
)
from partitioning.aot.blame.explaining import (
    Explanation as Explanation,
    explain_program as explain_program,
)
from partitioning.aot.blame.recompiling import compile_partitioned as compile_partitioned
from partitioning.aot.blame.suggesting import (
    Suggestion as Suggestion,
    suggest_change as suggest_change,
)

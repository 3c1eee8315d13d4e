"""Which line of Python, which array and which rule an exchange or a buffer comes from."""

from meshwright.causes.cause import Cause as Cause
from meshwright.causes.changes import Change as Change
from meshwright.causes.confirming import (
    CompiledFunction as CompiledFunction,
    Confirmation as Confirmation,
    confirm_change as confirm_change,
    try_change as try_change,
)
from meshwright.causes.described_arguments import describe_arguments as describe_arguments
from meshwright.causes.estimated_buffers import (
    explain_estimate as explain_estimate,
)
from meshwright.causes.explaining import (
    Explanation as Explanation,
    explain_program as explain_program,
)
from meshwright.causes.recompiling import compile_partitioned as compile_partitioned
from meshwright.causes.suggesting import (
    Suggestion as Suggestion,
    suggest_change as suggest_change,
)

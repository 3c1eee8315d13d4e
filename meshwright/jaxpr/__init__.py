"""Reads operations, layouts, exchanges and memory from a traced function, without a compiler."""

from meshwright.jaxpr.exchange_list import (
    list_collectives as list_collectives,
)
from meshwright.jaxpr.memory_estimate import (
    MemoryEstimate as MemoryEstimate,
    estimate_memory as estimate_memory,
)
from meshwright.jaxpr.tracing import (
    TracedProgram as TracedProgram,
    lay_out_trace as lay_out_trace,
    trace_function as trace_function,
)

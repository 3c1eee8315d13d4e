"""What a JAX program needs, sends and takes on a machine that is not here, and why.

`jaxpr` reads a function that was only traced, and `program` the text of a compiled one. `time`
knows how long the work takes that they found. `causes` finds the line and the rule that an exchange
or a buffer comes from. `calls` moves a function and its arguments to another machine. `forecasting`
puts these together, and `changes` finds what makes a function fit. `report` has the type of a
forecast, and draws it. `checks` compares it with a golden file.

`__init__.pyi` lists every name with its module, which is imported when the name is first used.
"""

from partitioning.lazy_names import attach

__getattr__, __dir__ = attach(__name__)

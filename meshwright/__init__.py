"""Forecasts the memory, exchanges and time of a JAX program on any machine, and explains them.

`jaxpr` reads a function that was only traced, and `program` reads the text of a compiled one.
`time` estimates how long their work takes. `causes` finds the line and the rule that an exchange or
a buffer comes from. `calls` moves a function and its arguments to another machine. `forecasting`
puts these together, and `changes` finds what makes a function fit. `report` has the type of a
forecast, and shows it in a terminal, as a page and as JSON. `checks` has what tests assert of a
function, also with golden files, and `dumps` reads what XLA has written about a program.

`__init__.pyi` lists every name with its module, which is imported when the name is first used.
"""

from partitioning.lazy_names import attach

__getattr__, __dir__ = attach(__name__)

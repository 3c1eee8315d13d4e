"""A function with changes: which of them lower what it sends and holds, and for which exchanges.

    function_view   what a finder sees: the arrays of a function, their origins, its exchanges
    of_*            the finders: each yields the changes of one kind of code
    candidates      the two kinds of changes: made in a trace, or told to the author
    searching       the tables of finders, and the figures of each change by formula
    confirming      compiles the best changes, and drops those that do not help
    advising        gives each exchange the change that removes it
    needs           says of the others whether the mathematics and the layouts need them

A finder takes a `FunctionView`. If a trace can be given the change, it yields a `Candidate`, and
`subject.with_change` makes the function with it. Otherwise it yields a `Told`, with the exchanges
that come from the place as a `Match`, and if possible with an edited trace (`rewriting`,
`loop_edits`) that sends what the new code would send. `figures` compares functions.
"""

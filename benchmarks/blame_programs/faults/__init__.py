"""The faults that `benchmarks/blame.py` seeds, in a file for each thing that a fault changes.

Every fault belongs to one of five sets. Set 1 was used to write the code that explains programs,
and each later set was written when the code had been corrected after the set before it. Set 5 has
programs that no other set has.
"""

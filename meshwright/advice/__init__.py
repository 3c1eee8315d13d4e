"""Tries changes of a function, by formula and by compiling, and says which exchanges they avoid."""

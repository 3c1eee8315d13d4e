"""Tasks, which turn streams of tokens or examples into rows, and the order of the rows."""

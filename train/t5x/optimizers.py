"""T5X's `optimizers`, as far as its gin files use it: optax transformations in a row."""

from train.optimizers import chain as chain

"""What is at a path, and the arrays in it, for every format that can be read."""

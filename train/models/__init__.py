"""Models, with logical axis names on every parameter and activation."""

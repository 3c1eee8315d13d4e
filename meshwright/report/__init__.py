"""A forecast as one table of figures, drawn in the terminal, as a page, and as JSON."""

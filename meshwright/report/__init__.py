"""Reports a forecast as one table of figures: in the terminal, as a page, and as JSON."""

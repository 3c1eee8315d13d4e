"""Prepares a forecast: describes a machine, moves a function to it, and compiles the function."""

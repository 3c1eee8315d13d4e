"""Fifteen small programs, changes of their layouts, and refactorings that change nothing."""

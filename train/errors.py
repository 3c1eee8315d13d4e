"""Errors that a user can mend, told in one line."""


class ConfigError(ValueError):
    """A configuration that cannot be honoured: what, where, and what to write instead."""

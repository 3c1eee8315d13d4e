"""Errors that a user can mend, told in one line."""


class ConfigError(ValueError):
    """A configuration that cannot be honoured: what, where, and what to write instead."""


def check_counts(least: int = 1, **counts: int) -> None:
    """Each setting is a whole number of at least `least`."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise ConfigError(f'{name} is {count!r}: it must be a whole number of at least {least}')


def first_line(error: Exception) -> str:
    """The first line of what an error says, or its kind if it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]

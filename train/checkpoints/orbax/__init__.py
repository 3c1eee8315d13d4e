"""Orbax's files. No other room knows Orbax."""

"""Reads and checks gin files and flags before gin runs them."""

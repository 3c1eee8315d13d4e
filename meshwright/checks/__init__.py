"""Assertions for tests: what a function exchanges, the memory that it needs, and golden files."""

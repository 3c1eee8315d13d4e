"""Reads stored arrays piece by piece when they are needed, and places them on devices."""

"""Runs training and evaluation: checks, start, compiled steps, training loop, and stopping."""

"""Runs: how experiments are run, stored in folders, resumed and read back."""

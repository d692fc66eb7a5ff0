"""Runs: experiments carried out, kept in folders, resumed, read back and reported."""

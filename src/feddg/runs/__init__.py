"""Runs: experiments carried out, kept in folders, resumed and read back."""

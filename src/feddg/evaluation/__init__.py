"""Accuracy by domain, further metrics, decisions about a class."""

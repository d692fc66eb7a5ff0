"""Clients: their images, the worker they share, and how they take optimizer steps."""

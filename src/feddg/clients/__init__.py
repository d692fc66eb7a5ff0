"""Clients: their images, the machinery they take turns to use, and how they step."""

"""The federation across a network, with Flower as transport.

Only this package imports Flower. A user's Flower app is a folder with a ``pyproject.toml``, written
by ``feddg deploy init``; its components are ``server_app`` and ``client_app`` here.
"""

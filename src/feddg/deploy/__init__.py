"""The federation across a network, with Flower as transport.

Only this package imports Flower. A user's Flower app is a folder with a ``pyproject.toml``, written
by ``feddg deploy init``; its components are ``server_app`` and ``client_app`` here.
"""

from importlib.util import find_spec

from feddg.errors import FeddgError

if find_spec("flwr") is None:
    raise FeddgError("this needs Flower: pip install 'feddg[flower]'")

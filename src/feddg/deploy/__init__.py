"""The same federation across a network: Flower carries the messages.

Nothing else imports Flower. A user's Flower app is a folder with a ``pyproject.toml``, which
``feddg deploy init`` writes; its components are ``server_app`` and ``client_app`` in here.
"""

from importlib.util import find_spec

from feddg.errors import FeddgError

if find_spec("flwr") is None:
    raise FeddgError("this needs Flower: pip install 'feddg[flower]'")

"""Serves a trained model as a web page and an HTTP interface; needs the extra ``serve``."""

from importlib.util import find_spec

from feddg.errors import FeddgError

if missing := [name for name in ("fastapi", "python_multipart", "uvicorn") if not find_spec(name)]:
    raise FeddgError(f"serving needs the package {missing[0]}: pip install 'feddg[serve]'")

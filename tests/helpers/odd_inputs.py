"""What more than one file of tests tries that nobody should send: paths, bytes, numbers, markup."""

import math

OUTSIDE = (
    *("../evil.png", "/evil.png", "a/../../evil.png", "a/..", ".."),
    *("C:\\evil.png", "C:evil.png", "a\\..\\..\\evil.png"),
)
"""Paths that lead out of their folder, on some system."""
NOT_UTF8 = b"\xff\xfe\x00"
NOT_FINITE = (math.nan, math.inf, -math.inf)
MARKUP = '<script>alert("x")</script><img src=http://example.org/x onerror=alert(1)>&amp;'

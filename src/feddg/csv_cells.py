"""Texts as cells of CSV files that a spreadsheet does not take for formulas.

A cell that begins with ``=``, ``+``, ``-``, ``@``, a tab or a carriage return is computed when a
spreadsheet opens the file. Names of files, domains and classes come from outside, so such a text
gets an apostrophe before it, the spreadsheets' own mark of a text (OWASP, "CSV Injection"). So does
one that has apostrophes before such a beginning, so that every text comes back. Numbers stay
numbers.
"""

import re

_BEGINS_FORMULA = re.compile(r"'*[=+\-@\t\r]")
_NUMBER = re.compile(r"[+-]?[\d.,]+([eE][+-]?\d+)?( ?%| ± [\d.,]+)?")


def as_cell(value: object) -> object:
    """Returns what to write for a value: itself, or a text that is no formula."""
    if not isinstance(value, str) or not _BEGINS_FORMULA.match(value) or _NUMBER.fullmatch(value):
        return value
    return f"'{value}"


def from_cell(text: str) -> str:
    """Returns the text that :func:`as_cell` wrote as ``text``."""
    return text[1:] if text[:1] == "'" and _BEGINS_FORMULA.match(text[1:]) else text

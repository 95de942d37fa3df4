"""Parses Python for tests that read the source."""

import ast


def parse(source: str) -> ast.Module:
    """Parse `source`, and try again if CPython 3.11 fails by mistake.

    CPython 3.11 may raise "AST constructor recursion depth mismatch" for valid source.
    """
    try:
        return ast.parse(source)
    except SystemError:
        return ast.parse(source)

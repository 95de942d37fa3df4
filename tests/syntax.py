"""Parses Python for tests that read the source."""

import ast


def parse(source: str) -> ast.Module:
    """`ast.parse`, once more where CPython 3.11 fails by itself.

    It may raise "AST constructor recursion depth mismatch" where the source is in order.
    """
    try:
        return ast.parse(source)
    except SystemError:
        return ast.parse(source)

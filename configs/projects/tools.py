"""Tools: public methods with type annotations and docstrings that the policy may call."""


class Calculator:
    def reset(self, **row) -> None:
        pass  # The episode starts with the row's prompt.

    def add(self, a: int, b: int) -> int:
        """Add two integers.

        Args:
            a: First integer.
            b: Second integer.
        """
        return a + b

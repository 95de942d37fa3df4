"""Tools: public methods with types and docstrings, which the policy may call."""


class Calculator:
    def reset(self, **row) -> None:
        pass  # the prompt of the row opens the episode

    def add(self, a: int, b: int) -> int:
        """Add two integers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

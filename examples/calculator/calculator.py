"""A class without `step`: its public typed methods are tools that the model may call."""


class Calculator:
    def reset(self, **row) -> None:
        pass  # the row's prompt opens

    def multiply(self, a: int, b: int) -> int:
        """Multiply two integers.

        Args:
            a: The first.
            b: The second.
        """
        return a * b

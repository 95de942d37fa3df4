"""An environment without `step`: its public typed methods are tools that the model may call."""


class Calculator:
    def reset(self, **row) -> None:
        pass  # returns None, so the row's prompt is the first message

    def multiply(self, a: int, b: int) -> int:
        """Multiply two integers.

        Args:
            a: First factor.
            b: Second factor.
        """
        return a * b

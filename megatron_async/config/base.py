"""The base of every settings model: unknown keys are refused, values are checked, frozen."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator


class Settings(BaseModel):
    """A frozen group of settings; a misspelt key is an error, not a silent default.

    The docstring below a setting is its description. No number is infinite or NaN: comparisons
    with it would hold, or fail, without a word.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Refuse settings that do not fit each other. Raises ValueError."""

"""Provides the base class of all settings: frozen, checked, without unknown keys."""

from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError


class Settings(BaseModel):
    """A frozen group of settings that refuses unknown keys, so that a misspelled name is an error
    and does not silently leave a default in place.

    The docstring below a setting is its description. Numbers must be finite: a limit check against
    infinity or NaN would always have the same result. YAML's yes, no, on and off are not accepted
    as numbers.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_as_number(cls, value: object, info: ValidationInfo) -> object:
        values = value if isinstance(value, list) else [value]
        annotation = cls.model_fields[info.field_name or ""].annotation
        if any(isinstance(one, bool) for one in values) and not _takes_booleans(annotation):
            raise PydanticCustomError(
                "boolean", "True and false, also yes, no, on, off, do not fit"
            )
        return value

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Check settings that depend on each other.

        Raises:
            ValueError: If they do not fit together.
        """


def _takes_booleans(annotation: Any) -> bool:
    if annotation in (bool, Any, object) or isinstance(annotation, bool):
        return True
    return any(_takes_booleans(argument) for argument in get_args(annotation))

"""Settings of `environment`: what a policy plays against over many turns."""

from typing import Any, Literal

from pydantic import Field

from megatron_async.config.base import Settings
from megatron_async.runtime.import_path import is_import_path


class EnvironmentConfig(Settings):
    """An environment; without a name, every response is one turn."""

    name: str = ""
    """A class of yours (package.module:Class or file.py:Class); empty: none."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keywords for it."""
    tool_parser: str = ""
    """SGLang's name of the form in which the model writes calls of tools, as qwen25 or llama3; a
    class of tools needs it."""
    max_turns: int = Field(32, ge=1)
    """Answers of the policy in one episode at most."""
    step_seconds: float = Field(60.0, gt=0)
    """Limit of one call of the environment, or of all calls of tools in an answer."""
    episode_seconds: float = Field(3600.0, gt=0)
    """Limit of one episode, by the clock; it then ends as `length`, with its rewards so far. After
    a kill it goes on from the last reply of the environment."""
    workers: int = Field(1, ge=1)
    """Processes, each of which holds many episodes."""
    threads: int = Field(32, ge=1)
    """Of each worker: calls at once of methods that are not `async def`."""
    memory_mib: int = Field(4096, ge=64)
    """How far the memory of one worker may grow after its start; what asks for more raises
    MemoryError."""
    on_failure: Literal["regenerate", "zero", "drop"] = "regenerate"
    """An episode whose environment fails: again alone (at most schedule.max_regenerations times,
    then its group is dropped), kept with the rewards so far, or its group is dropped at once."""
    resume: Literal["auto", "restart"] = "auto"
    """Open episodes after a kill: go on (`state` and `restore` where the class has them, else its
    stored answers are played again and compared), or begin anew."""
    credit: Literal["episode", "turn"] = "episode"
    """Advantage of a token: the whole episode's, or that of the rewards from its turn on."""
    discount: float = Field(1.0, ge=0, le=1)
    """`credit: turn`: factor of a reward for each turn that it comes later."""

    @property
    def turn_discount(self) -> float | None:
        """The discount of turns' rewards; None where credit is the episode's."""
        return self.discount if self.name and self.credit == "turn" else None

    def check(self) -> None:
        if self.name and not is_import_path(self.name):
            raise ValueError(
                f"environment.name is {self.name!r}; it must be package.module:Class or "
                "path/to/file.py:Class"
            )
        changed = sorted(self.model_fields_set - {"name"})
        if not self.name and any(
            getattr(self, field)
            != type(self).model_fields[field].get_default(call_default_factory=True)
            for field in changed
        ):
            raise ValueError(f"environment.{changed[0]} is set and environment.name is not")

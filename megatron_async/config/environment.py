"""Settings of `episode`, `environment` and `agent`: episodes of several turns."""

from typing import Any, Literal

from pydantic import Field

from megatron_async.config.base import Settings
from megatron_async.runtime.import_path import is_import_path


class EpisodeConfig(Settings):
    """Episodes of many turns, which an environment or an agent plays."""

    tool_parser: str = ""
    """SGLang's name of the form in which the model writes calls of tools, as qwen25 or llama3. It
    is needed where there are tools, and a class with `step` then gets the calls in `Answer`."""
    max_turns: int = Field(32, ge=1)
    """Largest number of the policy's answers in one episode."""
    step_seconds: float = Field(60.0, gt=0)
    """Limit of one call of the environment, or of all calls of tools in an answer; of an agent,
    from an answer to its next call."""
    seconds: float = Field(3600.0, gt=0)
    """Limit of one episode, by the clock; it then ends as `length`, with its rewards so far. After
    a kill it continues from the last reply of the environment or agent."""
    workers: int = Field(1, ge=1)
    """Number of processes, each of which runs many episodes."""
    threads: int = Field(32, ge=1)
    """Threads of each worker, for functions that are not `async def`. An agent keeps one thread
    for its whole episode."""
    memory_mib: int = Field(4096, ge=64)
    """How far the memory of one worker may grow after its start; what asks for more raises
    MemoryError."""
    on_failure: Literal["regenerate", "zero", "drop"] = "regenerate"
    """An episode whose environment or agent fails is played again alone (at most
    schedule.max_regenerations times, then its group is dropped), kept with the rewards so far, or
    its group is dropped at once."""
    resume: Literal["auto", "restart"] = "auto"
    """Whether open episodes continue after a kill or start from scratch. An environment continues
    by `state` and `restore` where the class has them; otherwise its stored answers are played again
    and compared. An agent runs again, and its equal calls get the stored answers."""


class EnvironmentConfig(Settings):
    """An environment; without a name, every response is one turn."""

    name: str = ""
    """A class of yours (package.module:Class or file.py:Class); `environment: file.py:Class` is
    short for it. Empty: none."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keywords for it."""
    credit: Literal["episode", "turn"] = "episode"
    """Advantage of a token: the whole episode's, or that of the rewards from its turn on."""
    discount: float = Field(1.0, ge=0, le=1)
    """`credit: turn`: factor of a reward for each turn that it comes later."""

    @property
    def used(self) -> bool:
        """Return whether there is an environment."""
        return bool(self.name)

    @property
    def display_name(self) -> str:
        """The setting that names the environment, and its value, for messages."""
        return f"environment.name {self.name!r}"

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
        if not self.used:
            refuse_changed(self, "environment", "environment.name")
        if self.discount != 1 and self.credit != "turn":
            raise ValueError(
                f"environment.discount is {self.discount:g} and environment.credit "
                f"{self.credit!r}: it needs `credit: turn`"
            )


class AgentConfig(Settings):
    """A program of yours that calls the policy by the OpenAI chat API."""

    name: str = ""
    """A function (package.module:function or file.py:function); `agent: file.py:function` is
    short for it. Empty: none."""
    command: list[str] = Field(default_factory=list)
    """In place of a function: a program and its arguments. It gets OPENAI_BASE_URL, OPENAI_API_KEY
    and, on standard input, the row as JSON; the last line that it prints is the reward."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keywords for the function."""

    @property
    def used(self) -> bool:
        """Return whether there is an agent."""
        return bool(self.name or self.command)

    @property
    def display_name(self) -> str:
        """The setting that names the agent, and its value, for messages."""
        return f"agent.name {self.name!r}" if self.name else f"agent.command {self.command}"

    def check(self) -> None:
        if self.name and self.command:
            raise ValueError(
                f"agent.name is {self.name!r} and agent.command {self.command}: set one of them"
            )
        if self.name and not is_import_path(self.name):
            raise ValueError(
                f"agent.name is {self.name!r}; it must be package.module:function or "
                "path/to/file.py:function"
            )
        if self.command and self.arguments:
            raise ValueError(
                "agent.arguments are for a function; put what a program needs into agent.command"
            )
        if not self.used:
            refuse_changed(self, "agent", "agent.name or agent.command")


def refuse_changed(settings: Settings, section: str, needed: str) -> None:
    """Refuse settings that are not their defaults, since `needed` is not set. Raises ValueError."""
    for name in sorted(settings.model_fields_set):
        default = type(settings).model_fields[name].get_default(call_default_factory=True)
        if getattr(settings, name) != default:
            raise ValueError(f"{section}.{name} is set and {needed} is not")

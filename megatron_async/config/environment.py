"""Settings of `environment` and `agent`: what makes a trajectory an episode of many turns."""

from typing import Any, Literal

from pydantic import Field

from megatron_async.config.base import Settings
from megatron_async.runtime.import_path import is_import_path


class EpisodeConfig(Settings):
    """Settings that environments and agents have in common."""

    name: str = ""
    arguments: dict[str, Any] = Field(default_factory=dict)
    tool_parser: str = ""
    """SGLang's name of the form in which the model writes calls of tools, as qwen25 or llama3;
    where there are tools it is needed, and a class with `step` gets the calls in `Answer`."""
    max_turns: int = Field(32, ge=1)
    """Answers of the policy in one episode at most."""
    step_seconds: float = Field(60.0, gt=0)
    """Limit of one call of the environment, or of all calls of tools in an answer; of an agent,
    from an answer to its next call."""
    episode_seconds: float = Field(3600.0, gt=0)
    """Limit of one episode, by the clock; it then ends as `length`, with its rewards so far. After
    a kill it goes on from the last reply of the environment or agent."""
    workers: int = Field(1, ge=1)
    """Processes, each of which holds many episodes."""
    threads: int = Field(32, ge=1)
    """Of each worker: calls at once of what is not `async def`. An agent keeps one for its whole
    episode."""
    memory_mib: int = Field(4096, ge=64)
    """How far the memory of one worker may grow after its start; what asks for more raises
    MemoryError."""
    on_failure: Literal["regenerate", "zero", "drop"] = "regenerate"
    """An episode whose environment or agent fails: again alone (at most schedule.max_regenerations
    times, then its group is dropped), kept with the rewards so far, or its group is dropped at
    once."""
    resume: Literal["auto", "restart"] = "auto"
    """Open episodes after a kill: go on, or begin anew. An environment goes on by `state` and
    `restore` where the class has them, else its stored answers are played again and compared; an
    agent runs again, and its equal calls get the stored answers."""

    @property
    def used(self) -> bool:
        """Return whether there is one."""
        return bool(self.name)

    @property
    def turn_discount(self) -> float | None:
        """The discount of turns' rewards; None where credit is the episode's."""
        return None

    def _refuse_unused(self, section: str, needed: str) -> None:
        if self.used:
            return
        for name in sorted(self.model_fields_set):
            default = type(self).model_fields[name].get_default(call_default_factory=True)
            if getattr(self, name) != default:
                raise ValueError(f"{section}.{name} is set and {needed} is not")


class EnvironmentConfig(EpisodeConfig):
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
    def shown(self) -> str:
        """The setting that names it, and its value, for sentences."""
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
        self._refuse_unused("environment", "environment.name")
        if self.discount != 1 and self.credit != "turn":
            raise ValueError(
                f"environment.discount is {self.discount:g} and environment.credit "
                f"{self.credit!r}: it needs `credit: turn`"
            )


class AgentConfig(EpisodeConfig):
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
        return bool(self.name or self.command)

    @property
    def shown(self) -> str:
        """The setting that names it, and its value, for sentences."""
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
        self._refuse_unused("agent", "agent.name or agent.command")

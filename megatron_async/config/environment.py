"""Settings of `episode`, `environment` and `agent`: episodes of several turns."""

from typing import Any, Literal

from pydantic import Field

from megatron_async.config.base import Settings
from megatron_async.runtime.import_path import is_import_path


class EpisodeConfig(Settings):
    """Episodes of many turns, which an environment or an agent plays."""

    tool_parser: str = ""
    """SGLang's name of the format in which the model writes tool calls, for example qwen25 or
    llama3. It is required if the environment or agent offers tools. If your environment class has a
    method `step`, the method gets the parsed tool calls in `Answer`."""
    max_turns: int = Field(32, ge=1)
    """Largest number of policy responses in one episode."""
    step_seconds: float = Field(60.0, gt=0)
    """Time limit of one call to the environment, or of all tool calls in one response together, in
    seconds. For an agent, it limits the time until the agent calls the policy for the first time,
    calls it again after a response, or ends."""
    seconds: float = Field(3600.0, gt=0)
    """Time limit of one episode, in seconds of wall time. The episode then ends as `length`, with
    its rewards so far. If the run is killed and resumed, the time between the last stored reply of
    the environment or agent and the resume does not count."""
    workers: int = Field(1, ge=1)
    """Number of worker processes, each of which runs many episodes."""
    threads: int = Field(32, ge=1)
    """Number of threads of each worker, for functions that are not `async def`. An agent uses one
    thread for its whole episode."""
    memory_mib: int = Field(4096, ge=64)
    """Memory by which one worker may grow after its start, in MiB; more raises MemoryError."""
    on_failure: Literal["regenerate", "zero", "drop"] = "regenerate"
    """Treatment of an episode whose environment or agent fails. `regenerate`: only this episode is
    played again, at most schedule.max_regenerations times, then its group is dropped. `zero`: it is
    kept with the rewards so far. `drop`: its group is dropped at once."""
    resume: Literal["auto", "restart"] = "auto"
    """Treatment of open episodes after a kill: `auto` continues them, `restart` starts them from
    scratch. An environment continues through `state` and `restore` if its class has them; otherwise
    its stored responses are played again and compared. An agent runs again, and its equal calls get
    the stored responses."""


class EnvironmentConfig(Settings):
    """An environment; without a name, every response is one turn."""

    name: str = ""
    """Your class (package.module:Class or file.py:Class); `environment: file.py:Class` is a short
    form. Empty = no environment."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    credit: Literal["episode", "turn"] = "episode"
    """Rewards from which a token's advantage is computed: all rewards of its episode (`episode`),
    or only those of the token's own turn and later turns (`turn`)."""
    discount: float = Field(1.0, ge=0, le=1)
    """With `credit: turn`, discount factor per turn: a reward that comes n turns later is
    multiplied by discount ** n."""

    @property
    def used(self) -> bool:
        """Whether there is an environment."""
        return bool(self.name)

    @property
    def display_name(self) -> str:
        """The setting that selects the environment, with its value, as error messages show it."""
        return f"environment.name {self.name!r}"

    @property
    def turn_discount(self) -> float | None:
        """Discount factor of rewards per turn; None if there is no environment, or if all turns of
        an episode get the same credit (`credit: episode`)."""
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
                f"environment.discount is {self.discount:g}; a discount requires "
                f"environment.credit 'turn', got {self.credit!r}"
            )


class AgentConfig(Settings):
    """Your own program that calls the policy by the OpenAI chat API."""

    name: str = ""
    """A function (package.module:function or file.py:function); `agent: file.py:function` is a
    short form. Empty = no function."""
    command: list[str] = Field(default_factory=list)
    """A program and its arguments, to be used instead of a function. The program gets
    OPENAI_BASE_URL and OPENAI_API_KEY in its environment and the row of the data as JSON on
    standard input. The last line that it prints is the reward."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    @property
    def used(self) -> bool:
        """Whether there is an agent."""
        return bool(self.name or self.command)

    @property
    def display_name(self) -> str:
        """The setting that selects the agent, with its value, as error messages show it."""
        return f"agent.name {self.name!r}" if self.name else f"agent.command {self.command}"

    def check(self) -> None:
        if self.name and self.command:
            raise ValueError(
                f"agent.name is {self.name!r} and agent.command is {self.command}; set only one of "
                "them"
            )
        if self.name and not is_import_path(self.name):
            raise ValueError(
                f"agent.name is {self.name!r}; it must be package.module:function or "
                "path/to/file.py:function"
            )
        if self.command and self.arguments:
            raise ValueError(
                "agent.arguments are for a function; put the arguments of a program into "
                "agent.command"
            )
        if not self.used:
            refuse_changed(self, "agent", "agent.name or agent.command")


def refuse_changed(settings: Settings, section: str, needed: str) -> None:
    """Refuse settings of a section that has no effect because another setting is not set.

    Args:
        settings: The section.
        section: Name of the section, for the message.
        needed: Name of the setting that is not set, for the message.

    Raises:
        ValueError: If a setting of the section differs from its default.
    """
    for name in sorted(settings.model_fields_set):
        default = type(settings).model_fields[name].get_default(call_default_factory=True)
        if getattr(settings, name) != default:
            raise ValueError(f"{section}.{name} is set, but {needed} is not")

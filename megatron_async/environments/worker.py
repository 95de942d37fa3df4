"""Runs many episodes of an environment in one process, and computes the tokens of their turns.

Invariants
- Calls for one episode run one after the other; a call waits until the previous one has ended. An
  episode stays open from `begin` until it ends, is forgotten, or the worker dies. An episode that
  fails stays open until it is forgotten, even if it fails in `begin`.
- No environment object receives a response twice. If a worker died, or its reply to `step` was
  lost, the caller repeats the call on a restored environment, which is a new object.
- A process ends itself if calls hang in half of its threads, or if its event loop is blocked,
  because Python cannot end a single thread.
"""

import asyncio
import faulthandler
import os
import resource
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import psutil

from megatron_async.config import RunConfig
from megatron_async.config.environment import EpisodeConfig
from megatron_async.config.files import vocabulary_of
from megatron_async.environments.conversation import Conversation
from megatron_async.environments.environment_runner import (
    EnvironmentRunner,
    Threads,
    built,
    environment_builder,
)
from megatron_async.environments.interface import Answer, EnvironmentFault, EnvironmentHung, Reply
from megatron_async.environments.tools import CallReader, described, tools_of
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.tasks.base import Message
from megatron_async.trajectory.types import IntArray, Turn

_EXIT_DELAY_SECONDS: Final = 0.2
_MIN_BLOCKED_SECONDS: Final = 5.0
"""Shortest time for which the event loop must be blocked before a process ends itself."""
_TRIAL_RESPONSE: Final = "Yes."

Messages = tuple[Mapping[str, Any], ...]


class EpisodeUnknown(ComponentFailure):
    """Error of a worker that is called for an episode which is not open in its process.

    The worker was started again after its death, so the episode must be restored.
    """


class ReplayDiffers(ComponentFailure):
    """Error of restoring an environment: it failed, or sent other messages than those stored."""


@dataclass(frozen=True, eq=False)
class EpisodeStart:
    """Result of starting an episode: the input of its first turn.

    Attributes:
        messages: First messages of the episode, from the environment's `reset` or the task's row;
            for an agent, the messages of its first call.
        token_ids: Tokens of the messages, up to where the first response starts.
        state: Data for restoring the episode: a snapshot of the environment, or options of the
            agent's call. None if the environment makes no snapshots.
        notices: Warnings for the user.
    """

    messages: Messages
    token_ids: IntArray
    state: bytes | None
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class StepResult:
    """Reply of an environment or agent to one response: the input of the next turn, or the end.

    Attributes:
        answer: The response in the form in which it is stored with its turn, with named numbers for
            metrics as `parts`.
        reward: Reward of the turn; if the episode ended, with its final reward added.
        messages: New messages of the next turn.
        token_ids: Tokens that the next turn's input adds to its branch; None if the episode ended.
        state: Data for restoring the episode at the next turn (see `EpisodeStart.state`).
        ended: Reason why the episode ended: `stop` (by itself) or `length` (at a limit). None if
            another turn follows.
        fault: Error message from closing the ended environment, which does not change the result;
            None if there was no error.
        parent: Number of the turn that the next turn continues; None if it starts a conversation.
        abandoned: Numbers of turns that must not be trained on, because no agent received their
            responses.
        counts: Counts for metrics.
        notices: Warnings for the user.
    """

    answer: Mapping[str, Any]
    reward: float
    messages: Messages = ()
    token_ids: IntArray | None = None
    state: bytes | None = None
    ended: str | None = None
    fault: str | None = None
    parent: int | None = None
    abandoned: tuple[int, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrialEpisode:
    """Measurements of a trial episode, which is played with made-up responses before a run.

    Attributes:
        opening: Number of tokens before the first response.
        text: Text of these tokens.
        observation: Number of tokens between two responses. For an environment, these are the
            tokens of its reply to the first response; for an agent, the most that any call after
            the first added. 0 if there was no such reply or call.
        differs: Whether a second episode of the same row started with other messages.
        rewards: Whether the environment can give rewards.
    """

    opening: int
    text: str
    observation: int
    differs: bool
    rewards: bool = True


@dataclass(eq=False)
class _Episode:
    """An open episode: the runner of its environment object, and the lock held during its calls."""

    runner: EnvironmentRunner
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class EnvironmentWorker:
    """Runs the open episodes of one environment class, each with a separate environment object.

    Callers name an episode by a key that they chose.
    """

    def __init__(self, config: RunConfig, model_path: str) -> None:
        """Load the environment class and the tokenizer of `model_path`, and start the threads.

        Raises:
            UserError: The class cannot be loaded or built, or does not match the settings.
        """
        from megatron_async.tasks.text_task import load_tokenizer, stop_tokens

        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self._settings = config.environment
        self._episode = config.episode
        self._build = environment_builder(self._settings.name, self._settings.arguments)
        tokenizer = load_tokenizer(model_path)
        stops = stop_tokens(model_path, tokenizer)
        tools = tools_of(built(self._build, self._settings.name), self._settings.name)
        schemas = described(tools, self._settings.name)
        parser = self._episode.tool_parser
        self.conversation = Conversation(
            config.task,
            tokenizer,
            stops,
            schemas,
            calls=bool(parser),
            vocabulary=vocabulary_of(model_path),
        )
        self.reader: CallReader | None = None
        if parser:
            self.reader = CallReader(parser, schemas)
            # This also imports the parser. The worker limits its memory after this, so the memory
            # of the import does not count toward the limit.
            self.reader.check()
        self._stops = frozenset(stops)
        self._threads = Threads(self._episode.threads)
        self._episodes: dict[str, _Episode] = {}

    async def begin(
        self, key: str, payload: Mapping[str, Any], _room: int | None = None
    ) -> EpisodeStart:
        """Build an environment object for new episode `key`, and return the first turn's input.

        Args:
            key: Key of the new episode.
            payload: Payload of the task's prompt, from which the environment's row is made.
            _room: Not used; it is the `input_budget` of agents' workers.

        Raises:
            EnvironmentFault: The environment failed.
        """
        async with self._new(key) as runner:
            messages = await runner.reset(row_of(payload), _prompt(payload))
            token_ids = await runner.read(lambda: self.conversation.opening(messages))
            return EpisodeStart(messages, token_ids, await runner.state())

    @asynccontextmanager
    async def _new(self, key: str) -> AsyncIterator[EnvironmentRunner]:
        """Open episode `key`, and hold its lock while the block starts or restores its environment.

        A concurrent `forget` of the episode waits until the block ends.
        """
        episode = self._episodes[key] = _Episode(self._runner())
        async with episode.lock:
            with self._noticing_hangs():
                yield episode.runner

    async def step(
        self,
        key: str,
        answer_ids: Sequence[int],
        turn: int,
        input_budget: int,
        last: bool,
        _logprobs: Sequence[float] = (),
    ) -> StepResult:
        """Send the policy's response in turn `turn` to the environment; return its reply.

        The reply has the next turn's input. The episode ends instead if the environment is done, or
        with the reason `length` at a limit.

        Args:
            key: Key of the episode.
            answer_ids: Tokens of the policy's response.
            turn: Number of the turn that has the response.
            input_budget: Largest number of tokens that the next turn's input may add; a longer
                input ends the episode.
            last: Whether the episode ends after this turn even if the environment is not done,
                since a limit is reached.
            _logprobs: Not used; agents' workers have this parameter.

        Raises:
            EpisodeUnknown: This worker does not have the episode.
            EnvironmentFault: The environment failed.
        """
        episode = self._episodes.get(key)
        if episode is None:
            raise EpisodeUnknown(f"episode {key} is not open in this worker process")
        ended = bool(len(answer_ids)) and answer_ids[-1] in self._stops
        text = self.conversation.answer_text(answer_ids)
        answer = Answer(text, truncated=not ended, turn=turn)
        async with episode.lock:
            with self._noticing_hangs():
                reply = await episode.runner.step(answer, self.reader)
                stepped = await self._step_result(episode.runner, answer, reply, input_budget, last)
        if stepped.ended is None:
            return stepped
        return replace(stepped, fault=await self.forget(key))

    async def _step_result(
        self, runner: EnvironmentRunner, answer: Answer, reply: Reply, input_budget: int, last: bool
    ) -> StepResult:
        """Convert the environment's `reply` to a StepResult: the next turn's input, or the end.

        `input_budget` and `last` have the same meaning as in `step`. If the episode ends, the
        environment's final reward is added to the reward of the turn.
        """
        stored = self._stored_answer(answer)
        if not reply.done and not last:
            token_ids = await runner.read(
                lambda: self.conversation.next(reply.messages, ended=not answer.truncated)
            )
            if len(token_ids) <= input_budget:
                whole = with_parts(stored, reply.parts)
                new = (reply.messages, token_ids, await runner.state())
                return StepResult(whole, reply.reward, *new, parent=answer.turn)
        ended = "stop" if reply.done else "length"
        final, parts = await runner.final_reward()
        return StepResult(with_parts(stored, reply.parts, parts), reply.reward + final, ended=ended)

    def _stored_answer(self, answer: Answer) -> dict[str, Any]:
        """Return a response as it is stored: the text that the policy wrote, and its tool calls."""
        calls = () if self.reader is None else self.reader.read(answer.text)[1]
        named = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        return {"text": answer.text, "truncated": answer.truncated, "tool_calls": named}

    async def restore(self, key: str, payload: Mapping[str, Any], turns: Sequence[Turn]) -> None:
        """Restore episode `key`: build an environment that is in the state after the stored turns.

        The environment is restored from the last turn's snapshot if there is one, or else by
        sending it the stored responses again.

        Args:
            key: Key of the restored episode.
            payload: Payload of the task's prompt, from which the environment's row is made.
            turns: Stored turns; the environment has not received the response of the last turn.

        Raises:
            ReplayDiffers: The environment sends other messages than those stored.
            EnvironmentFault: The environment failed.
        """
        state = turns[-1].state
        async with self._new(key) as runner:
            if state is not None:
                await runner.restore(state, row_of(payload))
            else:
                await self._replay(runner, payload, turns)

    async def _replay(
        self, runner: EnvironmentRunner, payload: Mapping[str, Any], turns: Sequence[Turn]
    ) -> None:
        """Send the stored responses of `turns`, except the last, to a new environment.

        Raises:
            ReplayDiffers: The environment sends other messages than those stored.
            EnvironmentFault: The environment failed.
        """
        messages = await runner.reset(row_of(payload), _prompt(payload))
        for number, turn in enumerate(turns):
            if list(messages) != list(turn.messages):
                raise ReplayDiffers(
                    f"{self._settings.name} sent other messages when it was replayed, in turn "
                    f"{number}: {list(messages)!r:.300}; the stored ones are "
                    f"{list(turn.messages)!r:.300}"
                )
            if number + 1 < len(turns):
                assert turn.answer is not None
                text, cut = str(turn.answer["text"]), bool(turn.answer["truncated"])
                answer = Answer(text, truncated=cut, turn=number)
                messages = (await runner.step(answer, self.reader)).messages

    async def trial_run(self, payload: Mapping[str, Any]) -> TrialEpisode:
        """Play the first turn of an episode twice, with a made-up response; return measurements.

        Args:
            payload: Payload of the task's prompt, from which the environment's row is made.

        Raises:
            EnvironmentFault: The environment failed.
            UserError: The model's chat template cannot render the conversation, or
                `episode.tool_parser` is not set for a class of tools.
        """
        openings, observed, rewards = [], 0, False
        for _ in range(2):
            runner = self._runner()
            openings.append(await runner.reset(row_of(payload), _prompt(payload)))
            if runner.tools and self.reader is None:
                raise UserError(
                    f"environment.name is {self._settings.name!r}, a class of tools, but "
                    "episode.tool_parser is not set. Set it to the format in which the model "
                    "calls tools, such as qwen25 or llama3."
                )
            await runner.state()
            reply = await runner.step(Answer(_TRIAL_RESPONSE), self.reader)
            roles = {"tool"} if runner.tools else {m["role"] for m in reply.messages} or {"user"}
            self.conversation.check(openings[0], roles)
            if reply.messages:
                observed = len(self.conversation.next(reply.messages, ended=False))
            await runner.final_reward()
            rewards = runner.rewards
            await runner.close()
        opening = self.conversation.opening(openings[0])
        text = self.conversation.decoded(opening)
        differs = openings[0] != openings[1]
        return TrialEpisode(len(opening), text, observed, differs=differs, rewards=rewards)

    async def forget(self, key: str) -> str | None:
        """Close episode `key`, if it is open; wait for its running call before closing.

        Returns:
            The error message from closing the environment; None if there was no error.
        """
        episode = self._episodes.pop(key, None)
        if episode is not None:
            async with episode.lock:
                try:
                    with self._noticing_hangs():
                        await episode.runner.close()
                except EnvironmentFault as fault:
                    return str(fault)
        return None

    def _runner(self) -> EnvironmentRunner:
        """Create the runner of a new episode's environment object."""
        name, seconds = self._settings.name, self._episode.step_seconds
        return EnvironmentRunner(self._build, name, self._threads, seconds)

    @contextmanager
    def _noticing_hangs(self) -> Iterator[None]:
        """If a call in this block hangs, end the process once half of the worker's threads hang.

        The caller of the block still gets the error of the call, since the process ends a moment
        later.
        """
        try:
            yield
        except EnvironmentHung:
            if self._threads.hung >= max(1, self._episode.threads // 2):
                # Wait before ending the process, so that the error is sent to the caller first.
                asyncio.get_running_loop().call_later(_EXIT_DELAY_SECONDS, self._end)
            raise

    def _end(self) -> None:
        """Do nothing, because other code may run in this process.

        The subclass `EnvironmentProcess` has a dedicated process, and ends it here.
        """


class ProcessGuard:
    """Memory limit and watchdog of a process that runs one worker and nothing else."""

    def __init__(self, settings: EpisodeConfig) -> None:
        """Limit the memory of this process by `episode.memory_mib`; `watch` starts the watchdog."""
        # Copy the descriptor of stderr, because the user's code may close stderr.
        self._log = os.fdopen(os.dup(2), "w")
        self._blocked_seconds = max(_MIN_BLOCKED_SECONDS, settings.step_seconds)
        self._watch: asyncio.Task[None] | None = None
        _limit_memory(settings.memory_mib)

    def watch(self) -> None:
        """Start a watchdog, once, that ends the process if its event loop is blocked.

        The limit is `episode.step_seconds`, but at least `_MIN_BLOCKED_SECONDS`. Before the process
        ends, the stacks of all threads are written to stderr.
        """
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._watch_loop())

    async def _watch_loop(self) -> None:
        """Keep restarting a timer that ends the process if the event loop is blocked."""
        while True:
            faulthandler.dump_traceback_later(self._blocked_seconds, exit=True, file=self._log)
            await asyncio.sleep(self._blocked_seconds / 8)


class EnvironmentProcess(EnvironmentWorker):
    """Environment worker in a dedicated process: limits its memory, and ends it when it is stuck.

    The process is stuck when its event loop is blocked, or calls hang in half of its threads.
    """

    def __init__(self, config: RunConfig, model_path: str) -> None:
        super().__init__(config, model_path)
        self._process = ProcessGuard(self._episode)

    def _runner(self) -> EnvironmentRunner:
        self._process.watch()
        return super()._runner()

    def _end(self) -> None:
        os._exit(1)


def row_of(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of the task's row from a prompt's payload, with their original values.

    They include `prompt` (a text, or messages if the row is a chat) and `answer` (the reference
    answer), if the row has them.
    """
    prompt = payload["messages"] if payload.get("chat") else payload.get("question")
    named = {"prompt": prompt, "answer": payload.get("answer")}
    return {**{name: value for name, value in named.items() if value}, **payload["metadata"]}


def _prompt(payload: Mapping[str, Any]) -> Sequence[Message]:
    """Return the row's prompt as messages; empty if the row has no prompt."""
    messages: Sequence[Message] = payload.get("messages", ())
    return messages


def with_parts(stored: dict[str, Any], *parts: Mapping[str, float]) -> dict[str, Any]:
    """Return a stored response with named numbers for metrics added as `parts`, if there are any.

    If mappings in `parts` have the same name, the last one counts.
    """
    merged = {name: value for mapping in parts for name, value in mapping.items()}
    return {**stored, "parts": merged} if merged else stored


def _limit_memory(memory_mib: int) -> None:
    """Limit the address space of this process to `memory_mib` MiB more than it has now.

    The limit is relative because libraries reserve much more address space than they use.
    """
    now, most = psutil.Process().memory_info().vms, resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = now + (memory_mib << 20)
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))

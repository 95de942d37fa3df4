"""A process that holds many episodes: their environments, and the tokens of their turns.

Invariants
- Calls of one episode run one after the other; whoever asks a second time before the first reply
  waits. An episode is here from its beginning until it has ended, is forgotten, or the worker dies;
  one that fails, in its beginning too, until it is forgotten.
- A step is made once for each call that reaches it. What was asked of a worker that has died, or
  whose reply was lost, is asked of a restored environment, never of the same one again.
- A process in which calls hang in half of its threads, or nothing at all goes on, ends itself: a
  thread cannot be ended alone.
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

_EXIT_SECONDS: Final = 0.2
_STILL_SECONDS: Final = 5.0  # for which nothing goes on at least, before a process ends itself
_MADE_UP: Final = "Yes."

Messages = tuple[Mapping[str, Any], ...]


class EpisodeUnknown(ComponentFailure):
    """This worker does not hold the episode."""


class ReplayDiffers(ComponentFailure):
    """A replayed environment does not do what it did, or cannot be restored."""


@dataclass(frozen=True, eq=False)
class EpisodeStart:
    """The first turn's input; `messages` are those of the environment and of the row.

    `notices`: sentences that a person should read.
    """

    messages: Messages
    token_ids: IntArray
    state: bytes | None
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class StepResult:
    """A reply to an answer: what the next turn's input adds, or `ended` (`stop` or `length`).

    `answer`: what the environment got, and named numbers for metrics. `fault`: what was wrong with
    its end, which changes nothing. `parent`: the turn that the next one follows. `left`: turns that
    are not to be trained. `counts`, `notices`: for metrics, for a person.
    """

    answer: Mapping[str, Any]
    reward: float
    messages: Messages = ()
    token_ids: IntArray | None = None
    state: bytes | None = None
    ended: str | None = None
    fault: str | None = None
    parent: int | None = None
    left: tuple[int, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrialEpisode:
    """A trial episode.

    Attributes:
        opening: tokens of the opening.
        text: the opening as text.
        observation: tokens of the first observation.
        differs: whether a second episode of the same row opened otherwise.
        rewards: whether the environment can give rewards.
    """

    opening: int
    text: str
    observation: int
    differs: bool
    rewards: bool = True


@dataclass(eq=False)
class _Episode:
    runner: EnvironmentRunner
    calls: asyncio.Lock = field(default_factory=asyncio.Lock)


class EnvironmentWorker:
    """Episodes of one environment class, by the keys that callers give them."""

    def __init__(self, config: RunConfig, model_path: str) -> None:
        """`model_path`: of the tokenizer. Raises UserError if code and settings do not match."""
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
            self.reader.check()  # which imports what reads calls, before memory is limited
        self._stops = frozenset(stops)
        self._threads = Threads(self._episode.threads)
        self._episodes: dict[str, _Episode] = {}

    async def begin(
        self, key: str, payload: Mapping[str, Any], _room: int | None = None
    ) -> EpisodeStart:
        """Begin an episode from a prompt's payload. Raises EnvironmentFault."""
        async with self._new(key) as runner:
            messages = await runner.reset(row_of(payload), _prompt(payload))
            token_ids = await runner.read(lambda: self.conversation.opening(messages))
            return EpisodeStart(messages, token_ids, await runner.state())

    @asynccontextmanager
    async def _new(self, key: str) -> AsyncIterator[EnvironmentRunner]:
        """An episode that is begun inside; whoever forgets it meanwhile waits for that."""
        episode = self._episodes[key] = _Episode(self._runner())
        async with episode.calls:
            with self._noticing_hangs():
                yield episode.runner

    async def step(
        self,
        key: str,
        answer_ids: Sequence[int],
        turn: int,
        room: int,
        last: bool,
        _logprobs: Sequence[float] = (),
    ) -> StepResult:
        """Hand an answer to the environment. Raises EpisodeUnknown, EnvironmentFault.

        `room`: tokens that the next turn's input may add; more, and after the `last` turn, the
        episode ends as `length`.
        """
        episode = self._episodes.get(key)
        if episode is None:
            raise EpisodeUnknown(f"episode {key} is not held here")
        ended = bool(len(answer_ids)) and answer_ids[-1] in self._stops
        text = self.conversation.answer_text(answer_ids)
        answer = Answer(text, truncated=not ended, turn=turn)
        async with episode.calls:
            with self._noticing_hangs():
                reply = await episode.runner.step(answer, self.reader)
                stepped = await self._stepped(episode.runner, answer, reply, room, last)
        if stepped.ended is None:
            return stepped
        return replace(stepped, fault=await self.forget(key))

    async def _stepped(
        self, runner: EnvironmentRunner, answer: Answer, reply: Reply, room: int, last: bool
    ) -> StepResult:
        seen = self._seen(answer)
        if not reply.done and not last:
            token_ids = await runner.read(
                lambda: self.conversation.next(reply.messages, ended=not answer.truncated)
            )
            if len(token_ids) <= room:
                given = with_parts(seen, reply.parts)
                new = (reply.messages, token_ids, await runner.state())
                return StepResult(given, reply.reward, *new, parent=answer.turn)
        ended = "stop" if reply.done else "length"
        final, parts = await runner.final_reward()
        return StepResult(with_parts(seen, reply.parts, parts), reply.reward + final, ended=ended)

    def _seen(self, answer: Answer) -> dict[str, Any]:
        """The answer for who reads the store: the text as the policy wrote it, calls in it."""
        calls = () if self.reader is None else self.reader.read(answer.text)[1]
        shown = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        return {"text": answer.text, "truncated": answer.truncated, "tool_calls": shown}

    async def restore(self, key: str, payload: Mapping[str, Any], turns: Sequence[Turn]) -> None:
        """Have an environment that has seen the answers of all but the last of these turns.

        From its newest snapshot, or by giving it the answers again. Raises ReplayDiffers,
        EnvironmentFault.
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
        messages = await runner.reset(row_of(payload), _prompt(payload))
        for number, turn in enumerate(turns):
            if list(messages) != list(turn.messages):
                raise ReplayDiffers(
                    f"{self._settings.name} played again does otherwise in turn {number}: "
                    f"{list(messages)!r:.300}, and it was {list(turn.messages)!r:.300}"
                )
            if number + 1 < len(turns):
                assert turn.answer is not None
                text, cut = str(turn.answer["text"]), bool(turn.answer["truncated"])
                answer = Answer(text, truncated=cut, turn=number)
                messages = (await runner.step(answer, self.reader)).messages

    async def trial_run(self, payload: Mapping[str, Any]) -> TrialEpisode:
        """Play the first turns of a row twice. Raises EnvironmentFault, UserError."""
        openings, observed, rewards = [], 0, False
        for _ in range(2):
            runner = self._runner()
            openings.append(await runner.reset(row_of(payload), _prompt(payload)))
            if runner.tools and self.reader is None:
                raise UserError(
                    f"environment.name is {self._settings.name!r}, a class of tools, and "
                    "episode.tool_parser is not set: name the form in which the model calls "
                    "them"
                )
            await runner.state()
            reply = await runner.step(Answer(_MADE_UP), self.reader)
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
        """Close an episode, if it is held, after the call that runs; what was wrong with that."""
        episode = self._episodes.pop(key, None)
        if episode is not None:
            async with episode.calls:
                try:
                    with self._noticing_hangs():
                        await episode.runner.close()
                except EnvironmentFault as fault:
                    return str(fault)
        return None

    def _runner(self) -> EnvironmentRunner:
        name, seconds = self._settings.name, self._episode.step_seconds
        return EnvironmentRunner(self._build, name, self._threads, seconds)

    @contextmanager
    def _noticing_hangs(self) -> Iterator[None]:
        """End with too many threads that do not come back."""
        try:
            yield
        except EnvironmentHung:
            if self._threads.hung >= max(1, self._episode.threads // 2):
                # The reply goes out first.
                asyncio.get_running_loop().call_later(_EXIT_SECONDS, self._end)
            raise

    def _end(self) -> None:
        """End, since nothing here can go on."""


class OwnProcess:
    """The process that a worker has for itself; its memory is limited from now on."""

    def __init__(self, settings: EpisodeConfig) -> None:
        self._log = os.fdopen(os.dup(2), "w")  # the user's code may close the other
        self._still_seconds = max(_STILL_SECONDS, settings.step_seconds)
        self._watch: asyncio.Task[None] | None = None
        _limit_memory(settings.memory_mib)

    def watch(self) -> None:
        """Log all threads and end the process when its event loop stands still."""
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._watch_loop())

    async def _watch_loop(self) -> None:
        while True:
            faulthandler.dump_traceback_later(self._still_seconds, exit=True, file=self._log)
            await asyncio.sleep(self._still_seconds / 8)


class EnvironmentProcess(EnvironmentWorker):
    """A worker that has its process for itself, and may end it."""

    def __init__(self, config: RunConfig, model_path: str) -> None:
        super().__init__(config, model_path)
        self._process = OwnProcess(self._episode)

    def _runner(self) -> EnvironmentRunner:
        self._process.watch()
        return super()._runner()

    def _end(self) -> None:
        os._exit(1)


def row_of(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of the row, as they are there: a prompt may be a text or messages."""
    prompt = payload["messages"] if payload.get("chat") else payload.get("question")
    named = {"prompt": prompt, "answer": payload.get("answer")}
    return {**{name: found for name, found in named.items() if found}, **payload["metadata"]}


def _prompt(payload: Mapping[str, Any]) -> Sequence[Message]:
    messages: Sequence[Message] = payload.get("messages", ())
    return messages


def with_parts(seen: dict[str, Any], *parts: Mapping[str, float]) -> dict[str, Any]:
    """An answer with the named numbers that came of it."""
    together = {name: value for some in parts for name, value in some.items()}
    return {**seen, "parts": together} if together else seen


def _limit_memory(memory_mib: int) -> None:
    """Let the address space grow by so much: libraries have reserved far more than they use."""
    now, most = psutil.Process().memory_info().vms, resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = now + (memory_mib << 20)
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))

"""Agents as a worker plays them: programs, their calls, and the tokens of their turns.

The rollout side calls it as it calls environments (`worker.py`): `begin` returns with the first
call of a program, `step` gives that call its answer and returns with the next one.

Invariants
- A key is one attempt's, made when its program starts, taken back when that ends or is forgotten;
  what waits for an answer then is refused. No sentence about a program holds its key.
- A call that cannot be a turn (too long for an engine, one too many, a template that fails) is
  refused to the program, which may go on; only what it returns or raises ends its episode.
- After a restoring a program runs from its beginning: what it asks again gets the stored answers.
  Turns that the program which ended did not get are `left`, and are not trained.
"""

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_async.config import RunConfig
from megatron_async.config.files import vocabulary_of
from megatron_async.environments.calls import AgentCalls, Call, beginning_of
from megatron_async.environments.chat import TOO_LONG, CallRefused, ChatAnswer, ChatCall
from megatron_async.environments.chat_codec import ChatCodecs
from megatron_async.environments.gateway import LOOPBACK, Gateway
from megatron_async.environments.interface import EnvironmentFault, number_of
from megatron_async.environments.matching import Match
from megatron_async.environments.programs import program_of
from megatron_async.environments.worker import (
    EpisodeStart,
    EpisodeUnknown,
    OwnProcess,
    StepResult,
    TrialEpisode,
    row_of,
    with_parts,
)
from megatron_async.trajectory.types import IntArray, Turn

_MADE_UP = "Yes."
_REHEARSAL = "rehearsal"
_ASKED_ALWAYS = 3


@dataclass(eq=False)
class _Attempt:
    """A program that runs, and its calls. `taken`: tokens up to the end of each turn."""

    number: str
    calls: AgentCalls
    key: str
    program: "asyncio.Task[Any]"
    taken: list[int] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    refused: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class AgentWorker:
    """Episodes of one agent, by the keys that callers give them."""

    def __init__(self, config: RunConfig, model_path: str) -> None:
        """`model_path`: of the tokenizer. Raises UserError if code and settings do not match."""
        from megatron_async.tasks.text_task import load_tokenizer, stop_tokens

        _pass_proxies()
        self._settings = config.agent
        self._episode = config.episode
        self._scored = config.scores
        tokenizer = load_tokenizer(model_path)
        stops = stop_tokens(model_path, tokenizer)
        self._texts = ChatCodecs(
            config.task,
            tokenizer,
            stops,
            self._episode.tool_parser,
            vocabulary_of(model_path),
        )
        self._stops = frozenset(stops)
        threads = ThreadPoolExecutor(self._episode.threads, "agent")
        self._program = program_of(self._settings, threads, self._episode.memory_mib)
        self._gateway = Gateway(config.sampling)
        self._attempts: dict[str, _Attempt] = {}

    async def begin(
        self, key: str, payload: Mapping[str, Any], room: int | None = None
    ) -> EpisodeStart:
        """Start a program; its first call, of `room` tokens at most, is the first turn.

        Raises EnvironmentFault.
        """
        attempt = await self._start(key, payload, ())
        async with attempt.lock:
            found = await self._next(attempt, room, last=False)
            if found is None:
                self._returned(attempt)
                refused = attempt.refused
                raise self._without_call(f" that can be a turn: {refused}" if refused else "")
            match, token_ids, state = found
            return EpisodeStart(match.new, token_ids, state, attempt.calls.take_notices())

    async def step(
        self,
        key: str,
        answer_ids: Sequence[int],
        turn: int,
        room: int,
        last: bool,
        logprobs: Sequence[float] = (),
    ) -> StepResult:
        """Answer the call of a turn; the next call is the next turn. Raises EpisodeUnknown,
        EnvironmentFault.

        `room`: tokens that a call which continues this turn may add.
        """
        attempt = self._attempts.get(key)
        if attempt is None:
            raise EpisodeUnknown(f"episode {key} is not held here")
        async with attempt.lock:
            stored = self._answer(attempt, turn, answer_ids, logprobs)
            found = await self._next(attempt, attempt.taken[turn] + room, last=last)
            counts, notices = attempt.calls.take_counts(), attempt.calls.take_notices()
            if found is not None:
                match, token_ids, state = found
                news = (match.new, token_ids, state)
                stepped = StepResult(stored, 0.0, *news, parent=match.parent)
                return replace(stepped, counts=counts, notices=notices)
            reward, parts = self._returned(attempt)
            left = attempt.calls.left()
            if len(left) == len(attempt.calls.turns):  # it ran again, and asked for none of them
                raise self._without_call(" whose answer it took")
            notices = (*notices, *self._needless_forks(attempt))
        await self.forget(key)
        return StepResult(
            with_parts(stored, parts),
            reward,
            ended="length" if attempt.refused else "stop",
            counts={**counts, "turns_abandoned": len(left)},
            notices=notices,
            left=left,
        )

    async def restore(self, key: str, payload: Mapping[str, Any], turns: Sequence[Turn]) -> None:
        """Run the program of these turns again; all but the last are answered. EnvironmentFault."""
        attempt = await self._start(key, payload, turns)
        async with attempt.lock:
            with self._limit():
                await attempt.calls.until_asked(turns[-1].number, self._episode.step_seconds)

    async def trial_run(self, payload: Mapping[str, Any]) -> TrialEpisode:
        """Play an episode with made-up answers. Raises EnvironmentFault, UserError."""
        conversation = self._texts.of("").conversation
        conversation.check([{"role": "user", "content": _MADE_UP}], {"user"})
        answer = conversation.answer_ids(_MADE_UP)
        opened = await self.begin(_REHEARSAL, payload)
        longest, turn = 0, 0
        try:
            while True:
                last = turn + 1 >= self._episode.max_turns
                stepped = await self.step(_REHEARSAL, answer, turn, 1 << 31, last)
                if stepped.token_ids is None:
                    break
                longest, turn = max(longest, len(stepped.token_ids)), turn + 1
        finally:
            await self.forget(_REHEARSAL)
        text = conversation.decoded(opened.token_ids)
        return TrialEpisode(len(opened.token_ids), text, longest, differs=False)

    async def forget(self, key: str) -> str | None:
        """End a program, if it is held."""
        attempt = self._attempts.pop(key, None)
        if attempt is not None:
            self._gateway.end(attempt.key)
            attempt.program.cancel()
            attempt.calls.end()  # a thread that waits for an answer has no other end
            await asyncio.wait([attempt.program], timeout=self._episode.step_seconds)
        return None

    # ------------------------------------------------------------ one attempt

    async def _start(self, key: str, payload: Mapping[str, Any], turns: Sequence[Turn]) -> _Attempt:
        url = await self._gateway.start()
        calls = AgentCalls(lambda: attempt.program.done())
        secret = self._gateway.open(calls)
        row = row_of({**payload, "chat": False})  # messages have a name of their own here
        row["messages"] = list(payload.get("messages", ()))
        program = asyncio.ensure_future(self._program(url, secret, row))
        number = key.split(".")[1] if "." in key else key
        attempt = self._attempts[key] = _Attempt(number, calls, secret, program)

        def ended(done: asyncio.Task[Any]) -> None:
            if not done.cancelled():
                done.exception()  # whoever forgets it does not ask for that
            calls.news()

        program.add_done_callback(ended)
        for turn in turns:
            self._store(attempt, turns, turn)
        return attempt

    def _store(self, attempt: _Attempt, turns: Sequence[Turn], turn: Turn) -> None:
        """Know a stored turn, and its answer if it is not the newest."""
        newest = turn is turns[-1]
        about = json.loads(turn.state or b"{}") if newest else {}
        asked = ChatCall(
            beginning_of(turns, turn),
            calls_tools=about.get("calls_tools", True),
            logprobs=about.get("logprobs", False),
            parallel_calls=about.get("parallel_calls", True),
        )
        attempt.calls.store(turn, Call(asked))
        if newest:
            attempt.taken.append(about.get("tokens", 0))
            attempt.ended.append(False)
            return
        assert turn.answer is not None
        answer = self._read(attempt, turn.number, turn.answer)
        attempt.taken.append(sum(answer.tokens))
        attempt.ended.append(not answer.truncated)
        attempt.calls.reply(turn.number, answer)

    def _answer(
        self, attempt: _Attempt, turn: int, answer_ids: Sequence[int], logprobs: Sequence[float]
    ) -> dict[str, Any]:
        """Give a turn's answer to its call; returns it as it is stored."""
        asked = attempt.calls.turns[turn].asked
        attempt.ended[turn] = bool(len(answer_ids)) and answer_ids[-1] in self._stops
        stored = self._texts.of(asked.tools).stored(
            asked, answer_ids, logprobs, attempt.taken[turn], ended=attempt.ended[turn]
        )
        attempt.taken[turn] += len(answer_ids)
        attempt.calls.reply(turn, self._read(attempt, turn, stored))
        return stored

    def _read(self, attempt: _Attempt, turn: int, stored: Mapping[str, Any]) -> ChatAnswer:
        """A stored answer as the program gets it."""
        texts = self._texts.of(attempt.calls.turns[turn].asked.tools)
        return texts.answer(f"{attempt.number}-{turn}", stored)

    async def _next(
        self, attempt: _Attempt, most: int | None, *, last: bool
    ) -> tuple[Match, IntArray, bytes] | None:
        """The next call as a turn: what it continues, its tokens, and what is kept of it.

        `most`: tokens that its input may have. None: the program has ended, or has had its time
        since a call that was too long or too late.
        """
        calls, seconds, full = attempt.calls, self._episode.step_seconds, False
        until = time.monotonic() + seconds
        while True:
            left = until - time.monotonic() if full else seconds
            call = None
            with suppress(TimeoutError) if full else self._limit():
                call = await calls.next(left) if left > 0 else None
            if call is None:
                return None
            match = calls.match(call)
            try:
                if last:
                    raise CallRefused(
                        f"this episode has had its {self._episode.max_turns} answers "
                        "(episode.max_turns) or its time (episode.seconds)",
                        "messages",
                        code=TOO_LONG,
                    )
                token_ids = self._render(attempt, call, match)
                before = 0 if match.parent is None else attempt.taken[match.parent]
                if most is not None and before + len(token_ids) > most:
                    raise CallRefused(
                        f"the conversation has {before + len(token_ids)} tokens; with room for an "
                        f"answer an engine takes {most}",
                        "messages",
                        code=TOO_LONG,
                    )
            except CallRefused as refused:
                if refused.code:
                    attempt.refused, full = str(refused), True
                calls.refuse(call, refused)
                continue
            calls.begin(call, match)
            attempt.taken.append(before + len(token_ids))
            attempt.ended.append(False)
            kept = {"tokens": attempt.taken[-1], "logprobs": call.asked.logprobs}
            kept["calls_tools"] = call.asked.calls_tools
            kept["parallel_calls"] = call.asked.parallel_calls
            return match, token_ids, json.dumps(kept).encode()

    def _render(self, attempt: _Attempt, call: Call, match: Match) -> IntArray:
        texts = self._texts.of(call.asked.tools)
        if match.parent is None:
            return texts.opening(match.new)
        return texts.next(match.new, ended=attempt.ended[match.parent])

    def _returned(self, attempt: _Attempt) -> tuple[float, Mapping[str, float]]:
        """The reward of a program that has ended, or had its time. Raises EnvironmentFault."""
        shown = self._settings.display_name
        if not attempt.program.done():
            return 0.0, {}
        try:
            returned = attempt.program.result()
            if returned is None and not self._scored:
                what = "printed nothing, or null," if self._settings.command else "returned None,"
                raise EnvironmentFault(
                    f"{shown} {what} and there is no `reward` to score the conversation: give a "
                    "number or set `reward`"
                )
            return number_of(0.0 if returned is None else returned, shown)
        except asyncio.CancelledError:
            raise EnvironmentFault(f"{shown} has canceled itself") from None
        except EnvironmentFault as fault:
            if attempt.refused:  # most programs have no other way to end at a full context
                return 0.0, {}
            raise EnvironmentFault(str(fault).replace(attempt.key, "(key)")) from None

    def _without_call(self, more: str) -> EnvironmentFault:
        return EnvironmentFault(
            f"{self._settings.display_name} ended without a call of the policy{more}"
        )

    def _needless_forks(self, attempt: _Attempt) -> tuple[str, ...]:
        """A sentence about a program of which every call forks at a message that it has changed."""
        forks = attempt.calls.forks
        changed = [fork for fork in forks if fork.why in ("answer", "message", "tools")]
        asked = len(attempt.calls.turns)
        if asked < _ASKED_ALWAYS or len(changed) < asked - 1:
            return ()
        first = changed[0]
        return (
            f"each of the {asked} calls of an agent begins a branch of its own; the first that "
            f"differs is message {first.at}: {first.now:.200}, and it was {first.was:.200}",
        )

    @contextmanager
    def _limit(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise EnvironmentFault(
                f"{self._settings.display_name} made no call and did not end for "
                f"{self._episode.step_seconds:g} s (episode.step_seconds)"
            ) from error


def _pass_proxies() -> None:
    """Let clients here, and in what is started here, call the gateway without the site's proxy."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    if given != "*" and LOOPBACK not in given.split(","):
        passed = f"{given},{LOOPBACK}" if given else LOOPBACK
        os.environ.update(no_proxy=passed, NO_PROXY=passed)


class AgentProcess(AgentWorker):
    """A worker of agents that has its process for itself."""

    def __init__(self, config: RunConfig, model_path: str) -> None:
        super().__init__(config, model_path)
        self._process = OwnProcess(self._episode)

    async def _start(self, key: str, payload: Mapping[str, Any], turns: Sequence[Turn]) -> _Attempt:
        self._process.watch()
        return await super()._start(key, payload, turns)

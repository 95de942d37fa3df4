"""Runs agents' episodes in a worker process: their programs, calls, and the tokens of their turns.

An agent is a user's program (a function or a command) that calls the policy through the OpenAI chat
API. `AgentWorker` has the same methods as `EnvironmentWorker` (`worker.py`): `begin` starts a
program and returns its first call as the first turn; `step` sends the policy's response to that
call and returns the next call as the next turn.

Invariants
- An attempt is one execution of a program for an episode. Each attempt has a separate API key,
  which is created when the program starts and revoked when its episode ends or is forgotten. Calls
  that still wait for a response at that moment are refused. No error message about a program
  contains its key.
- A call that cannot become a turn (too long for an engine, over a limit, or the chat template
  fails) is refused, and the program may continue. An episode ends when its program returns a value
  or raises an exception, or when the program does neither in time (`episode.step_seconds`).
- To restore an episode, its program is run again from its start. A call that it repeats gets the
  stored response. Stored turns whose calls the program does not repeat are listed in the field
  `abandoned` of the last `StepResult`, and are not trained on.
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
    ProcessGuard,
    StepResult,
    TrialEpisode,
    row_of,
    with_parts,
)
from megatron_async.trajectory.types import IntArray, Turn

_TRIAL_RESPONSE = "Yes."
_TRIAL_KEY = "trial"
_MIN_CALLS_TO_WARN = 3


@dataclass(eq=False)
class _Attempt:
    """One execution of an agent's program for an episode, with its calls to the policy.

    Attributes:
        number: Number of the episode, from which response IDs are made.
        calls: The program's calls and the turns that they became.
        key: API key that the program uses.
        program: Task that runs the program.
        branch_tokens: For each turn, number of tokens of its conversation from the start up to and
            including the turn. The turn's response is included once it is complete.
        stopped: For each turn, whether its response ended with a stop token.
        limit_error: Error sent for the last call that was too long or over a limit; empty if there
            was no such call.
        lock: Held during a call to the worker for this episode.
    """

    number: str
    calls: AgentCalls
    key: str
    program: "asyncio.Task[Any]"
    branch_tokens: list[int] = field(default_factory=list)
    stopped: list[bool] = field(default_factory=list)
    limit_error: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class AgentWorker:
    """Runs the open episodes of one agent, each in a separate execution of the agent's program.

    Callers name an episode by a key that they chose, which is a parameter of most methods. It is
    not the API key of the program.
    """

    def __init__(self, config: RunConfig, model_path: str) -> None:
        """Load the tokenizer of `model_path` and the agent's program.

        Raises:
            UserError: The program cannot be loaded, or does not match the settings.
        """
        from megatron_async.tasks.text_task import load_tokenizer, stop_tokens

        _bypass_proxy()
        self._settings = config.agent
        self._episode = config.episode
        self._scored = config.scores
        tokenizer = load_tokenizer(model_path)
        stops = stop_tokens(model_path, tokenizer)
        self._codecs = ChatCodecs(
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
        self, key: str, payload: Mapping[str, Any], input_budget: int | None = None
    ) -> EpisodeStart:
        """Start the program of a new episode; return its first call as the input of the first turn.

        Args:
            key: Key of the new episode.
            payload: Payload of the task's prompt, from which the program's row is made.
            input_budget: Largest number of tokens of the first call; None for no limit.

        Raises:
            EnvironmentFault: The program failed, timed out, or ended without a call that can become
                a turn.
        """
        attempt = await self._start(key, payload, ())
        async with attempt.lock:
            found = await self._next_turn(attempt, input_budget, last=False)
            if found is None:
                self._final_reward(attempt)
                refused = attempt.limit_error
                raise self._no_call_fault(f" that can be a turn: {refused}" if refused else "")
            match, token_ids, state = found
            return EpisodeStart(match.new, token_ids, state, attempt.calls.pop_notices())

    async def step(
        self,
        key: str,
        answer_ids: Sequence[int],
        turn: int,
        input_budget: int,
        last: bool,
        logprobs: Sequence[float] = (),
    ) -> StepResult:
        """Send the policy's response to the call of turn `turn`; return the program's next call.

        If the program ends instead, the result has its reward and how the episode ended.

        Args:
            key: Key of the episode.
            answer_ids: Tokens of the policy's response.
            turn: Number of the newest turn, whose call waits for the response.
            input_budget: Number of tokens that the next call may add if it continues the
                conversation of this turn.
            last: Whether further calls are refused, since a limit of the episode is reached.
            logprobs: Log-probability of each token of the response.

        Raises:
            EpisodeUnknown: This worker does not have the episode.
            EnvironmentFault: The program failed, timed out, or received none of the responses.
        """
        attempt = self._attempts.get(key)
        if attempt is None:
            raise EpisodeUnknown(f"episode {key} is not open in this worker process")
        async with attempt.lock:
            stored = self._deliver_response(attempt, turn, answer_ids, logprobs)
            found = await self._next_turn(
                attempt, attempt.branch_tokens[turn] + input_budget, last=last
            )
            counts, notices = attempt.calls.pop_counts(), attempt.calls.pop_notices()
            if found is not None:
                match, token_ids, state = found
                new = (match.new, token_ids, state)
                stepped = StepResult(stored, 0.0, *new, parent=match.parent)
                return replace(stepped, counts=counts, notices=notices)
            reward, parts = self._final_reward(attempt)
            abandoned = attempt.calls.abandoned()
            # If no client received the response of any turn, the reward does not depend on the
            # policy. This happens if the episode was restored and its program, which then starts
            # from the beginning, ended without making any of the stored calls again. It also
            # happens if every client disconnected before its response was sent.
            if len(abandoned) == len(attempt.calls.turns):
                raise self._no_call_fault(" whose response it received")
            notices = (*notices, *self._needless_forks(attempt))
        await self.forget(key)
        return StepResult(
            with_parts(stored, parts),
            reward,
            ended="length" if attempt.limit_error else "stop",
            counts={**counts, "turns_abandoned": len(abandoned)},
            notices=notices,
            abandoned=abandoned,
        )

    async def restore(self, key: str, payload: Mapping[str, Any], turns: Sequence[Turn]) -> None:
        """Restore episode `key`: run its program again, and answer its calls with stored responses.

        Return once the program has repeated the call of the last turn, has made a call that is not
        stored, or has ended.

        Args:
            key: Key of the restored episode.
            payload: Payload of the task's prompt, from which the program's row is made.
            turns: Stored turns of the episode. The call of the last one stays without a response,
                which the next `step` sends.

        Raises:
            EnvironmentFault: The stored turns cannot be read with the current settings, or the
                program made no call and did not end within `episode.step_seconds`.
        """
        attempt = await self._start(key, payload, turns)
        async with attempt.lock:
            with self._fault_on_timeout():
                await attempt.calls.wait_until_repeated(
                    turns[-1].number, self._episode.step_seconds
                )

    async def trial_run(self, payload: Mapping[str, Any]) -> TrialEpisode:
        """Play a whole episode with a made-up response in every turn; return its measurements.

        Args:
            payload: Payload of the task's prompt, from which the program's row is made.

        Raises:
            EnvironmentFault: The program failed, timed out, or received none of the responses.
            UserError: The model's chat template cannot render a conversation of several turns.
        """
        conversation = self._codecs.of("").conversation
        conversation.check([{"role": "user", "content": _TRIAL_RESPONSE}], {"user"})
        answer = conversation.answer_ids(_TRIAL_RESPONSE)
        opened = await self.begin(_TRIAL_KEY, payload)
        longest, turn = 0, 0
        try:
            while True:
                last = turn + 1 >= self._episode.max_turns
                stepped = await self.step(_TRIAL_KEY, answer, turn, 1 << 31, last)
                if stepped.token_ids is None:
                    break
                longest, turn = max(longest, len(stepped.token_ids)), turn + 1
        finally:
            await self.forget(_TRIAL_KEY)
        text = conversation.decoded(opened.token_ids)
        return TrialEpisode(len(opened.token_ids), text, longest, differs=False)

    async def forget(self, key: str) -> str | None:
        """Close episode `key`, if open: revoke its API key, and cancel its program.

        Returns:
            Always None. `EnvironmentWorker.forget` returns an error message here.
        """
        attempt = self._attempts.pop(key, None)
        if attempt is not None:
            self._gateway.end(attempt.key)
            attempt.program.cancel()
            # A program that runs in a thread cannot be canceled. So send an error to every call
            # that waits for a response, which usually makes the program end.
            attempt.calls.end()
            await asyncio.wait([attempt.program], timeout=self._episode.step_seconds)
        return None

    # ------------------------------------------------------------ one attempt

    async def _start(self, key: str, payload: Mapping[str, Any], turns: Sequence[Turn]) -> _Attempt:
        """Start the program of episode `key`, and prepare its stored `turns` to be replayed."""
        url = await self._gateway.start()
        calls = AgentCalls(lambda: attempt.program.done())
        secret = self._gateway.open(calls)
        # With `chat` false, `row_of` gives the prompt as text. The program gets the messages of the
        # prompt as a separate argument, `messages`.
        row = row_of({**payload, "chat": False})
        row["messages"] = list(payload.get("messages", ()))
        program = asyncio.ensure_future(self._program(url, secret, row))
        number = key.split(".")[1] if "." in key else key
        attempt = self._attempts[key] = _Attempt(number, calls, secret, program)

        def ended(done: asyncio.Task[Any]) -> None:
            if not done.cancelled():
                # Mark the exception as retrieved, because asyncio logs exceptions that are never
                # read, as those of a forgotten attempt would be.
                done.exception()
            calls.notify()

        program.add_done_callback(ended)
        for turn in turns:
            self._register_turn(attempt, turns, turn)
        return attempt

    def _register_turn(self, attempt: _Attempt, turns: Sequence[Turn], turn: Turn) -> None:
        """Register stored turn `turn`, so that the program's repeated call is answered from it.

        The newest turn is registered without a response, since the next `step` sends that.

        Args:
            attempt: The new attempt at the episode.
            turns: All stored turns of the episode.
            turn: The turn, one of `turns`.
        """
        newest = turn is turns[-1]
        state = json.loads(turn.state or b"{}") if newest else {}
        request = ChatCall(
            beginning_of(turns, turn),
            calls_tools=state.get("calls_tools", True),
            logprobs=state.get("logprobs", False),
            parallel_calls=state.get("parallel_calls", True),
        )
        attempt.calls.register(turn, Call(request))
        if newest:
            attempt.branch_tokens.append(state.get("tokens", 0))
            attempt.stopped.append(False)
            return
        assert turn.answer is not None
        answer = self._chat_answer(attempt, turn.number, turn.answer)
        attempt.branch_tokens.append(sum(answer.tokens))
        attempt.stopped.append(not answer.truncated)
        attempt.calls.reply(turn.number, answer)

    def _deliver_response(
        self, attempt: _Attempt, turn: int, answer_ids: Sequence[int], logprobs: Sequence[float]
    ) -> dict[str, Any]:
        """Send the policy's response to the call of turn `turn`; return it in its stored form."""
        request = attempt.calls.turns[turn].request
        attempt.stopped[turn] = bool(len(answer_ids)) and answer_ids[-1] in self._stops
        stored = self._codecs.of(request.tools).stored(
            request,
            answer_ids,
            logprobs,
            attempt.branch_tokens[turn],
            ended=attempt.stopped[turn],
        )
        attempt.branch_tokens[turn] += len(answer_ids)
        attempt.calls.reply(turn, self._chat_answer(attempt, turn, stored))
        return stored

    def _chat_answer(self, attempt: _Attempt, turn: int, stored: Mapping[str, Any]) -> ChatAnswer:
        """Convert the stored response of turn `turn` to the `ChatAnswer` that the program gets."""
        codec = self._codecs.of(attempt.calls.turns[turn].request.tools)
        return codec.answer(f"{attempt.number}-{turn}", stored)

    async def _next_turn(
        self, attempt: _Attempt, most: int | None, *, last: bool
    ) -> tuple[Match, IntArray, bytes] | None:
        """Wait for the program's next call that can become a turn, and make it the next turn.

        Calls that cannot become a turn are refused meanwhile.

        Args:
            attempt: The program's attempt.
            most: Largest number of tokens of the call's whole conversation; None for no limit.
            last: Whether every call is refused, since a limit of the episode is reached.

        Returns:
            Which turn the call continues (`Match`), the tokens that it adds, and its options as
            JSON, which are stored with the turn. None if the program ends. Also None if a call was
            refused as too long or over a limit, and the program neither makes an acceptable call
            nor ends within `episode.step_seconds` from the start of this wait.

        Raises:
            EnvironmentFault: The program neither made a call nor ended for `episode.step_seconds`.
        """
        calls, seconds, full = attempt.calls, self._episode.step_seconds, False
        until = time.monotonic() + seconds
        while True:
            remaining = until - time.monotonic() if full else seconds
            call = None
            with suppress(TimeoutError) if full else self._fault_on_timeout():
                call = await calls.next(remaining) if remaining > 0 else None
            if call is None:
                return None
            match = calls.match(call)
            try:
                if last:
                    raise CallRefused(
                        f"this episode has reached its limit of {self._episode.max_turns} "
                        "responses (episode.max_turns) or of time (episode.seconds); end the "
                        "program",
                        "messages",
                        code=TOO_LONG,
                    )
                token_ids = self._render(attempt, call, match)
                before = 0 if match.parent is None else attempt.branch_tokens[match.parent]
                if most is not None and before + len(token_ids) > most:
                    raise CallRefused(
                        f"the conversation has {before + len(token_ids)} tokens; an engine accepts "
                        f"at most {most}, so that a response still fits. Shorten the messages.",
                        "messages",
                        code=TOO_LONG,
                    )
            except CallRefused as refused:
                if refused.code:
                    attempt.limit_error, full = str(refused), True
                calls.refuse(call, refused)
                continue
            calls.begin(call, match)
            attempt.branch_tokens.append(before + len(token_ids))
            attempt.stopped.append(False)
            state = {"tokens": attempt.branch_tokens[-1], "logprobs": call.request.logprobs}
            state["calls_tools"] = call.request.calls_tools
            state["parallel_calls"] = call.request.parallel_calls
            return match, token_ids, json.dumps(state).encode()

    def _render(self, attempt: _Attempt, call: Call, match: Match) -> IntArray:
        """Return the tokens that `call` adds to the branch that it continues."""
        codec = self._codecs.of(call.request.tools)
        if match.parent is None:
            return codec.opening(match.new)
        return codec.next(match.new, ended=attempt.stopped[match.parent])

    def _final_reward(self, attempt: _Attempt) -> tuple[float, Mapping[str, float]]:
        """Return the reward that the attempt's program returned, and its named numbers for metrics.

        The reward is 0 if the program still runs, or if it failed after a call was refused as too
        long or over a limit. It is also 0 if the program returned nothing and the setting `reward`
        names a scorer, which then rewards the episode.

        After such a refusal, an invalid or missing reward also counts as 0.

        Raises:
            EnvironmentFault: Without such a refusal, the program failed, returned an invalid
                reward, or returned nothing although no scorer is set. Or it canceled its own task.
        """
        shown = self._settings.display_name
        if not attempt.program.done():
            return 0.0, {}
        try:
            returned = attempt.program.result()
            if returned is None and not self._scored:
                what = "printed nothing or null," if self._settings.command else "returned None,"
                raise EnvironmentFault(
                    f"{shown} {what} but `reward` is not set, so the conversation has no score. "
                    "Return a number, or set `reward`."
                )
            return number_of(0.0 if returned is None else returned, shown)
        except asyncio.CancelledError:
            raise EnvironmentFault(f"{shown} canceled its own task") from None
        except EnvironmentFault as fault:
            # After a call was refused at a limit, an exception is how most programs end, so it is
            # not a fault.
            if attempt.limit_error:
                return 0.0, {}
            raise EnvironmentFault(str(fault).replace(attempt.key, "(key)")) from None

    def _no_call_fault(self, more: str) -> EnvironmentFault:
        """Return the error that a program ended without a call; its message ends with `more`."""
        return EnvironmentFault(
            f"{self._settings.display_name} ended without a call to the policy{more}"
        )

    def _needless_forks(self, attempt: _Attempt) -> tuple[str, ...]:
        """Return a warning if each call after the first changed earlier messages or tools.

        Each such call starts a new branch of the episode, which is a separate sequence to train on.
        A program that only appends messages to its earlier calls has a single branch. The result is
        empty if some call changed nothing, or if there are too few calls to tell.
        """
        forks = attempt.calls.forks
        changed = [fork for fork in forks if fork.why in ("answer", "message", "tools")]
        made = len(attempt.calls.turns)
        if made < _MIN_CALLS_TO_WARN or len(changed) < made - 1:
            return ()
        first = changed[0]
        return (
            f"each of the {made} calls by an agent started a separate branch, because the agent "
            f"changed earlier messages; the first change is message {first.at}: "
            f"{first.now:.200}, which was {first.was:.200}",
        )

    @contextmanager
    def _fault_on_timeout(self) -> Iterator[None]:
        """Convert a TimeoutError raised in this block to an EnvironmentFault of the program."""
        try:
            yield
        except TimeoutError as error:
            raise EnvironmentFault(
                f"{self._settings.display_name} neither called the policy nor ended for "
                f"{self._episode.step_seconds:g} s (episode.step_seconds)"
            ) from error


def _bypass_proxy() -> None:
    """Add the loopback address to NO_PROXY of this process and of the processes that it starts.

    Agents' HTTP clients then call the gateway directly, also where a site sets an HTTP proxy.
    """
    excluded = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    if excluded != "*" and LOOPBACK not in excluded.split(","):
        extended = f"{excluded},{LOOPBACK}" if excluded else LOOPBACK
        os.environ.update(no_proxy=extended, NO_PROXY=extended)


class AgentProcess(AgentWorker):
    """Agent worker in a dedicated process: limits its memory, and ends it when it is stuck."""

    def __init__(self, config: RunConfig, model_path: str) -> None:
        super().__init__(config, model_path)
        self._process = ProcessGuard(self._episode)

    async def _start(self, key: str, payload: Mapping[str, Any], turns: Sequence[Turn]) -> _Attempt:
        self._process.watch()
        return await super()._start(key, payload, turns)

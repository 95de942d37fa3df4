"""Queues an agent's calls to the policy, and recognizes calls that repeat earlier ones.

An attempt is one execution of an agent's program for an episode. The program's client sends HTTP
requests. A request is either a new call, or it repeats an earlier call whose response the client
did not get. Each call that is accepted becomes a turn of the episode, and the policy's response to
it is sent to the client.

Invariants
- Calls get their responses one after the other, in the order of their arrival.
- Each response belongs to one call. If a call's client disconnected or did not receive the
  response, the next request with equal messages counts as a repetition of this call. The turns that
  an earlier attempt stored are used in the same way: of several requests with equal messages, the
  k-th one repeats the k-th such stored turn. A response that a client waits for, or is known to
  have received, is never sent to another request.
- A call that reaches the head of the queue without a waiting client leaves the queue until a
  request repeats it.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_async.environments.chat import CallRefused, ChatAnswer, ChatCall
from megatron_async.environments.matching import Branches, Fork, Match, Message, call_digest
from megatron_async.trajectory.types import Turn


@dataclass(eq=False)
class Call:
    """An agent's call to the policy, which waits for the policy's response or has it.

    Attributes:
        request: The call's messages and options. For a stored turn of an earlier attempt, the
            messages are only those of the first turn of its branch, from which `tools` is read.
        clients: Number of HTTP requests that wait for the response.
        received: Whether a client is assumed to have received the response at least in part.
        delivered: Whether the whole response was sent and its connection was not reset. The client
            then has the response, so a request with equal messages cannot repeat this call.
        deferred: Whether the call was taken out of the queue because no client waited for it.
        answer: The policy's response, or the error to send in place of it, once either exists.
    """

    request: ChatCall
    clients: int = 0
    received: bool = False
    delivered: bool = False
    deferred: bool = False
    answer: asyncio.Future[ChatAnswer] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def reached(self) -> bool:
        """Whether a client has received the response to this call, or waits for it."""
        return self.received or self.clients > 0


class AgentCalls:
    """The calls of one execution of an agent's program: their queue, and the turns they became.

    The HTTP gateway adds calls with `call`. The worker takes them with `next`, and then makes each
    a turn (`begin`, later `reply`) or refuses it (`refuse`).
    """

    def __init__(self, ended: Callable[[], bool]) -> None:
        """Create an empty queue; `ended` returns whether the agent's program has ended."""
        self._ended = ended
        self._by_digest: dict[bytes, list[Call]] = {}
        self._queue: deque[Call] = deque()
        self._changed = asyncio.Event()
        self._branches = Branches()
        self.turns: list[Call] = []
        self.forks: list[Fork] = []
        self.notices: dict[str, None] = {}
        self.counts: Counter[str] = Counter()
        self._stored = 0

    # ------------------------------------------------------------ used by the gateway

    def call(self, asked: ChatCall, *, retry: bool) -> Call:
        """Return the call for a client's request: the earlier call that it repeats, or a new one.

        A request repeats an earlier call if its messages are equal, no client waits for the call's
        response, and no client has received the response. A new call is added to the queue.

        Args:
            asked: The client's request.
            retry: Whether the client states that it repeats a request. The request then also
                repeats an equal call whose response was sent but may not have arrived.
        """
        self.notices.update(dict.fromkeys(asked.notices))
        equal = self._by_digest.setdefault(call_digest(asked.messages), [])
        call = next((earlier for earlier in equal if not earlier.reached), None)
        if call is None and retry:
            unsure = (
                earlier for earlier in reversed(equal) if not (earlier.delivered or earlier.clients)
            )
            call = next(unsure, None)
        if call is None:
            call = Call(asked)
            equal.append(call)
            self._queue.append(call)
        elif call.deferred:
            call.deferred = False
            self._queue.append(call)
        elif call.answer.done() and call in self.turns[: self._stored] and not call.received:
            self.counts["turns_replayed"] += 1
        self.notify()
        return call

    def notify(self) -> None:
        """Wake up `next` and `wait_until_repeated`: a call was made, or the program has ended."""
        self._changed.set()

    # ------------------------------------------------------------ used by the worker

    async def next(self, seconds: float) -> Call | None:
        """Wait for the program's next call that has no stored response; return None once the
        program ends.

        A stored response belongs to an equal call in an earlier attempt of the episode.

        Raises:
            TimeoutError: For `seconds`, the program neither made a call (one with a stored response
                counts too) nor ended.
        """
        while not self._ended():
            self._changed.clear()
            while self._queue:
                call = self._queue.popleft()
                if call.clients:
                    return call
                call.deferred = True
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        return None

    async def wait_until_repeated(self, turn: int, seconds: float) -> None:
        """Wait until the program of a restored episode has repeated the call of stored turn `turn`.

        Also return once the program makes a call that is not stored, or ends.

        Raises:
            TimeoutError: The program made no call and did not end for `seconds`.
        """
        while not (self._ended() or self._queue or self.turns[turn].reached):
            self._changed.clear()
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def match(self, call: Call) -> Match:
        """Return which turn `call` continues, and with which new messages."""
        return self._branches.match(call.request.messages)

    def begin(self, call: Call, match: Match) -> int:
        """Make `call` the next turn of the episode, and return the turn's number.

        If the call starts a new branch (a fork), that is counted for metrics.

        Args:
            call: The call.
            match: Result of `match(call)`.
        """
        self.turns.append(call)
        if match.fork is not None:
            self.forks.append(match.fork)
            self.counts["forks"] += 1
            self.counts[f"forks_{match.fork.why}"] += 1
        return self._branches.begin(match.parent, match.new)

    def refuse(self, call: Call, refused: CallRefused) -> None:
        """Send the error `refused` to the clients of `call`, which does not become a turn."""
        self._forget(call)
        call.answer.set_exception(refused)
        # Mark the exception as retrieved, because asyncio logs one that no client waits for.
        call.answer.exception()

    def reply(self, turn: int, answer: ChatAnswer) -> None:
        """Send the policy's response `answer` to the clients of the call of turn number `turn`."""
        self._branches.answer(turn, answer.message)
        self.turns[turn].answer.set_result(answer)

    def end(self) -> None:
        """Send error 401 to the clients of every call without a response: the episode has ended."""
        ended = CallRefused(
            "this episode has ended, so its key is no longer valid; stop calling the policy",
            status=401,
        )
        for call in (waiting for equal in self._by_digest.values() for waiting in equal):
            if not call.answer.done():
                call.answer.set_exception(ended)
                # Mark the exception as retrieved, because asyncio logs one that no client waits
                # for.
                call.answer.exception()

    def register(self, turn: Turn, call: Call) -> None:
        """Register a stored turn of an earlier execution, so that its call can be repeated.

        A request of the program with equal messages then gets the response of `call`. Stored turns
        must be registered in the order of their numbers, before the program makes calls.
        """
        self.turns.append(call)
        self._branches.begin(turn.parent, turn.messages)
        self._by_digest.setdefault(self._branches.digest_of_turn(turn.number), []).append(call)
        self._stored = len(self.turns)

    def abandoned(self) -> tuple[int, ...]:
        """Return the numbers of turns whose response no client of this execution received."""
        return tuple(number for number, call in enumerate(self.turns) if not call.reached)

    def pop_counts(self) -> Counter[str]:
        """Return counts for metrics, and reset them to zero.

        They are the number of forks (calls that started a new branch), also by reason, and the
        number of repeated calls that got a stored response.
        """
        popped, self.counts = self.counts, Counter()
        return popped

    def pop_notices(self) -> tuple[str, ...]:
        """Return the collected notices about calls for the user, and clear them."""
        popped, self.notices = tuple(self.notices), {}
        return popped

    def _forget(self, call: Call) -> None:
        self._by_digest[call_digest(call.request.messages)].remove(call)


def beginning_of(turns: Sequence[Turn], turn: Turn) -> tuple[Message, ...]:
    """Return the messages of the first turn of the branch that ends with `turn`.

    They include the description of the branch's tools. `turns` are all turns of the episode.
    """
    while turn.parent is not None:
        turn = turns[turn.parent]
    return tuple(turn.messages)

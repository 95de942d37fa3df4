"""The calls of one attempt of an agent: which are the same, and which is the next turn.

Invariants
- Calls are answered one after the other, in the order in which they came.
- An answer is given to one call. A call that was left by its client, or whose answer did not reach
  it, is taken up by the next equal call; so is a stored turn, the k-th by the k-th equal call. An
  answer that a client waits for, or is known to have, is never given to another request.
- A call that nobody waits for when its turn comes is set aside until it is asked again.
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
    """A call that waits for an answer, or has one.

    `clients`: how many wait. `given`: whether a client has read of the answer, as far as is known.
    `kept`: whether the whole answer was sent and its connection was not reset. Such an answer has
    reached its client, so that a retry cannot be of this call.

    `asked`: of a stored turn, with the beginning of its branch as messages. `aside`: it was left
    before its turn came.
    """

    asked: ChatCall
    clients: int = 0
    given: bool = False
    kept: bool = False
    deferred: bool = False
    answer: asyncio.Future[ChatAnswer] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def reached(self) -> bool:
        """Return whether a client has the answer, or waits for it."""
        return self.given or self.clients > 0


class AgentCalls:
    """Owner of one key. `ended`: returns whether the program has ended."""

    def __init__(self, ended: Callable[[], bool]) -> None:
        self._ended = ended
        self._known: dict[bytes, list[Call]] = {}
        self._queue: deque[Call] = deque()
        self._news = asyncio.Event()
        self._branches = Branches()
        self.turns: list[Call] = []
        self.forks: list[Fork] = []
        self.notices: dict[str, None] = {}
        self.counts: Counter[str] = Counter()
        self._stored = 0

    # ------------------------------------------------------------ the gateway's side

    def call(self, asked: ChatCall, *, retry: bool) -> Call:
        """Take a call, or find it again.

        `retry`: the client states that it asks again. It then also gets an answer that may not have
        arrived, but never one that another client waits for.
        """
        self.notices.update(dict.fromkeys(asked.notices))
        equal = self._known.setdefault(call_digest(asked.messages), [])
        call = next((one for one in equal if not one.reached), None)
        if call is None and retry:
            unsure = (one for one in reversed(equal) if not (one.kept or one.clients))
            call = next(unsure, None)
        if call is None:
            call = Call(asked)
            equal.append(call)
            self._queue.append(call)
        elif call.deferred:
            call.deferred = False
            self._queue.append(call)
        elif call.answer.done() and call in self.turns[: self._stored] and not call.given:
            self.counts["turns_replayed"] += 1
        self.news()
        return call

    def news(self) -> None:
        """Something has happened that `next` may wait for."""
        self._news.set()

    # ------------------------------------------------------------ the worker's side

    async def next(self, seconds: float) -> Call | None:
        """The next call that no stored turn answers; None: the program has ended.

        Raises TimeoutError when neither happens in `seconds` after the last call of any kind.
        """
        while not self._ended():
            self._news.clear()
            while self._queue:
                call = self._queue.popleft()
                if call.clients:
                    return call
                call.deferred = True
            async with asyncio.timeout(seconds):
                await self._news.wait()
        return None

    async def until_asked(self, turn: int, seconds: float) -> None:
        """Wait until a stored turn, or what is stored nowhere, is asked, or the program ends."""
        while not (self._ended() or self._queue or self.turns[turn].reached):
            self._news.clear()
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def match(self, call: Call) -> Match:
        """Match a call that was taken to the branch that it continues."""
        return self._branches.match(call.asked.messages)

    def begin(self, call: Call, match: Match) -> int:
        """The number of the turn that a call becomes."""
        self.turns.append(call)
        if match.fork is not None:
            self.forks.append(match.fork)
            self.counts["forks"] += 1
            self.counts[f"forks_{match.fork.why}"] += 1
        return self._branches.begin(match.parent, match.new)

    def refuse(self, call: Call, refused: CallRefused) -> None:
        """Reply to a call that it cannot be a turn."""
        self._forget(call)
        call.answer.set_exception(refused)
        call.answer.exception()  # it is no defect if nobody waits for it any more

    def reply(self, turn: int, answer: ChatAnswer) -> None:
        """Answer a turn's call."""
        self._branches.answer(turn, answer.message)
        self.turns[turn].answer.set_result(answer)

    def end(self) -> None:
        """Refuse every call that waits: none will be answered."""
        ended = CallRefused("this episode has ended, and its key with it", status=401)
        for call in (one for equal in self._known.values() for one in equal):
            if not call.answer.done():
                call.answer.set_exception(ended)
                call.answer.exception()  # as in `refuse`

    def store(self, turn: Turn, call: Call) -> None:
        """Know the call of a stored turn; those before it are known."""
        self.turns.append(call)
        self._branches.begin(turn.parent, turn.messages)
        self._known.setdefault(self._branches.asked(turn.number), []).append(call)
        self._stored = len(self.turns)

    def left(self) -> tuple[int, ...]:
        """The turns whose answers this program has not got."""
        return tuple(number for number, call in enumerate(self.turns) if not call.reached)

    def take_counts(self) -> Counter[str]:
        """Return the counts since the last call."""
        taken, self.counts = self.counts, Counter()
        return taken

    def take_notices(self) -> tuple[str, ...]:
        """Sentences about calls since the last call."""
        taken, self.notices = tuple(self.notices), {}
        return taken

    def _forget(self, call: Call) -> None:
        self._known[call_digest(call.asked.messages)].remove(call)


def beginning_of(turns: Sequence[Turn], turn: Turn) -> tuple[Message, ...]:
    """The messages with which a stored turn's branch begins: its tools are among them."""
    while turn.parent is not None:
        turn = turns[turn.parent]
    return tuple(turn.messages)

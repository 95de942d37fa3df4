"""An agent whose episodes are played in a process with another Python environment.

Each worker of the run starts one such process, `tasksets.py` in this directory. For each episode,
the agent writes one line of JSON to the process and reads one line of JSON from it. The process
plays episodes of a taskset of `verifiers`, whose requirements conflict with the requirements of a
run.
"""

import asyncio
import itertools
import json
import subprocess
import threading
from concurrent.futures import Future
from functools import cache


class Process:
    """A process that runs `command`, and the futures of the episodes that it plays."""

    def __init__(self, command: tuple[str, ...]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._numbers = itertools.count()
        self._ends: dict[int, Future] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            end = json.loads(line)
            self._ends.pop(end["number"]).set_result(end)
        process_of.cache_clear()  # the next episode starts a new process
        for waiting in self._ends.values():
            waiting.set_exception(RuntimeError("the process that plays the taskset has ended"))

    async def play(self, row: dict) -> dict:
        number = next(self._numbers)
        self._ends[number] = Future()
        print(json.dumps({**row, "number": number}), file=self._process.stdin, flush=True)
        return await asyncio.shield(asyncio.wrap_future(self._ends[number]))


process_of = cache(Process)


async def solve(base_url: str, api_key: str, seed: int, command: list[str]) -> float:
    row = {"base_url": base_url, "api_key": api_key, "seed": seed}
    end = await process_of(tuple(command)).play(row)
    if end["errors"]:
        raise RuntimeError(end["errors"][0])
    return end["reward"]

"""Play episodes of a taskset of `verifiers`: `tasksets.py SETTINGS`.

SETTINGS is a JSON object with the settings of an environment of `verifiers`. Standard input has one
JSON line for each episode, with number, seed, base_url and api_key. Standard output gets one JSON
line for each ended episode, with number, reward and errors.
"""

import asyncio
import json
import os
import sys
from itertools import islice

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

TASKS = 1000


async def play(env: vf.Env, task: vf.Task, row: dict) -> None:
    """Play one episode of `task`; print its number, reward and errors as a line of JSON."""
    key = f"EPISODE_{row['number']}"
    os.environ[key] = row["api_key"]
    try:
        client = vf.EvalClientConfig(base_url=row["base_url"], api_key_var=key)
        episode = await env.run_episode(task, vf.ModelContext(model="policy", client=client))
    finally:
        del os.environ[key]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    reward = sum(trace.reward for trace in episode.traces)
    end = {"number": row["number"], "reward": reward, "errors": [str(error) for error in errors]}
    print(json.dumps(end), flush=True)


async def main() -> None:
    env = load_environment(resolve_env_config(json.loads(sys.argv[1])))
    tasks = list(islice(env.taskset, TASKS))
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    async with env.serving(), asyncio.TaskGroup() as episodes:
        while line := await lines.readline():
            row = json.loads(line)
            episodes.create_task(play(env, tasks[row["seed"] % len(tasks)], row))


asyncio.run(main())

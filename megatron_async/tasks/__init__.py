"""Sources of problems; plug-ins by import path. What scores responses is in `scoring`.

- base: the protocols of a task, a source and a scorer. build: from settings to tasks and sources.
- text_task: single-turn text problems, with their tokens and stop tokens.
- files, rows, layouts: problems from a user's files; every row is read before anything starts.
  index_cache: the index of a large one, for the next process. data_identity: whether files are what
  they were when a run began.
- procedural: problems that are made as they are asked for, with their scorers. chain_sum: sums and
  worked answers to them. reasoning_gym: the tasks of that optional package.
- seeds: rows for environments that make their own problems.
- answers: the final answer in a response. prompts: problems and conversations as text and tokens.
"""

from megatron_async.tasks.build import build_source, build_task

__all__ = ["build_source", "build_task"]

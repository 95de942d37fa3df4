"""Provides the problems that a run trains and evaluates on, from files, generators or seeds.

Each file of this package:

- base: interfaces of a task, a problem source and a data set; hashes that decide which problems are
  held out. build: creates tasks and problem sources from settings.
- text_task: tokenized prompts and supervised examples for one model, with its stop tokens.
- files, rows, layouts: problems from a user's files. Every row is read before anything starts.
  index_cache: caches the index of a large file for the next process. data_identity: detects data
  files that changed after a run started.
- procedural: problems that are generated on demand, with their scorer. chain_sum: sums of integers
  and worked answers to them. reasoning_gym: the tasks of that optional package.
- seeds: rows that contain only a seed, for environments that generate their own problems.
- answers: extracts the final answer from a response. prompts: renders problems and conversations as
  text and tokens.

Rewards, which score responses, are in the package `scoring`.
"""

from megatron_async.tasks.build import build_source, build_task

__all__ = ["build_source", "build_task"]

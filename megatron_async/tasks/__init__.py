"""Sources of problems and what scores responses; plug-ins by import path.

- base: the protocols of a task, a source and a scorer. build: from settings to them.
- text_task: single-turn text problems: chat template, tokens, stop tokens.
- files, rows, layouts: problems from a user's files; every row is read before anything starts.
  kept_index: the index of a large one, for the next process.
- reasoning_gym: procedural problems with their verifiers, and worked answers.
- answers: the final answer in a response.
- rewards: the user's own rewards and the built-in ones. sandbox: where programs of responses run.
- verifier, verifier_process: scorers in processes, with a hard limit on every score.
- scorer_pool, scorer_count, scorer_work: how many scorers, and the work of each.
- scorer_process, scorer_frames, waiting_scorer: a scorer's process, its frames, scores that wait.
- tiny_model: the quickstart's tokenizer and model.
"""

from megatron_async.tasks.build import build_scorer, build_source, build_task

__all__ = ["build_scorer", "build_source", "build_task"]

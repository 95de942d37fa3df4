"""The commands of `megatron-async`, one file each; `cli.py` parses their options.

- train: checks the settings, creates or finds the run, and runs it to its end; also `--resume` and
  `--dry-run`.
- rollback: returns a run to an older checkpoint (`--from-step`). Nothing is deleted; newer
  checkpoints are renamed.
- launch: creates a run directory and the job or commands that start the run on several nodes.
- sft: fine-tunes on worked answers with the same trainer.
- teacher: `sft --from-teacher` fine-tunes on a teacher's answers that the reward accepts.
- evaluation: `eval` measures the accuracy of checkpoints on held-out problems.
- gateway: serves a model by the chat API that agents use, without training.
- score: computes log-probs of given tokens with the trainer's model, at any parallel layout.
- reward: scores the responses of a file, without a run.
- quickstart: builds a small model, fine-tunes it, and trains it by RL.
- init: writes a small project to start from.
- report: prints the totals of a run and writes its report page.
- trajectories: lists the trajectories of a run, prints one, or drops a group.
- trace: writes the newest steps on a time axis, for Perfetto.
- settings: prints every setting, with its value in a file.
- library: the Python functions `train` and `open_run`.
- replay: feeds recorded scheduler events to the current scheduler; fails at the first different
  action.
- simulate: `simulate`, `fit-lengths` and `plan`.
- doctor: prints what is installed and what a run will use. machine_checks: checks a machine beyond
  its Python packages.
"""

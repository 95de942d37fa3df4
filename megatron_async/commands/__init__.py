"""Commands of `megatron-async`, one file each; `cli.py` reads their options.

- train: check the settings, make or find the run, run it to its end; `--resume`,
  `--dry-run`.
- rollback: back to an older checkpoint (`--from-step`). Nothing is deleted; newer ones are set
  aside.
- launch: a run directory and what starts it on several nodes.
- sft: supervised fine-tuning with the same trainer.
- teacher: `sft --from-teacher`: what the reward accepts of a teacher's answers.
- evaluation: `eval`: accuracy of checkpoints on held-out problems.
- gateway: the chat API of agents over a model, without training.
- score: log-probs of given tokens by the trainer's model, at any layout.
- reward: a reward tried on responses of a file, without a run.
- quickstart: build a small model, fine-tune it, train it by RL.
- init: a small project to begin with.
- report: the totals of a run, and its page.
- trajectories: list the trajectories of a run, print one, drop a group.
- trace: the newest steps on a time axis, for Perfetto.
- settings: every setting, with its value in a file.
- library: the same from Python: `train`, `open_run`.
- replay: recorded scheduler events, fed to today's scheduler; the first different action fails it.
- simulate: output of `simulate`, `fit-lengths` and `plan`.
- doctor: what is installed and what will be used. machine_checks: what a machine must have beyond
  Python packages.
"""

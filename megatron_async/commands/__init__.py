"""The commands of `megatron-async`, one file each; `cli.py` parses their options.

- train: `train` checks the settings, creates a run or (`--resume`) finds it, and trains until it is
  complete.
- rollback: `--resume RUN --from-step N` returns a run to an older checkpoint. Nothing is deleted;
  newer checkpoints are renamed.
- launch: creates a run directory and the job or commands that start the run on several nodes.
- sft: fine-tunes on worked answers with the trainer that RL uses.
- teacher: `sft --from-teacher` fine-tunes on a teacher's responses that the reward accepts.
- evaluation: `eval` measures the accuracy of checkpoints on held-out problems.
- gateway: serves a model by the chat API that agents use, without training.
- score: computes the log-probs of given tokens with the trainer's model, in any parallel layout.
- reward: scores the responses of a file, without a run.
- quickstart: builds a small model, fine-tunes it, and trains it by RL.
- init: writes a small project to start from.
- report: prints the totals of a run and writes its report page.
- trajectories: lists the trajectories of a run, prints one, or drops a group.
- trace: writes a file in which the viewer Perfetto shows the newest steps on a time axis.
- settings: prints every setting, with its value in a file.
- library: the Python functions `train` and `open_run`.
- replay: feeds the recorded events of a run to the scheduler of the installed code, and fails if it
  returns another action than was recorded.
- simulate: `simulate` predicts the speed of a run, `plan` searches for a good layout and schedule,
  and `fit-lengths` fits distributions to recorded response lengths.
- doctor: prints what is installed and what a run will use.
- machine_checks: the checks of the machine that `doctor` prints, such as the check of the driver.
"""

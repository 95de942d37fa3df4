"""A run from the outside: its directory, its processes, the trainer's loop, the closing report."""

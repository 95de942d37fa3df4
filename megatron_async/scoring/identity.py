"""Provides one line of text that identifies all rewards of a run, to compare two runs."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_async.config import RunConfig


def reward_identity(config: RunConfig) -> str:
    """Return one line of text that identifies every reward of a run and its settings.

    The lines of two runs differ if a reward, its arguments, its weight or the content of its file
    differs. The folder of the file does not matter. The content of an installed module is not
    compared. A run with episodes also gets a description of its environment or agent program.
    """
    sources = []
    if config.scores:
        for reward in config.scorers.parts:
            name = f"task {config.task.kind}" if reward.name == "task" else reward.name
            sources.append(_described(name, reward.arguments, reward.weight))
    if config.has_episodes:
        player = config.player
        name = player.name or " ".join(config.agent.command)
        sources.append(_described(name, player.arguments))
    return " + ".join(sources)


def _described(name: str, arguments: Mapping[str, Any], weight: float = 1.0) -> str:
    """Return a reward's (or environment's) weight, name and arguments as one line of text.

    A file in `name` is written without its folder and with a digest of its content.
    """
    text = " ".join(map(_without_folder, name.split()))
    if weight != 1.0:
        text = f"{weight:g} x {text}"
    if arguments:
        text += f" {json.dumps(arguments, sort_keys=True)}"
    return text


def _without_folder(word: str) -> str:
    """If `word` is the path of a file, return the file's name with a digest of its content.

    A suffix `:name` after the path is kept. A word that is not the path of a file is returned
    unchanged.
    """
    path, colon, name = word.rpartition(":")
    file = Path(path if colon else word)
    if not file.is_file():
        return word
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:8]
    return f"{file.name}{colon}{name if colon else ''} (content {digest})"

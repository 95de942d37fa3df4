"""Describes everything that gives a run's rewards, as one line."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_async.config import RunConfig


def reward_identity(config: RunConfig) -> str:
    """Describe every reward of a run in one line.

    The line differs between two runs if a reward, its arguments, its weight or the content of its
    file differs; the folder of the file does not count. The content of an installed module is not
    compared.
    """
    sources = []
    if config.scores:
        for part in config.scorers.parts:
            name = f"task {config.task.kind}" if part.name == "task" else part.name
            sources.append(_described(name, part.arguments, part.weight))
    if config.has_episodes:
        player = config.player
        name = player.name or " ".join(config.agent.command)
        sources.append(_described(name, player.arguments))
    return " + ".join(sources)


def _described(name: str, arguments: Mapping[str, Any], weight: float = 1.0) -> str:
    text = " ".join(map(_without_folder, name.split()))
    if weight != 1.0:
        text = f"{weight:g} x {text}"
    if arguments:
        text += f" {json.dumps(arguments, sort_keys=True)}"
    return text


def _without_folder(word: str) -> str:
    """Replace the folder of a file by a digest of the file; other words stay."""
    path, colon, name = word.rpartition(":")
    file = Path(path if colon else word)
    if not file.is_file():
        return word
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:8]
    return f"{file.name}{colon}{name if colon else ''} (content {digest})"

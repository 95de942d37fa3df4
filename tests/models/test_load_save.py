"""Tests loading of damaged model directories, and that directories are written completely or
not."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from megatron_async.checkpoint.convert import hf_to_megatron, megatron_to_hf
from megatron_async.config.files import tokenizer_digest
from megatron_async.config.model import ModelConfig, ParallelConfig, TrainerConfig
from megatron_async.errors import UserError
from megatron_async.models.export import buckets
from megatron_async.models.save import write_model_directory
from megatron_async.models.tiny_model import character_tokenizer
from tests.hf_models import save_hf_model


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    """Make this process a process group of one rank."""
    from megatron_async.trainer.parallel import parallel_session

    with parallel_session(ParallelConfig(), TrainerConfig(), seed=0):
        yield


def _load(folder: Path) -> list[Any]:
    from megatron_async.models.load import load_hf_weights
    from megatron_async.trainer.policy_model import build_policy

    chunks = build_policy(
        ModelConfig(path=str(folder)), ParallelConfig(), trainer=TrainerConfig(), seed=0
    )
    load_hf_weights(chunks, folder)
    return list(chunks)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    save_hf_model("qwen3", folder)
    return folder


def _rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.usefixtures("session")
class TestLoading:
    def test_load_names_the_tensor_when_it_is_missing(self, model_dir: Path) -> None:
        _rewrite(model_dir, {"model.layers.1.mlp.up_proj.weight": None})
        with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
            _load(model_dir)

    def test_load_refuses_directory_without_weights(self, model_dir: Path) -> None:
        (model_dir / "model.safetensors").unlink()
        with pytest.raises(UserError, match="has neither"):
            _load(model_dir)


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.usefixtures("session")
class TestSaving:
    def test_save_hf_is_bit_exact_when_bfloat16_went_through_float32(self, tmp_path: Path) -> None:
        from megatron_async.models.save import save_hf

        source = tmp_path / "source"
        save_hf_model("qwen2_tied", source, dtype=torch.bfloat16).to(torch.bfloat16)
        tensors = {
            name: tensor.to(torch.bfloat16)
            for name, tensor in load_file(source / "model.safetensors").items()
        }
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
        chunks = _load(source)
        assert next(chunks[0].parameters()).dtype is torch.float32
        save_hf(chunks, tmp_path / "copy", source)
        copied = load_file(tmp_path / "copy" / "model.safetensors")
        assert copied.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert copied[name].dtype is torch.bfloat16
            assert torch.equal(copied[name], tensor)

    def test_save_hf_copies_config_and_tokenizer_but_no_other_weights(
        self, model_dir: Path
    ) -> None:
        from megatron_async.models.save import save_hf

        (model_dir / "tokenizer.json").write_text("{}")
        (model_dir / "chat_template.jinja").write_text("{{ messages }}")
        (model_dir / "optimizer.pt").write_bytes(b"large")
        destination = model_dir.with_name("copy")
        save_hf(_load(model_dir), destination, model_dir, max_shard_bytes=20_000)
        names = {path.name for path in destination.iterdir()}
        assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= names
        assert "optimizer.pt" not in names
        index = json.loads((destination / "model.safetensors.index.json").read_text())
        files = set(index["weight_map"].values())
        assert files == {name for name in names if name.endswith(".safetensors")}
        assert len(files) > 1
        sizes = sum(
            tensor.numel() * tensor.element_size()
            for file in files
            for tensor in load_file(destination / file).values()
        )
        assert index["metadata"]["total_size"] == sizes

    def test_save_hf_refuses_and_keeps_an_existing_directory(self, model_dir: Path) -> None:
        from megatron_async.models.save import save_hf

        chunks = _load(model_dir)
        before = (model_dir / "model.safetensors").read_bytes()
        with pytest.raises(UserError, match="already exists"):
            save_hf(chunks, model_dir, model_dir)
        assert (model_dir / "model.safetensors").read_bytes() == before


def _named_templates(folder: Path, templates: dict[str, str], *, files: bool) -> None:
    """Write a tokenizer with these templates as transformers does, in files or in its config."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(str(folder), save_jinja_files=files)


TEMPLATES = {"default": "{{ messages }}", "tool_use": "{{ tools }}", "a.b": "{# no text #}"}


@pytest.mark.parametrize("files", [True, False], ids=["files", "tokenizer_config.json"])
@pytest.mark.parametrize("names", [["default", "tool_use", "a.b"], ["tool_use"]])
def test_named_chat_templates_are_kept_when_a_model_is_written(
    files: bool, names: list[str], tmp_path: Path
) -> None:
    save_hf_model("qwen3", tmp_path / "model")
    templates = {name: TEMPLATES[name] for name in names}
    _named_templates(tmp_path / "model", templates, files=files)
    assert (tmp_path / "model" / "additional_chat_templates").exists() == files
    write_model_directory(iter([[("a", torch.ones(1))]]), tmp_path / "copy", tmp_path / "model")
    hf_to_megatron(tmp_path / "model", tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    for copy in ("copy", "back"):
        found = AutoTokenizer.from_pretrained(tmp_path / copy, local_files_only=True)
        assert found.chat_template == templates
        assert tokenizer_digest(f"{tmp_path / copy}") == tokenizer_digest(f"{tmp_path / 'model'}")


@pytest.mark.parametrize(
    "change",
    [
        {"tool_use": "another"},
        {"third": ""},
        {"default": "another"},
        {"a.b": None},
        {"default": None},
    ],
)
@pytest.mark.parametrize("files", [True, False], ids=["files", "tokenizer_config.json"])
def test_tokenizer_digest_differs_when_a_named_template_differs(
    change: dict[str, str | None], files: bool, tmp_path: Path
) -> None:
    changed = {key: value for key, value in (TEMPLATES | change).items() if value is not None}
    for name, templates in (("original", TEMPLATES), ("changed", changed)):
        _named_templates(tmp_path / name, templates, files=files)
    before, after = (tokenizer_digest(f"{tmp_path / name}") for name in ("original", "changed"))
    assert before and after and before != after


def test_tokenizer_digest_ignores_its_config_when_templates_are_in_files(tmp_path: Path) -> None:
    _named_templates(tmp_path, {"tool_use": "{{ tools }}"}, files=True)
    before = tokenizer_digest(f"{tmp_path}")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "x"}))
    assert tokenizer_digest(f"{tmp_path}") == before, "transformers ignores it too"


@pytest.mark.parametrize("count", [1, 3])
def test_exported_files_have_the_umasks_mode_when_weights_fill_some_files(
    count: int, tmp_path: Path, new_file_mode: int
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "config.json").chmod(0o600)
    stream = iter([[(str(number), torch.zeros(4))] for number in range(count)])
    write_model_directory(stream, tmp_path / "copy", source, dtype="float32")
    files = [path for path in (tmp_path / "copy").rglob("*") if path.is_file()]
    assert len(files) == count + (1 if count == 1 else 2), files
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {new_file_mode}


def test_buckets_keep_the_order_and_their_size_limit() -> None:
    sizes = [3, 3, 3, 20, 1, 9]
    tensors = [(str(i), torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    filled = list(buckets(iter(tensors), 10))
    assert [[name for name, _ in bucket] for bucket in filled] == [
        ["0", "1", "2"],
        ["3"],
        ["4", "5"],
    ]

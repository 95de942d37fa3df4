"""Tests that any safetensors files next to a config.json are either readable completely, or refused
with a message of one line."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatron_async.checkpoint.convert import hf_to_megatron
from megatron_async.errors import UserError
from megatron_async.models.families import read_architecture
from megatron_async.models.model_files import (
    INDEX_FILE,
    SINGLE_FILE,
    SafetensorsDirectory,
    check_weights,
    expected_tensors,
)
from tests.fuzz import accepted, damaged, fuzzed, json_texts
from tests.inputs.model_directories import write_model


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("weights") / "undamaged", "qwen3")


@pytest.fixture
def folder(undamaged: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(undamaged, tmp_path / "model"))


def _assert_readable_if_accepted(folder: Path) -> None:
    """Assert that every tensor of accepted weights can be read completely."""
    architecture = read_architecture(folder)
    if accepted(lambda: check_weights(folder, architecture) or True):
        with SafetensorsDirectory(folder) as directory:
            for name, shape in expected_tensors(architecture):
                assert directory.read(name, 0, 0, shape[0]).shape == shape


def _header(file: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", file[:8])
    return json.loads(file[8 : 8 + length]), file[8 + length :]


def _with_header(text: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + data


@fuzzed(150)
@given(st.data())
def test_fuzzed_weights_are_readable_or_refused_when_bytes_change(
    undamaged: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = _scratch(undamaged, tmp_path_factory)
    file = (undamaged / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(data.draw(damaged(file)))
    _assert_readable_if_accepted(folder)


@fuzzed(250)
@given(st.data())
def test_fuzzed_weights_are_readable_or_refused_when_header_fields_change(
    undamaged: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Changes fields of a header and keeps the bytes after the header."""
    folder = _scratch(undamaged, tmp_path_factory)
    header, tail = _header((undamaged / SINGLE_FILE).read_bytes())
    texts = {name: json.dumps(entry) for name, entry in header.items()}
    name = data.draw(st.sampled_from(sorted(header)))
    match data.draw(st.sampled_from(["field", "entry", "rename", "remove"])):
        case "field":
            field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))
            value = data.draw(
                json_texts
                | st.sampled_from(['"F16"', '"I32"', '"F64"', '"F8_E4M3"', "[0, 0]", "[8, 4]"])
                | st.lists(st.integers(0, 2000), max_size=3).map(json.dumps)
            )
            fields = {key: json.dumps(old) for key, old in header[name].items()} | {field: value}
            texts[name] = "{" + ",".join(f'"{k}":{v}' for k, v in fields.items()) + "}"
        case "entry":
            texts[name] = data.draw(json_texts)
        case "rename":
            texts[data.draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=9))] = (
                texts.pop(name)
            )
        case "remove":
            del texts[name]
    text = "{" + ",".join(f"{json.dumps(k)}:{v}" for k, v in texts.items()) + "}"
    (folder / SINGLE_FILE).write_bytes(_with_header(text.encode("utf-8", "replace"), tail))
    _assert_readable_if_accepted(folder)


@fuzzed(150)
@given(st.data())
def test_fuzzed_weights_are_readable_or_refused_when_the_index_changes(
    undamaged: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = _scratch(undamaged, tmp_path_factory)
    shutil.copy(undamaged / SINGLE_FILE, folder)
    header, _ = _header((undamaged / SINGLE_FILE).read_bytes())
    texts = dict.fromkeys(header, json.dumps(SINGLE_FILE))
    name = data.draw(st.sampled_from(sorted(texts)))
    texts[name] = data.draw(
        json_texts
        | st.sampled_from(
            ['"../x"', '"nowhere.safetensors"', '"config.json"', '"."', '""', '"\\ud800"']
        )
    )
    index = data.draw(
        st.just('{"weight_map": {' + ",".join(f'"{k}":{v}' for k, v in texts.items()) + "}}")
        | json_texts.map(lambda text: f'{{"weight_map": {text}}}')
        | json_texts
    )
    (folder / INDEX_FILE).write_text(index, "utf-8", "surrogatepass")
    _assert_readable_if_accepted(folder)


def _scratch(undamaged: Path, factory: pytest.TempPathFactory) -> Path:
    """Return an emptied directory, shared by all examples, that contains only config.json."""
    folder = factory.getbasetemp() / "scratch"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copy(undamaged / "config.json", folder)
    return folder


Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda t: {k: v for k, v in t.items() if "1.mlp.up" not in k},
            r"model\.layers\.1\.mlp\.up_proj\.weight is missing; config\.json requires 2 layers",
        ),
        (
            lambda t: {**t, "model.norm.weight": torch.ones(7)},
            r"model\.norm\.weight has shape \(7,\); config\.json requires \(8,\)",
        ),
        (
            lambda t: {**t, "model.norm.weight": torch.ones(8, dtype=torch.int32)},
            r"model\.norm\.weight has data type I32; weights must be one of F64, F32, F16, BF16",
        ),
        (
            lambda t: {**t, "model.layers.0.self_attn.q_proj.bias": torch.zeros(4)},
            r"q_proj\.bias is unknown to family qwen3 with the 2 layers",
        ),
    ],
)
def test_check_weights_names_tensors_that_do_not_fit_the_config(
    folder: Path, change: Change, sentence: str
) -> None:
    save_file(change(load_file(folder / SINGLE_FILE)), folder / SINGLE_FILE)
    with pytest.raises(UserError, match=sentence):
        check_weights(folder, read_architecture(folder))


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _write_tied_with_head(folder: Path, head: torch.Tensor, dtype: torch.dtype) -> None:
    """Tie the model's head to its embedding in config.json, and nevertheless write `head` to a
    separate file."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = {name: t.to(dtype) for name, t in load_file(folder / SINGLE_FILE).items()}
    (folder / SINGLE_FILE).unlink()
    tensors.pop(HEAD, None)
    save_file(tensors, folder / "a.safetensors")
    save_file({HEAD: head}, folder / "b.safetensors")
    index = {"weight_map": {**dict.fromkeys(tensors, "a.safetensors"), HEAD: "b.safetensors"}}
    (folder / INDEX_FILE).write_text(json.dumps(index))


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        ((0, 1.5), torch.float32),
        ((-1, 1.0078125), torch.bfloat16),
        ((-1, float("nan")), torch.float16),
    ],
    ids=["first value", "last value", "NaN"],
)
def test_head_is_refused_when_it_differs_from_its_tied_embedding(
    family: str, change: tuple[int, float], dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", family)
    head = load_file(folder / SINGLE_FILE)[EMBEDDING].to(dtype)
    head.view(-1)[change[0]] = change[1]
    _write_tied_with_head(folder, head, dtype)
    sentence = f"{HEAD} differs from {EMBEDDING}, and .* has tie_word_embeddings true"
    with pytest.raises(UserError, match=sentence):
        check_weights(folder, read_architecture(folder))
    with pytest.raises(UserError, match=sentence):
        hf_to_megatron(folder, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_head_is_refused_when_its_shape_differs_from_its_tied_embedding(folder: Path) -> None:
    _write_tied_with_head(folder, torch.ones(3, 8), torch.float32)
    with pytest.raises(UserError, match=f"{HEAD} differs from {EMBEDDING}"):
        check_weights(folder, read_architecture(folder))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_is_accepted_when_it_equals_its_tied_embedding(
    folder: Path, dtype: torch.dtype
) -> None:
    _write_tied_with_head(folder, load_file(folder / SINGLE_FILE)[EMBEDDING].to(dtype), dtype)
    check_weights(folder, read_architecture(folder))


@pytest.mark.parametrize("kept", [0, 7, 8, 100, -1])
def test_check_weights_names_a_truncated_file(folder: Path, kept: int) -> None:
    file = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(file[:kept])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        check_weights(folder, read_architecture(folder))


def test_check_weights_opens_every_shard_of_the_index(folder: Path) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    (folder / SINGLE_FILE).unlink()
    names = sorted(tensors)
    files = {f"model-{i}.safetensors": names[i::2] for i in range(2)}
    for file, contained in files.items():
        save_file({name: tensors[name] for name in contained}, folder / file)
    weight_map = {name: file for file, contained in files.items() for name in contained}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    architecture = read_architecture(folder)
    check_weights(folder, architecture)

    weight_map[names[0]] = "model-1.safetensors"
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=r"in model-1\.safetensors, which does not contain it"):
        check_weights(folder, architecture)

    (folder / "model-1.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-1\.safetensors is missing"):
        check_weights(folder, architecture)

"""Tests which text of a response is its code, with CommonMark's fences and models' variants."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from megatron_async.scoring.rewards.code_blocks import (
    PYTHON_TAGS,
    CodeBlock,
    code_blocks,
    code_candidates,
)


def code_of(response: str, *tags: str) -> str:
    """Return the most likely code of a response, with `tags` preferred."""
    return code_candidates(response, tags)[-1]


@pytest.mark.parametrize(
    ("info", "tag"),
    [
        ("", ""),
        ("python", "python"),
        ("c++", "c++"),
        ("C#", "c#"),
        ("objective-c", "objective-c"),
        ('cpp title="a.cpp"', "cpp"),
        ("{python}", "python"),
        ("{.python .numberLines}", "python"),
        ("python:f.py", "python"),
        ("rust,no_run", "rust"),
        (" python3 {cmd=true}", "python3"),
        ("{r, echo=FALSE}", "r"),
        ("\r", ""),
    ],
)
@pytest.mark.parametrize("marks", ["```", "~~~", "````"])
def test_code_blocks_tag_is_first_word_of_info_string(info: str, tag: str, marks: str) -> None:
    text = f"Here it is:\n{marks}{info}\nx = 1\n{marks}\nIt ends at once."
    assert code_blocks(text) == [CodeBlock(tag, "x = 1")]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a\n```python\nx\n```\nb\n```\ny\n\nz\n```\n", "y\n\nz"),
        ("<think>```\nno\n```</think>plain", "plain"),
        ("```py\ncut off", "cut off"),
        ("Use ```f()``` so:\n```\nf()\n```", "f()"),
        ("~~~python\nx = '''\n```\n'''\n~~~\n", "x = '''\n```\n'''"),
        ("````\n```\nx\n```\n````", "```\nx\n```"),
        (
            "1. So:\n   ```python\n   def f():\n       return 1\n   ```\nDone",
            "def f():\n    return 1",
        ),
        ("1. So:\n   ```python\ndef f():\n    return 1\n   ```\nDone", "def f():\n    return 1"),
        ("- ```\n  x\n  ```\n", "x"),
        ("> ```python\n> if x:\n>     y\n> ```\n\nSo it is.", "if x:\n    y"),
        ("> ```\n> x\n\nSo it is.", "x"),
        ("    ```python\n    x\n    ```\nDone", "x"),
        ("```python\n    return 1\n```", "    return 1"),
        ("Here it is: ```python\nx\n```\nDone", "x"),
        ("<answer>```python\nx\n```</answer>", "x"),
        ("<answer>\n```python\nx\n```\n</answer>", "x"),
        ("**Solution:** ```\nx\n```\nDone", "x"),
        ("I write it in ```python\n```python\nx\n```\nDone", "x"),
        ("```python\nx\n```\nThe empty one:\n```\n```", "x"),
        ("```python\r\nx\r\n```\r\nDone", "x\r"),
        ("Here is the code ```python\nx\n```\nDone", "x"),
        ("```python\nx\n``` That is all.\nDone", "x"),
        ("```python\nx\n```.\nDone", "x"),
        ("\ufeff```python\nx\n```\nDone", "x"),
        ("So: **```python\nx\n```**", "x"),
    ],
)
def test_code_candidates_ends_with_last_block_in_forms_that_models_write(
    text: str, code: str
) -> None:
    assert code_of(text) == code


@pytest.mark.parametrize("tag", ["text", "output", "TXT", "console"])
def test_code_candidates_skips_output_block_when_another_block_exists(tag: str) -> None:
    text = f"```python\nx\n```\nIt prints:\n```{tag}\n5\n```\n"
    assert code_of(text) == "x" and code_of(text, *PYTHON_TAGS) == "x"
    assert code_of(f"```{tag}\n5\n```") == "5"


def test_code_candidates_prefers_blocks_with_wanted_tag_or_no_tag() -> None:
    text = "```python\nx\n```\nRun it:\n```bash\npython f.py\n```\n"
    assert code_of(text, *PYTHON_TAGS) == "x"
    assert code_of(text) == "python f.py"
    assert code_of("```cpp\nx\n```\n```python\ny\n```", "cpp", "c++") == "x"
    assert code_of("```cpp\nx\n```\n```\ny\n```", "cpp") == "y"
    assert code_of("```bash\nx\n```", *PYTHON_TAGS) == "x"


@pytest.mark.parametrize("indent", ["", "  ", "    "])
@pytest.mark.parametrize("quotes", ['"""', "'''"])
def test_code_block_continues_when_fence_is_inside_docstring(indent: str, quotes: str) -> None:
    lines = [quotes, "Double it.", "```", "f(2)", "```", quotes, "return 2 * x"]
    body = "\n".join(f"{indent or ' '}{line}" for line in lines)
    if not indent:
        body = body.replace(" ```", "```")
    code = f"def f(x):\n{body}"
    assert code_of(f"So:\n```python\n{code}\n```\nIt doubles.\n```text\n4\n```") == code


def test_code_block_ends_at_fence_when_its_string_never_ends() -> None:
    text = '```python\ns = """draft\n```\nBetter:\n```python\ndef f():\n    """F."""\n```\n'
    assert code_of(text) == 'def f():\n    """F."""'


_LINES = st.sampled_from(
    ["```", "~~~", "````", "```python", "~~~ c++", "   ```", "```a`b", "x = 1", "", "prose.", "``"]
)


@settings(deadline=None)
@given(lines=st.lists(_LINES, max_size=12))
@example(lines=["~~~ c++", "```", "~~~", "```python", "x"])
def test_code_blocks_equal_those_of_commonmark_parser(lines: list[str]) -> None:
    reference = MarkdownIt("commonmark").parse("\n".join(lines))
    expected = [token.content for token in reference if token.type == "fence"]
    found = [f"{block.code}\n" * bool(block.code) for block in code_blocks("\n".join(lines))]
    assert [code.rstrip("\n") for code in found] == [code.rstrip("\n") for code in expected]

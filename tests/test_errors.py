"""What an error message may do to a terminal: be read."""

from __future__ import annotations

import unicodedata

import pytest
from forked import run_taper
from tiny import byte_tokenizer

from taper.errors import MAX_CHARACTERS, Names, RequestError, TaperError, TaperWarning
from taper.models.tokenizer import Tokenizer
from taper.policy import DepthPolicy

CONTROLS = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0)]))
BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mred\x1b[0m b", "ared b"),
        ("a\x1b]0;title\x07b \x1b]8;;http://x\x1b\\link", "ab link"),
        ("a\x9b2Jb\x9d0;title\x9cc", "abc"),
        ("cut off \x1b[31", "cut off \ufffd[31"),
        ("\x1b]0;never ended", "\ufffd]0;never ended"),
        ("over\bwritten\r\n\tlines\u2028here", "over\ufffdwritten lines here"),
        ("evil\u202efdp.exe", "evil\ufffdfdp.exe"),
        ("file \udcff", "file \ufffd"),
        ("naïve 日本 😀", "naïve 日本 😀"),
    ],
)
def test_error_and_warning_show_text_and_nothing_else(text, shown):
    assert str(TaperError(text)) == str(TaperWarning(text)) == shown
    assert str(TaperError("m", hint=text)) == f"m ({shown})"


def test_no_control_character_or_direction_override_is_left():
    line = str(TaperError("a".join(CONTROLS + BIDI)))
    assert "C" not in {unicodedata.category(character)[0] for character in line}


def test_long_text_is_cut():
    assert str(TaperError("x" * 10_000_000, "mend it")) == "x" * (MAX_CHARACTERS - 3) + "... (mend it)"


def test_command_line_shows_a_hostile_file_name_safely(tmp_path):
    path = tmp_path / "\x1b[2Jno\u202emodel\x07.gguf"
    path.write_bytes(b"not a model")
    shown = run_taper("generate", "--model", path, "hi")[2].decode()
    assert shown.endswith("\n")
    assert shown.strip().isprintable()
    assert "not a GGUF file" in shown


def test_template_that_raises_with_escapes_is_shown_safely():
    tokenizer = Tokenizer(byte_tokenizer(), frozenset(), "{{ raise_exception('\x1b]0;owned\x07\x1b[5mno') }}", {})
    with pytest.raises(TaperError, match=r"template.*: no$"):
        tokenizer.render([{"role": "user", "content": "hi"}])


def test_policy_name_that_is_not_plain_text_is_refused():
    text = DepthPolicy.middle_first(6, 0.9).to_json().replace('"num_hidden', '"name": "\\u001b[31m", "num_hidden')
    with pytest.raises(TaperError, match="name"):
        DepthPolicy.from_json(text)


def test_errors_speak_of_arguments_in_python_and_of_options_on_the_command_line(monkeypatch):
    error = RequestError("--max-kl is -1", "raise --context; no-such a--b, --")
    assert str(error) == "max_kl is -1 (raise context; no-such a--b, --)"
    assert str(TaperWarning("leave out --dtype")) == "leave out dtype"
    monkeypatch.setattr(Names, "are_options", True)
    assert str(error).startswith("--max-kl is -1 (raise --context")

"""The table of an examination, as a terminal gets it."""

import io

from rich.console import Console

from dapo_jax.doctor.check import Finding, Found
from dapo_jax.doctor.output import show


def test_what_a_terminal_would_obey_is_written_out():
    """Prompts, responses and errors that quote them are others' text: ESC would colour the screen, the other mark turn the line around."""
    evil = "\x1b[31m\u202e"
    found = Found(message=f"said {evil}", remedy=f"remedy {evil}", details=(f"prompt 0: {evil}",))
    out = io.StringIO()
    show([Finding(name="prompts", found=found, seconds=0.0)], Console(file=out, width=200), configured=True)
    assert not {"\x1b", "\u202e"} & set(out.getvalue())
    assert out.getvalue().count("\\x1b[31m\\u202e") == 3


def test_tokens_and_passwords_are_not_printed(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    said = "hf_0123456789 at https://me:word@host"
    out = io.StringIO()
    findings = [Finding(name="model", found=Found(message=said, remedy=said, details=(said,)), seconds=0.0)]
    show(findings, Console(file=out, width=200), configured=True)
    assert out.getvalue().count("$HF_TOKEN at https://me:...@host") == 3

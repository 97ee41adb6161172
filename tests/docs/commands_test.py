"""The page of commands lists every command and option of the parsers."""

import argparse

from _made import commands

from dapo_jax import cli


def test_every_command_and_every_option_is_on_the_page():
    page = commands.markdown()
    for parser in commands.parsers():
        section = page.split(f"## `{parser.prog}`\n")[1].split("\n## ")[0]
        assert parser.description in section
        for action in parser._actions:
            if not isinstance(action, argparse._HelpAction):
                assert all(
                    f"{option}" in section for option in action.option_strings or [commands._value(action)]
                )
                assert (action.help or "").replace("<", r"\<") in section


def test_the_page_lists_the_commands_of_the_command_line():
    [kinds] = [action for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction)]
    found = {parser.prog.split()[1] for parser in commands.parsers()}
    assert found == set(kinds.choices)
    assert "dapo-jax data show" in {parser.prog for parser in commands.parsers()}

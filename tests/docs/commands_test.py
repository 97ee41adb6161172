"""The page of commands lists every command and option of the parsers."""

import argparse

from _made import commands

from dapo_jax import cli


def test_the_page_lists_the_commands_of_the_command_line():
    [kinds] = [action for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction)]
    found = {parser.prog.split()[1] for parser in commands.parsers()}
    assert found == set(kinds.choices)
    assert "dapo-jax data show" in {parser.prog for parser in commands.parsers()}

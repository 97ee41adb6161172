"""One process for all malformed inputs of a session, and a folder around each to see what is written where."""

import shutil

import pytest

from tests.malformed.commands import Commands, listing, problem_of


@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    made = Commands(tmp_path_factory.mktemp("home"))
    yield made
    made.close()


class Survives:
    """Runs a command on files that are wrong: it must say so in a few lines, and write where it may alone."""

    def __init__(self, commands, around):
        self._commands, self._around = commands, around
        self.anew()

    def anew(self):
        """Empties the folders."""
        shutil.rmtree(self._around, ignore_errors=True)
        self._folder = self._around / "here"
        self._folder.mkdir(parents=True)
        (self._around / "mine.txt").write_text("not to be touched")

    def __call__(self, make, *argv, may_write=(), **how):
        make(self._folder)
        places = {
            self._around: [f"here/{name}" for name in may_write],
            self._commands.home: [".cache/dapo_jax"],
        }
        before = {place: listing(place) for place in places}
        outcome = self._commands.run(self._folder, *argv, **how)
        problem = problem_of(outcome)
        assert not problem, problem
        for place, allowed in places.items():
            old, new = before[place], listing(place)
            changed = {path for path in old.keys() | new.keys() if old.get(path) != new.get(path)}
            strange = {path for path in changed if not path.startswith(tuple(allowed)) and path != ".cache"}
            assert not strange, strange
        return outcome


@pytest.fixture
def survives(commands, tmp_path):
    return Survives(commands, tmp_path / "around")

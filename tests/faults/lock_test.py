"""Two starts of one run, as processes: the second is refused, and the folder is free once the first is gone, however it went."""

import pytest

from tests.faults.micro import make_run


@pytest.mark.slow
def test_a_second_start_is_refused_and_a_killed_first_one_is_taken_over(tmp_path):
    run = make_run(tmp_path, steps=300)
    first = run.start()
    try:
        run.wait_for(first, lambda: run.steps(), within_s=600)
        for options in ((), ("--resume",)):
            second = run.start(*options)
            output, _ = second.communicate(timeout=600)
            assert second.returncode == 2
            assert f"a run is at work there, by process {first.pid} on" in output
            assert "Traceback" not in output
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    saved = max(run.steps())
    run.finish("--resume", f"steps={saved + 1}")
    assert max(run.steps()) == saved + 1

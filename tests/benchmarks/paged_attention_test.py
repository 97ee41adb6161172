"""The benchmark of the paged kernel, with an interpreted kernel and a tiny shape."""

from benchmarks import paged_attention


def test_the_bytes_of_qwen3_by_hand():
    """256 slots x 264 tokens x 8 heads x 128 numbers of keys and of values are 276,824,064 bytes in bfloat16. int8 has half, and 4 bytes of a scale per head."""
    assert paged_attention.bytes_of("qwen3-0.6b", 256, 264, "bfloat16") == 276_824_064
    assert paged_attention.bytes_of("qwen3-0.6b", 256, 264, "int8") == 138_412_032 + 2 * 256 * 264 * 8 * 4


def test_it_runs_on_a_cpu(capsys):
    paged_attention.main(["--models", "tiny", "--slots", "2", "--tokens", "40", "--dtypes", "bfloat16"])
    row = capsys.readouterr().out.splitlines()[-1].replace("|", " ").split()
    assert (row[:4], float(row[4]) > 0, row[5]) == (["tiny", "2", "40", "bfloat16"], True, "-")

"""The grader `gsm8k`: the number behind `####`, as the references of GSM8K give it, or else the last number of the response.

A file of its own: each grader has its rule to itself.
"""

import re
from decimal import Decimal

from dapo_jax.dapo.rollouts import Verdict

_NUMBER = re.compile(r"(?:(?<![\w).])-)?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", re.ASCII)
"""A minus counts where it is no subtraction; thousands may be set apart by commas, and a dollar sign may come first."""

_MARK = "####"


def gsm8k_grader(response: str, answer: str) -> Verdict:
    """Compares numbers: 72, 72.0 and $72 are equal, and so are 1,200 and 1200.

    The reference is a number, or a worked solution that ends in `#### number` as in the dataset's files
    (Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems", https://arxiv.org/abs/2110.14168).

    >>> [gsm8k_grader(response, "72").correct for response in ("3 * 24 = 72\\n#### 72", "That is $72.00.", "#### 7")]
    [True, True, False]

    Raises:
        ValueError: the reference has no number.
    """
    expected = _numbers(answer.rpartition(_MARK)[2])
    if not expected:
        raise ValueError(f"the grader gsm8k needs a reference with a number; got {answer!r}")
    _, marked, after = response.rpartition(_MARK)
    found = _numbers(after)
    if not found:
        where = f"after the last {_MARK!r}" if marked else "in the response"
        return Verdict(correct=False, reason=f"no number {where}")
    extracted = found[0] if marked else found[-1]
    where = f"after the last {_MARK!r}" if marked else "the last number"
    correct = Decimal(extracted) == Decimal(expected[-1])
    return Verdict(
        correct=correct,
        extracted=extracted,
        reason=f"{where}: equal" if correct else f"{where}: expected {expected[-1]}",
    )


def _numbers(text: str) -> list[str]:
    return [found.replace(",", "").replace("$", "") for found in _NUMBER.findall(text)]

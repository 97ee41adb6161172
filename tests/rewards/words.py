"""English words for tests of the graders: 3,000 chosen at random, and words that change a number."""

from pathlib import Path

ENGLISH_WORDS = [
    word
    for line in (Path(__file__).parent / "english_words.txt").read_text().splitlines()
    if not line.startswith("#")
    for word in line.split()
]
_CHANGING = """
    not isn't aren't never neither nor no without except minus plus negative times half halves third thirds quarter
    quarters fourths eighths ninths tenths hundredths thousandths dozen dozens score gross pair pairs hundred
    hundreds thousand thousands lakh lakhs crore million millions billion trillion grand k K M bn mn odd even prime
    reciprocal inverse square squared cube cubed root double twice triple least most below above under over between
    than more less fewer base binary modulo mod divided multiplied factorial opposite minutes' one two seven ten
    twenty zero five-eighths non
"""
NUMBER_WORDS = _CHANGING.split()

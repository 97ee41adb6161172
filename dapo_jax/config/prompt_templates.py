"""Prompt templates by name: what `data.prompt_template` may name instead of a text of its own."""

TEMPLATES = {
    "dapo": (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
        "(without quotes) where $Answer is the answer to the problem.\n\n{prompt}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    ),
}
"""`dapo`: the instructions of the DAPO recipe, word by word."""

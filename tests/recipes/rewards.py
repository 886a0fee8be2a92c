"""A reward function for the tests of GRPO."""


def count_words(completions: list[str], **columns: object) -> list[float]:
    """Return the number of words of each completion, so that rewards differ."""
    return [float(len(completion.split())) + len(completion) / 100 for completion in completions]

import re


def close_number(completions, answer, **kwargs):
    """1 for the right number, less the farther the first number is away, 0 without one."""
    scores = []
    for completion, right in zip(completions, answer, strict=True):
        numbers = re.findall(r"\d+", completion[0]["content"])
        scores.append(1 / (1 + abs(int(numbers[0][:4]) - int(right))) if numbers else 0.0)
    return scores


def short(completions, **kwargs):
    return [-len(completion[0]["content"]) / 100 for completion in completions]

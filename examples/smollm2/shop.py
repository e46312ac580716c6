"""A word problem that the policy solves with a calculator, in two turns."""

from __future__ import annotations

import re
from operator import add, mul, sub

from verl_like import Environment, Observation, TrajectoryEnd

CALL = re.compile(r"calc (\d{1,4} ?[-+*] ?\d{1,4})")


class Shop(Environment):
    """The reward is 1 for the right number after a call, or 0.3 for the right call alone.

    A wrong call has no reward, because the policy would learn to write any call. `result` is a
    column of the prompt's row.
    """

    def reset(self, result: int) -> None:
        """Start a trajectory."""
        self.result, self.called, self.credit = result, False, 0.0

    def step(self, text: str) -> Observation | TrajectoryEnd:
        """Answer a call in the first turn with its result; score the second turn."""
        call = CALL.fullmatch(text.strip())
        if call and not self.called:
            result = calculate(call[1])
            self.called, self.credit = True, 0.3 * (result == self.result)
            return Observation(str(result))
        is_right = self.called and text.strip().removesuffix(".") == str(self.result)
        return TrajectoryEnd(reward=1.0 if is_right else self.credit)


def calculate(calculation: str) -> int:
    """Return the sum, difference or product of two numbers."""
    a, sign, b = re.split(r" ?([-+*]) ?", calculation)
    return {"+": add, "-": sub, "*": mul}[sign](int(a), int(b))

"""An environment: the policy has two attempts to solve a row of data.jsonl."""

from megatron_async.environments import Answer, Step


class TwoAttempts:
    def reset(self, prompt: str, answer: str, **row) -> str:
        self.answer, self.attempts = answer, 0
        return prompt

    def step(self, answer: Answer) -> Step:
        self.attempts += 1
        if answer.text.rpartition("#")[2].strip() == self.answer:
            return Step(reward=1.0 / self.attempts, done=True)
        return Step("Wrong. Try again.", done=self.attempts == 2)

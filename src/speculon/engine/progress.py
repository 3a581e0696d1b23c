"""What was written of a request so far, and whether another engine can write the rest."""

from __future__ import annotations

from dataclasses import replace

from speculon.core.config import AcceptanceSetting
from speculon.core.types import acceptance_rule
from speculon.decoding.sequence import Event
from speculon.engine.messages import Add


class RequestProgress:
    """One request, and what was written of each sample that has not ended."""

    def __init__(self, add: Add, acceptance: AcceptanceSetting = "auto"):
        self.add, self.admitted = add, False
        self.written = {sample: [*tokens] for sample, tokens in (add.written or {}).items()}
        if add.written is None:
            self.written = {sample: [] for sample in range(add.params.n)}
        own = add.speculation.rule(acceptance) if add.speculation else acceptance
        rule = acceptance_rule(own, add.params)
        # then its tokens are a function of prompt, parameters and seed
        self._repeats = rule == "matching" and (add.params.greedy or add.params.seed is not None)
        self._begun = False  # whether anything came of it
        self._resumed, self._gained = False, False  # and whether tokens came since

    @property
    def resumable(self) -> bool:
        """Whether another engine would write the rest as the lost one would have.

        Not after a second loss without a token between: such a request may be what ends the engine.
        """
        return (not self._begun or self._repeats and self._has_prompt) and (self._gained or not self._resumed)

    @property
    def _has_prompt(self) -> bool:
        """Whether all log-probabilities of the prompt came, if any are due: the first sample brings them."""
        return self.add.params.prompt_logprobs is None or self.written.get(0) != []

    def note(self, event: Event) -> None:
        self.written[event.sample] += event.tokens
        self._begun = self._gained = True
        if event.finish is not None:
            del self.written[event.sample]

    def rest(self) -> Add:
        """The message that asks for the rest."""
        self._resumed, self._gained = True, False
        if not self._begun:
            return self.add
        params = self.add.params.model_copy(update={"prompt_logprobs": None})
        return replace(self.add, params=params, written=self.written)

"""The prompts of `speculon demo`: two questions, and a file that is asked back with a small change."""

from typing import Final, NamedTuple


class Prompt(NamedTuple):
    title: str
    text: str
    max_tokens: int


FILE: Final = '''class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        return self.balance

    def __repr__(self):
        return f"Account({self.owner!r}, {self.balance})"'''

PROMPTS: Final = (
    Prompt("A question", "Why is the sky blue? Explain it to a ten-year-old.", 96),
    Prompt("A story", "Write a short story about a lighthouse keeper who finds a letter in a bottle.", 96),
    Prompt(
        "An edit",
        f"Write the same class with the name Wallet. Show the whole code again.\n\n```python\n{FILE}\n```",
        160,
    ),
)

"""Train the demo's block drafter: `python recipes/demo/dflash.py --target TARGET --out FOLDER`.

It learns from the target's greedy continuations alone: a block is drafted before its tokens are known, and
on other texts these are not the ones that the target would write. Then `speculon train dspark` runs on them.
"""

from dflash_card import finish
from eagle3 import OPTIONS, train

OWN = {name: value for name, value in OPTIONS.items() if name != "ttt"} | {
    "block": 6,
    "layers": 3,
    "kv-heads": 4,
    "intermediate": 576,
    "gamma": 3,
    "anchors": 64,
    "loss": "kl",
    "markov-head": "rnn",
    "confidence": 0,
    "prompt-weight": 0,
    "eval-every": 400,
}
TEXTS = {"texts": 5000, "temperatures": (0.0,), "text_tokens": 48, "file_tokens": 0}

if __name__ == "__main__":
    train("dspark", OWN, __doc__, finish, TEXTS)

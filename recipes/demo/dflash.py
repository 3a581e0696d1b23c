"""Train the demo's block drafter: `python recipes/demo/dflash.py --target TARGET --out FOLDER`.

Its data are laid out like those of the EAGLE-3 head; then `speculon train dflash` runs on them.
"""

from dflash_card import finish
from eagle3 import OPTIONS, train

OWN = {name: value for name, value in OPTIONS.items() if name != "ttt"} | {
    "block": 8,
    "layers": 3,
    "kv-heads": 4,
    "intermediate": 576,
    "gamma": 3,
    "anchors": 64,
    "eval-every": 200,
}

if __name__ == "__main__":
    train("dflash", OWN, __doc__, finish)

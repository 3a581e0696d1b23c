"""The compiling process without its low priority: beside other tests it would get no time at all."""

from __future__ import annotations

from speculon.runtimes.torch.model import compile_process

if __name__ == "__main__":
    compile_process.yield_to_others = lambda: None
    compile_process.main()

"""llama.cpp's converter, for a tokenizer that it does not know: python to_gguf.py LLAMA_CPP_FOLDER MODEL
OUT.gguf f32

The converter recognises tokenizers by a hash of what they make of a test text, and refuses all others. Ours
splits words as GPT-2 does, closely enough: the engines exchange token ids, so its splitting is never asked
for.
"""

from __future__ import annotations

import sys

llama_cpp, model, out, dtype = sys.argv[1:]
sys.path.insert(0, llama_cpp)

import convert_hf_to_gguf  # noqa: E402
from conversion.base import TextModel  # noqa: E402

TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
# else it is tried first, and wants one package more
TextModel._set_vocab_sentencepiece = TextModel._set_vocab_gpt2
sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", out, "--outtype", dtype]
convert_hf_to_gguf.main()

"""Texts whose token ids are compared: code, numbers, white space, scripts, signs and special tokens."""

TEXTS = [
    "",
    "Hello, world! How are you today?",
    " leading space, two trailing  ",
    "\n\n\nblank lines first\n\nand last\n\n",
    (
        "def add(a, b):\n    return a + b\n\n\nclass Stack:\n    def __init__(self):\n        self.items "
        "= []\n"
    ),
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i] * 2;\n\t\tif (!done) { continue; }\n}\n",
    "[\n    1,\n    22,\n        333\n]\n",
    '{"name": "x", "values": [1, 2.5, -3e10, null, true], "nested": {"a": {}}}',
    "SELECT id, name FROM users WHERE age >= 21 AND name LIKE 'A%' ORDER BY 2 DESC;",
    ("fn main() -> Result<(), Box<dyn Error>> {\n    let v: Vec<u8> = vec![0; 10];\r\n    Ok(())\r\n}\r\n"),
    "#include <stdio.h>\r\nint main(void){return 0;}\r\n\r\n/* end */",
    '<html><body class="a b">\n  <p>Text &amp; more</p>\n</body></html>',
    "let f = async () => { const {a, ...rest} = await g(`x${1 + 1}`); };",
    "snake_case_name camelCaseName PascalCaseName SCREAMING_CASE HTTPServer2Go iOS17 aB Ab AB",
    "$PATH=/usr/bin:~/bin; echo \"$HOME\" | grep -E '^a+$' > out.txt 2>&1",
    "0 1 12 123 1234 12345 123456 1234567 12345678 123456789 1234567890123456789",
    "3.14159 1,000,000.00 2026-11-28T17:33:05Z 0x1F 1e-9 50% #42 v1.2.3 192.168.0.1 a1b22c333d4444",
    "  12   345\n 6789\t01 23   4567890 x99999y ½123 12½ Ⅷ7 ²³ １２３４ ٣٤٥٦ ४५६७",
    "| a | b |\n|---|---:|\n| 1 | 2.50 |\n| 10 | 25.00 |\n| 100 | 250.00 |\n",
    "a\tb\t\tc\t\t\td\n\te\n \t f \t \n",
    (
        "   x       y                    z                                                               "
        "       \n                                 end     "
    ),
    "one\r\ntwo\rthree\n\rfour\r\n\r\nfive\n\n\n\n\nsix \n \n  \nseven",
    ("I'm you're he's we've I'll she'd don't I'M YOU'RE HE'S WE'VE I'LL SHE'D DON'T 'S 'tis 'Re o'clock x'Y"),
    "It’s “quoted” ‘so’ — dash–dash… «guillemets» 'a' \"b\" (c) [d] {e} <f>",
    (
        "wait... what?! no!!! ~~~ *** --- === ??? ;;; ::: ,,, ``` ''' \"\"\" /// \\\\\\ @@@ ### $$$ %%% ^"
        "^^ &&& ___ +++"
    ),
    "Ça va être été naïve façon ÉCOLE École ÜBERgrößenträger Straße ŁÓDŹ Ærø İstanbul ıŞık ǅungla",
    "Привет, мир! Как дела? ПРИВЕТ МирДом Ёжик їжак 1941—1945 гг. №5",
    "Γειά σου Κόσμε ΑΘΗΝΑ σίγμας Ελλάδα’ς βΒ ᾳ ᾼ",
    "שלום עולם, מה שלומך? נִקּוּד",
    "مرحبا بالعالم، كيف حالك؟ السَّلَامُ عَلَيْكُمْ ۱۲۳۴",
    "नमस्ते दुनिया। आप कैसे हैं? हिन्दी १२३",
    "สวัสดีชาวโลก ภาษาไทย ๑๒๓ ກຂຄ ភាសាខ្មែរ မြန်မာ",
    "你好，世界！今天天气怎么样？我在2026年11月28日写了123456个字。",
    "こんにちは世界。カタカナとひらがな、漢字ABC１２３ﾊﾝｶｸ々〆",
    "안녕하세요 세계! 한국어 텍스트입니다. ㄱㄴㄷ ㅋㅋㅋ 123원",
    "ㄅㄆㄇ 繁體中文「引號」《書名》、。〜！？…—“”‘’；：（括號）𠮷𡃁 豈㐀䶿",
    "éà ñö über Z͑ͫ̓àlgo x́̂̃Y ́start",
    "😀😃 👍🏽 👨\u200d👩\u200d👧\u200d👦 🇩🇪🇯🇵 ❤️ ☎︎ ✈️✈️ ok👌ok 🤷🏻\u200d♂️!",
    "∑_{i=0}^{n} x_i² ≤ ∞ → ∀ε>0 ∃δ: |x−y|<δ ⇒ f(x)≈π·r² ± ½ €5 £6 ¥7 °C §9 ©®™ ¬¦¶ µm Ω",
    (
        "a\u00a0b\u2003c\u3000d\u2028e\u200bf\ufeffg \u0085h\u000bi\u000cj\u0000k\u001fl\u007fm\u00adn "
        "\u00a0 \u3000\u3000x"
    ),
    "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
    (
        "<｜begin▁of▁sentence｜><｜User｜>What is 2+2?<｜Assistant｜>4<｜end▁of▁sentence｜> <s> "
        "x</s>y<unk>z <unused0>"
    ),
    ('a<tool_call>{"name": "f"}</tool_call>  b  <tool_call> \n<|endoftext|>\n\nc <|im_ end|> <|im_end|'),
    "'sabah 'TIMBER 'reçel 'metin 'llama 'velvet 'don 'xyz Ankara'da İzmir'deki HE'Squad we'REad",
    " hey hello heyhello Qwerty ?!?! <0x41><0x0A> ▁▁x▁y [EMPTY_3] [PAD7]",
]

# Ordinary text, whose tokens a language model expects.
PROSE = """\
The Thames is the longest river in England. It rises in Gloucestershire, flows through Oxford,
Reading and Windsor, and reaches the North Sea below London. For centuries it was the main road of
the country: coal, grain and timber came up with the tide, and in hard winters people held fairs on
the ice. Today the water is cleaner than it was for two hundred years, and seals have been seen as
far up as Richmond.

Here is a function in Python that returns the first n prime numbers:

```python
def primes(n):
    found = []
    number = 2
    while len(found) < n:
        if all(number % prime != 0 for prime in found):
            found.append(number)
        number += 1
    return found


print(primes(10))  # [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]
```

It tests each number against the primes that were found before it, and stops as soon as there are
enough.
"""

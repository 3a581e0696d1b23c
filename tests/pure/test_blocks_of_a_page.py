"""Pages whose blocks run while the site is built: outputs appear below them, and an error ends the build."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from html import unescape
from pathlib import Path

import pytest
from recipes.site.blocks import BlockFailed, as_html, fill

from tests.documents import ROOT

PAGE = """# A page

```python
print(6 * 7)
seen = [1]
```

```python
seen.append(2)
```

```bash
echo "a < b" && echo beside >&2
```

```sh
exit 1
```

```python
print(seen)
```
"""


def test_outputs_are_below_their_blocks_and_blocks_without_output_stay(tmp_path: Path) -> None:
    filled = fill(PAGE, tmp_path)
    shown = [line for line in filled.splitlines() if line.startswith("<pre")]
    assert shown == [
        '<pre class="output"><code>42</code></pre>',
        '<pre class="output"><code>a &lt; b',
        '<pre class="output"><code>&#91;1, 2]</code></pre>',
    ]
    assert "a &lt; b\nbeside</code></pre>" in filled
    without = [line for line in filled.splitlines() if "output" not in line and not line.endswith("</pre>")]
    assert "\n".join(without).split() == PAGE.split()
    assert filled.index("print(6 * 7)") < filled.index(">42<") < filled.index("seen.append(2)")


@pytest.mark.parametrize(
    ("block", "why"),
    [
        ("```python\nprint('so far')\n1 / 0\n```\n", r"(?s)so far.*ZeroDivisionError"),
        ("```python\nraise SystemExit(0)\n```\n", "SystemExit"),
        ("```bash\necho so far\nfalse\necho not reached\n```\n", r"(?s)so far\n\nended with 1"),
        ("```bash\nfalse | cat\n```\n", "ended with 1"),
        ("```bash\nspeculonn --help\n```\n", "ended with 127"),
    ],
)
def test_a_block_that_fails_fails_the_page(block: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(BlockFailed, match=why):
        fill(f"# A page\n\n{block}", tmp_path)


def test_the_command_that_the_build_runs_fails_with_its_block(tmp_path: Path) -> None:
    page, target = tmp_path / "page.md", tmp_path / "filled.md"
    command = [sys.executable, "-m", "recipes.site.blocks", str(page), str(target)]
    page.write_text("```bash\nexit 3\n```\n")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "ended with 3" in done.stderr and not target.exists()
    page.write_text("```bash\necho three\n```\n")
    subprocess.run(command, cwd=ROOT, check=True)
    assert ">three<" in target.read_text()


def test_what_a_shell_leaves_running_lives_to_the_end_of_the_page(tmp_path: Path) -> None:
    first, second = "sleep 60 > /dev/null &\necho $! > pid", "kill -0 $(cat pid)\necho alive"
    began = time.monotonic()
    filled = fill(f"```bash\n{first}\n```\n\n```bash\n{second}\n```\n", tmp_path)
    assert ">alive<" in filled and time.monotonic() - began < 30
    pid = int((tmp_path / "pid").read_text())
    for _ in range(500):
        if not runs(pid):
            return
        time.sleep(0.01)
    pytest.fail("it still runs")


def runs(pid: int) -> bool:
    """A killed process that nobody has waited for does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_shell_that_never_ends_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.site.blocks.SECONDS", 0.2)
    with pytest.raises(BlockFailed, match=r"it did not end within 0\.2 s"):
        fill("```bash\nsleep 60\n```\n", tmp_path)


def test_folders_of_the_machine_are_not_shown(tmp_path: Path) -> None:
    before = os.getcwd()
    filled = fill(f"```bash\npwd\n```\n\n```python\nprint({sys.prefix!r} + '/lib')\n```\n", tmp_path)
    shown = unescape(filled)
    assert "<code>~</code>" in shown and "<code>~/.venv/lib</code>" in shown and os.getcwd() == before


def test_markdown_in_an_output_is_text() -> None:
    shown = as_html("```python\n[a](b.md)\n~~~\n")
    assert "`" not in shown and "[" not in shown and "~" not in shown
    assert unescape(shown) == '<pre class="output"><code>```python\n[a](b.md)\n~~~</code></pre>'


def test_colours_of_a_terminal_are_kept() -> None:
    shown = as_html("plain \x1b[33mdraft\x1b[0m <end>\n")
    assert shown.startswith('<pre class="output"><code>plain <span style="color: ')
    assert shown.endswith('">draft</span> &lt;end&gt;</code></pre>')

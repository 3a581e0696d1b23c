"""Who owns which KV page. Integers only: the bytes live in `runtimes.torch.kv.store`.

A page is *used* (some sequence holds it), *cached* (nobody does, but its content is indexed and may be found
again) or *free*. Pages of one sequence are kept consecutive where possible, because a run of pages can be
read without a copy; so a starting sequence softly *claims* the run that it will grow into. A claim never
denies a page to anybody.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable

from speculon.core.types import ceil_div
from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.kv.draft_slots import DraftSlots
from speculon.runtimes.torch.kv.pages import GONE, Pages
from speculon.runtimes.torch.kv.reach import max_pages
from speculon.runtimes.torch.kv.slots import StateSlots

FREE, CLAIMED, TAKEN = 0, 1, 2
ROOT = 0  # the content id before the first page

# content id before, tokens (and numbers of images), those of a prompt where they are apart, adapter
PageKey = tuple[int, tuple[int, ...], int, str]


class BlockPool:
    """Page ownership, prefix index and eviction for `num_blocks` pages of `block_size` tokens. As `Space`, it
    counts tokens; the step, which takes pages, counts these.

    `slots` has the slots of recurrent states, which a sequence holds while it has committed tokens or runs;
    `draft_slots` has those of recurrent draft models, by method.
    With `prompts_apart` a prompt does not find pages of generated tokens: their bits may be others.
    A row reads at most `reach` positions before it (None: all), so a sequence keeps no page before these, and
    while it grows by at most `rows` in a step it holds a bounded number.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: bool = True,
        slots: StateSlots | None = None,
        prompts_apart: bool = False,
        reach: int | None = None,
        rows: int = 1,
    ):
        self.prompts_apart, self.reach, self.rows = prompts_apart, reach, rows
        self.slots = slots or StateSlots()
        self.draft_slots: dict[str, DraftSlots] = {}
        self.num_blocks, self.block_size, self.prefix_cache = num_blocks, block_size, prefix_cache
        self._pages: defaultdict[int, Pages] = defaultdict(Pages)  # by sequence id
        self._state = bytearray(num_blocks)  # FREE | CLAIMED | TAKEN (used or cached)
        self._refs = [0] * num_blocks
        self._num_taken = 0
        self._claims: dict[int, range] = {}  # sequence id -> pages it would like to grow into
        self._index: dict[PageKey, int] = {}
        self._key: dict[int, PageKey] = {}  # indexed page -> its key
        # indexed page -> content id: never reused, so an orphan is never found
        self._content: dict[int, int] = {}
        # indexed page -> drafting methods whose K and V fill it, too
        self._drafters: dict[int, set[str]] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # indexed pages that nobody uses, oldest first
        # sequence id -> (pages indexed so far, content id of the last)
        self._sealed: dict[int, tuple[int, int]] = {}
        # id of a waiting sequence -> the pages that it would begin with, and their content ids
        self._found: dict[int, dict[int, int]] = {}
        self._next_content = ROOT + 1

    def of(self, seq: Sequence) -> Pages:
        """The pages of a sequence, until it is closed."""
        return self._pages[seq.id]

    @property
    def available(self) -> int:
        """Pages that can be taken now, cached ones included."""
        return self.num_blocks - self._num_taken + len(self._cached)

    def missing(self, seq: Sequence, end: int) -> int:
        """Pages to take before positions below `end` can be written."""
        return max(0, ceil_div(end, self.block_size) - len(self.of(seq).table))

    def held(self, seq: Sequence) -> int:
        """Pages that a sequence has now."""
        pages = self.of(seq)
        return len(pages.table) - pages.released // self.block_size

    # as `runtimes.base.Space` says, in tokens

    @property
    def room(self) -> int:
        return self.available * self.block_size

    def most(self, length: int) -> int:
        return max_pages(length, self.rows, self.reach, self.block_size) * self.block_size

    def needed(self, seq: Sequence, end: int | None = None) -> int:
        if end is None:
            return self.most(len(seq.tokens)) - self.held(seq) * self.block_size
        return self.missing(seq, end) * self.block_size

    def open(self, seq: Sequence) -> int:
        """Gives a sequence without pages the longest cached prefix of its tokens; returns the tokens found,
        which are committed from now on.

        At least one token is left to compute, because its logits are needed. Where there are recurrent
        states, the prefix ends at a page that has a snapshot of these.
        """
        pages, size = self.of(seq), self.block_size
        assert not pages.table and seq.committed == 0
        found = [*self._find(seq)]
        del self._found[seq.id]
        pages.table = table = found[: self.slots.begin(seq, found, size)]
        for page in table:
            self._hold(page)
        self._sealed[seq.id] = len(table), self._content[table[-1]] if table else ROOT
        held = [self._drafters.get(page, set()) for page in table]
        for method in held[0] if held else ():
            lacking = (i for i, methods in enumerate(held) if method not in methods)
            pages.drafted[method] = size * next(lacking, len(held))
        committed = len(table) * size
        self._release_unread(pages, committed)
        self._claim(seq)
        return committed

    def cached(self, seq: Sequence) -> int:
        """Tokens of its prefix that are in pages now, before it is opened.

        What is found is remembered until it is opened or closed, so asking again reads new pages alone.
        """
        return len(self._find(seq)) * self.block_size

    def shares(self, seq: Sequence, other: Sequence) -> bool:
        """Whether another sequence is about to index the next page for one that is not open."""
        pages, size = self._find(seq), self.block_size
        start, end = len(pages) * size, (len(pages) + 1) * size
        if (
            not (self._looks(seq) and other.request.prefix_cache)
            or not other.committed < end < min(len(seq.tokens), len(other.tokens) + 1)
            or self._key_of(seq, start, ROOT) != self._key_of(other, start, ROOT)
        ):
            return False
        of_other = self._found.get(other.id, {})
        done, content = self._sealed.get(other.id, (len(of_other), last_content(of_other)))
        same = [ROOT, *pages.values()][done : done + 1] == [content]
        return same and seq.contents(done * size, start) == other.contents(done * size, start)

    def _looks(self, seq: Sequence) -> bool:
        """Whether a sequence begins with cached pages."""
        return self.prefix_cache and seq.request.prefix_cache and not seq.wants_prompt_logprobs

    def _find(self, seq: Sequence) -> dict[int, int]:
        """The indexed pages of its first tokens, all but the last token at most; with their content ids."""
        pages, size = self._found.setdefault(seq.id, {}), self.block_size
        if self._looks(seq):
            for start in range(len(pages) * size, (len(seq.tokens) - 1) // size * size, size):
                page = self._index.get(self._key_of(seq, start, last_content(pages)))
                if page is None:
                    break
                pages[page] = self._content[page]
        return pages

    def chunk(self, seq: Sequence, max_rows: int) -> int:
        """Rows of its next span, at most `max_rows`; 0 where the block of an image needs more.

        With snapshots, a span that does not reach the last token ends at a page boundary if it can.
        """
        rows = seq.request.images.whole_blocks(seq.committed, min(seq.pending, max_rows))
        if rows < seq.pending and self.slots.snapshots:
            aligned = (seq.committed + rows) // self.block_size * self.block_size - seq.committed
            return aligned if aligned > 0 else rows
        return rows

    def extend(self, seq: Sequence, end: int) -> None:
        """Takes the pages for positions below `end`; the caller has made sure that they are available."""
        table = self.of(seq).table
        for _ in range(self.missing(seq, end)):
            page = self._next_page(seq)
            assert self._refs[page] == 0
            self._take(page)
            self._refs[page] = 1
            table.append(page)

    def cut_to_committed(self, seq: Sequence) -> None:
        """Ends a step of a sequence, committed or not: indexes its full committed pages, so that a later
        prompt can find them, and gives back those beyond.
        """
        self._seal(seq)
        self._trim(seq, seq.committed)

    def _seal(self, seq: Sequence) -> None:
        if not (self.prefix_cache and seq.request.prefix_cache):
            return
        table, (done, content) = self.of(seq).table, self._sealed[seq.id]
        for i in range(done, seq.committed // self.block_size):
            key = self._key_of(seq, i * self.block_size, content)
            page = self._index.get(key)
            if page is None:  # the first of its content; a twin computed meanwhile stays out of the index
                page = self._index[key] = table[i]
                self._key[page] = key
                self._content[page] = self._next_content
                self._next_content += 1
            content = self._content[page]
            self._sealed[seq.id] = (i + 1, content)
            self.slots.keep(seq, (i + 1) * self.block_size, page)

    def _trim(self, seq: Sequence, committed: int) -> None:
        """Makes what drafters have read, and pages, end at the committed tokens: pages beyond are given back,
        last first. So are those that no layer reads again and, without any tokens, the slots of states.
        """
        pages, keep = self.of(seq), ceil_div(committed, self.block_size)
        pages.drafted = {method: min(done, committed) for method, done in pages.drafted.items()}
        for method, slots in self.draft_slots.items():
            pages.drafted[method] = slots.roll_back(seq, committed)
        while len(pages.table) > keep:
            if (page := pages.table.pop()) != GONE:
                self._drop(page, claimed_by=seq)
        self.slots.trim(seq, committed)
        if committed:
            self._release_unread(pages, committed)

    def close(self, seq: Sequence) -> None:
        """Takes all pages from a sequence, of which nothing is committed from now on; it may be opened again.

        What drafters have in them stays known, except of those with states, which go.
        """
        pages = self.of(seq)
        for method, slots in self.draft_slots.items():
            slots.release(seq)
            pages.drafted.pop(method, None)
        self._note_drafters(pages, len(pages.table))
        self._unclaim(seq)
        self._trim(seq, 0)
        self._pages.pop(seq.id, None)
        self._sealed.pop(seq.id, None)
        self._found.pop(seq.id, None)

    def check_integrity(self, running: Iterable[Sequence], waiting: Iterable[Sequence] = ()) -> None:
        """Raises AssertionError unless every page is used, cached or free, as the running sequences say."""
        refs, live = [0] * self.num_blocks, list(running)
        for seq in waiting:
            assert not self.of(seq).table, f"sequence {seq.id} waits and holds pages"
        self.slots.check_integrity(live)
        for method, slots in self.draft_slots.items():
            slots.check_integrity({seq.id: self.of(seq).drafted.get(method, 0) for seq in live})
        for seq in live:
            pages, gone = self.of(seq), self._unread(seq.committed)
            assert len(pages.table) >= ceil_div(seq.committed, self.block_size), (
                f"sequence {seq.id}: tokens without pages"
            )
            assert pages.released == gone * self.block_size, (
                f"sequence {seq.id}: {pages.released} tokens released"
            )
            assert pages.table[:gone] == [GONE] * gone, f"sequence {seq.id}: a page that no layer reads"
            for page in pages.table[gone:]:
                refs[page] += 1
        assert refs == self._refs, "page owners differ from the reference counts"
        taken = {page for page, state in enumerate(self._state) if state == TAKEN}
        assert taken == {page for page, n in enumerate(refs) if n} | set(self._cached), "a page leaked"
        assert all(refs[page] == 0 and page in self._key for page in self._cached)
        assert len(taken) == self._num_taken
        assert set(self._index.values()) == set(self._key) == set(self._content) >= set(self._drafters)
        assert all(self._index[key] == page for page, key in self._key.items())
        assert self.slots.pages <= set(self._key), "a snapshot without its page"
        holding = {number for number, pages in self._pages.items() if pages.table}
        ended = (self._sealed.keys() | self._claims.keys() | holding) - {seq.id for seq in live}
        assert not ended, f"sequences {ended} have ended and are remembered"
        assert not self._found.keys() & self._sealed.keys(), "an open sequence's prefix is remembered"
        prefixes = [page for pages in self._found.values() for page in pages.items()]
        assert set(prefixes) <= self._content.items(), "an evicted page is remembered"

    def _key_of(self, seq: Sequence, start: int, content: int) -> PageKey:
        """Of the full page of a sequence that begins at `start`, after a page of this content."""
        size, prompt = self.block_size, seq.request.prompt_len
        own = min(max(0, prompt - start), size) if self.prompts_apart else size
        return content, seq.contents(start, start + size), own, seq.request.adapter

    # pages, one by one

    def _hold(self, page: int) -> None:
        self._refs[page] += 1
        self._cached.pop(page, None)

    def _take(self, page: int) -> None:
        self._state[page] = TAKEN
        self._num_taken += 1

    def _unread(self, committed: int) -> int:
        """First pages of so many tokens that no layer reads again: a commit is never taken back."""
        return 0 if self.reach is None else max(0, committed - self.reach) // self.block_size

    def _release_unread(self, pages: Pages, committed: int) -> None:
        """Gives back these pages, last first; indexed ones stay cached."""
        first, last = pages.released // self.block_size, self._unread(committed)
        if last <= first:
            return
        self._note_drafters(pages, last)
        for i in reversed(range(first, last)):
            self._drop(pages.table[i])
            pages.table[i] = GONE
        pages.released = last * self.block_size

    def _note_drafters(self, pages: Pages, num_pages: int) -> None:
        """Remembers of the first pages which methods fill them; not of those that have left out tokens."""
        first = pages.released // self.block_size
        for method, done in pages.drafted.items():
            for page in pages.table[first : min(num_pages, done // self.block_size)]:
                if page in self._key and method not in pages.skipped:
                    self._drafters.setdefault(page, set()).add(method)

    def _drop(self, page: int, claimed_by: Sequence | None = None) -> None:
        self._refs[page] -= 1
        if self._refs[page]:
            return
        if page in self._key:
            self._cached[page] = None
            return
        claim = range(0) if claimed_by is None else self._claims.get(claimed_by.id, range(0))
        self._state[page] = CLAIMED if page in claim else FREE
        self._num_taken -= 1

    def _next_page(self, seq: Sequence) -> int:
        claim, table = self._claims.get(seq.id, range(0)), self.of(seq).table
        following = table[-1] + 1 if table else claim.start
        if following < self.num_blocks and (
            self._state[following] == FREE or (self._state[following] == CLAIMED and following in claim)
        ):
            return following
        for state in (FREE, CLAIMED):
            page = self._state.find(state)
            if page >= 0:
                return page
        return self._evict()

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._index[self._key.pop(page)], self._content[page]
        for pages in self._found.values():
            while page in pages:
                pages.popitem()
        self._drafters.pop(page, None)
        self.slots.forget(page)
        self._state[page] = FREE
        self._num_taken -= 1
        return page

    # claims

    def _claim(self, seq: Sequence) -> None:
        pages, table = self.missing(seq, seq.request.max_len), self.of(seq).table
        while pages:
            following = table[-1] + 1 if table else self.num_blocks
            run = bytes(pages)  # FREE is the zero byte
            start = following if self._state[following : following + pages] == run else self._state.find(run)
            if start >= 0:
                self._claims[seq.id] = range(start, start + pages)
                self._state[start : start + pages] = bytes([CLAIMED]) * pages
                return
            pages //= 2

    def _unclaim(self, seq: Sequence) -> None:
        for page in self._claims.pop(seq.id, ()):
            if self._state[page] == CLAIMED:
                self._state[page] = FREE


def last_content(pages: dict[int, int]) -> int:
    """The content id of the last page found."""
    return next(reversed(pages.values()), ROOT)
